"""A tuned step whose update begins beside the end of the backward, on a CPU, where it runs in order."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, eager
from amp_compiler.backends.backend import TUNED
from amp_compiler.ops.branch import Branch, share_memory
from amp_compiler.passes.step.backward_cut import CutStepParts
from amp_compiler.passes.step.branch_update import BESIDE, END, BranchUpdate
from amp_compiler.passes.step.cut_step import BEFORE
from amp_compiler.training import build

WIDE, WORDS = 16, 24
aten = torch.ops.aten
UNCHECKED = amp.NoLossScale(check_finite=False)


class Tied(nn.Module):
    """An embedding that is the classifier too, a norm, a residual, a frozen layer and one that is used twice."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDE)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))
        self.norm = nn.LayerNorm(WIDE)
        self.layers[1].weight.requires_grad_(False)

    def forward(self, x):
        h = self.table(x)
        for one in (*self.layers, self.layers[2]):
            h = h + F.gelu(one(h))
        return F.linear(self.norm(h.float()), self.table.weight)


def classes(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def trained(make, steps=3, kind=torch.optim.AdamW, passes=(), **options):
    torch.manual_seed(0)
    model = make()
    options = {"loss_scale": UNCHECKED, **options}
    step = amp.training_step(model, classes, kind(model.parameters(), 1e-2), dtype="bf16", passes=passes, **options)
    x = torch.randint(0, WORDS, (4, 6))
    losses = [step(x, x.roll(1, 1)) for _ in range(steps)]
    return step, model, [*losses, *model.state_dict().values(), *step.gradients().values()]


def branched():
    return [amp.pipelines.DEVICE.skip("branch_update").insert_after("cut_step", BranchUpdate(lambda *_: "", least=0))]


@pytest.fixture
def by_node(monkeypatch):
    """A compiler that runs what it is given node by node."""
    found = dataclasses.replace(BACKENDS["inductor"], build=eager.build, modes={TUNED: eager.build})
    monkeypatch.setitem(BACKENDS, "inductor", found)


@pytest.fixture(params=["where the branch ends", "at once"])
def either_way(request, monkeypatch):
    """Early updates run behind the end of the backward, or before it: beside it is both, and all between."""

    def at_once(branch, run, given, changed):
        def beside(*inputs):
            run(*inputs[:given])
            return ()

        return beside

    if request.param == "at once":
        monkeypatch.setattr(Branch, "forked", at_once)


def pieces(step):
    """The text of the graphs of a step behind the pass, by name; the outer one under an empty name."""
    first, *others = step.stages["branch_update"].text.split("\ngraph ")
    return {"": first, **{name: text for name, _, text in (one.partition("\n") for one in others)}}


def test_the_numbers_are_those_of_a_step_without_a_branch(by_node, either_way):
    _, _, expected = trained(Tied)
    step, _, found = trained(Tied, passes=branched())
    assert all(map(torch.equal, found, expected))
    graphs = pieces(step)
    assert {BEFORE, BESIDE, END} <= set(graphs)
    assert "model_table_weight" not in graphs[BESIDE], "its gradient is made last"
    # One update for weights with a copy in 16 bits and one for the norm's, all of which are early.
    assert graphs[BESIDE].count("amp_compiler.adam_update") == 2 and graphs[""].count("amp_compiler.adam_update") == 1


class Scaled(nn.Module):
    """A residual that is scaled by a weight: the gradient of the one is made of the other, and read far behind."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDE)
        self.first, self.second, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WORDS)
        self.scale = nn.Parameter(torch.rand(WIDE))

    def forward(self, x):
        h = F.gelu(self.first(self.table(x)).float())
        return self.last(self.scale * (h + self.second(h).float()))


@pytest.fixture
def cut_behind(monkeypatch):
    """Has the backward cut at a place of one's own: the n-th that can be."""

    def chosen(number):
        monkeypatch.setattr(CutStepParts, "best_cut", lambda step, least: _cuts(step)[number])

    return chosen


def _cuts(step):
    return [cut for cut in map(step._cut_at, sorted(step._products()[0])) if cut is not None]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_weight_of_which_something_is_made_again_waits(by_node, either_way, cut_behind, number):
    _, _, expected = trained(Scaled)
    cut_behind(number)
    step, _, found = trained(Scaled, passes=branched())
    assert all(map(torch.equal, found, expected))
    graphs = pieces(step)
    assert not all("in p_model_scale:" in graphs[name] for name in (BESIDE, END))


class OfOneMemory(Scaled):
    """A buffer that is the memory of a weight, of which pieces are read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("halves", self.scale.detach())

    def forward(self, x):
        h = self.first(self.table(x)).float()
        h = torch.cat([one * half for one, half in zip(h.chunk(2, -1), self.halves.split(WIDE // 2), strict=True)], -1)
        return self.last(self.scale * self.second(h).float())


def test_weights_that_share_memory_with_something_have_no_branch(by_node, monkeypatch):
    monkeypatch.setattr(build, "_TRIED", "cpu")
    monkeypatch.setattr(build, "try_beside", lambda *_: "")
    monkeypatch.setattr(BranchUpdate, "__init__", lambda self, try_beside=None: _set(self, try_beside))
    step, _, _ = trained(OfOneMemory, mode=TUNED)
    assert BESIDE not in step.stages["branch_update"].text
    (note,) = [note for note in step.plan.notes if "update beside the backward" in note]
    assert "a weight shares memory with another tensor" in note
    step, _, _ = trained(Scaled, mode=TUNED)
    assert BESIDE in step.stages["branch_update"].text


@pytest.mark.slow
@pytest.mark.compiles
def test_the_numbers_are_the_same_compiled():
    make = lambda: nn.Sequential(nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WIDE), nn.GELU(), nn.Linear(WIDE, WORDS))  # noqa: E731
    _, _, expected = trained(make)
    step, _, found = trained(make, passes=branched())
    assert all(map(torch.equal, found, expected)) and BESIDE in pieces(step)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"clip_norm": 1.0}, id="clipping"),
        pytest.param({"loss_scale": amp.NoLossScale()}, id="check"),
        pytest.param({"accumulate": 2}, id="gathered batches"),
        pytest.param({"kind": torch.optim.SGD}, id="one count for all weights"),
        pytest.param({"kind": torch.optim.Adagrad}, id="traced"),
    ],
)
def test_a_step_that_must_know_all_gradients_first_has_no_branch(by_node, options):
    _, _, expected = trained(Tied, **options)
    step, _, found = trained(Tied, passes=branched(), **options)
    assert all(map(torch.equal, found, expected)) and BESIDE not in step.stages["branch_update"].text


def test_it_is_tried_out_in_the_tuned_mode_alone(by_node, monkeypatch):
    asked = []

    def refused(update, arguments, product, operands):
        asked.append((update, [len(one) for one in arguments[:2]], product))
        assert all(one.shape for one in operands)
        return "takes-1.02-of-the-time-of-both-in-turn"

    monkeypatch.setattr(build, "_TRIED", "cpu")
    monkeypatch.setattr(build, "try_beside", refused)
    monkeypatch.setattr(BranchUpdate, "__init__", lambda self, try_beside=None: _set(self, try_beside))
    step, _, _ = trained(Tied)
    assert not asked and not step.plan.notes
    step, _, _ = trained(Tied, mode=TUNED)
    (known,) = asked
    assert known[0] is torch.ops.amp_compiler.adam_update.default and known[2] is torch.ops.aten.mm.default
    notes = [note for note in step.plan.notes if "update beside the backward" in note]
    assert notes == ["update beside the backward takes 1.02 of the time of both in turn (at before_check)"]


def _set(self, try_beside):
    object.__setattr__(self, "try_beside", try_beside)
    object.__setattr__(self, "least", 0.0)


def test_a_backward_that_fails_at_its_end_has_changed_no_weight(by_node):
    """Out of memory, say: what is not captured runs in order."""

    def build_run(graph_module, inputs, round_exactly=False):
        targets = {node.target for node in graph_module.graph.nodes}
        if aten.mm.default in targets and aten.embedding.default not in targets:
            return failing
        return eager.build(graph_module, inputs, round_exactly)

    def failing(*given):
        raise torch.OutOfMemoryError("planted")

    BACKENDS["inductor"] = dataclasses.replace(BACKENDS["inductor"], build=build_run)
    torch.manual_seed(0)
    model = Tied()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = amp.training_step(model, classes, optimizer, dtype="bf16", passes=branched(), loss_scale=UNCHECKED)
    x = torch.randint(0, WORDS, (4, 6))
    with pytest.raises(Exception, match="planted"):
        step(x, x)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


class Stream:
    """Stands in for a stream of `torch.cuda`, and notes what happens."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self):
        self.log.append(f"on {self.name}")

    def __exit__(self, *_):
        self.log.append(f"behind {self.name}")


@pytest.mark.parametrize("capturing", [False, True])
def test_what_is_captured_runs_on_the_branch_and_all_else_where_it_ends(capturing, monkeypatch):
    log = []
    main = Stream("main", log)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream("branch", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    branch = Branch()
    weight, other = torch.ones(3), torch.ones(2)
    for read in (other, weight[1:]):
        del log[:]
        branch.forked(lambda *given: log.append(f"updates {given[0].tolist()}"), 1, [0])(weight, read)
        log.append("the end of the backward")
        branch.join(weight)
        forked = ["branch waits for main", "on branch", "updates [1.0, 1.0, 1.0]", "behind branch"]
        if capturing and read is other:
            assert log == [*forked, "the end of the backward", "main waits for branch"]
        else:
            assert log == ["the end of the backward", "updates [1.0, 1.0, 1.0]"]


def test_a_part_that_waits_keeps_nothing_of_a_call_that_failed():
    branch, gradient = Branch(), torch.ones(3)
    branch.forked(lambda *_: None, 1, [0])(gradient)
    gone = weakref.ref(gradient)
    del gradient
    assert gone() is None


def test_which_tensors_lie_in_the_memory_of_a_changed_one():
    whole = torch.zeros(4, 6)
    left, right = whole[:2], whole[2:]
    assert (
        share_memory([left], [right, whole]) and share_memory([left, whole], []) and share_memory([whole], [whole.t()])
    )
    assert not share_memory(
        [left, right], [torch.zeros(3), 1, None, whole[:0], whole.to_sparse()]
    ) and not share_memory([right], [left, left])
