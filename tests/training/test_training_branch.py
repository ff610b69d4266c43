"""A tuned step whose update begins beside the end of the backward, on a CPU, where it runs in order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, eager
from amp_compiler.backends.backend import TUNED
from amp_compiler.ops.branch import Branch
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


def pieces(step):
    """The text of the graphs of a step behind the pass, by name; the outer one under an empty name."""
    first, *others = step.stages["branch_update"].text.split("\ngraph ")
    return {"": first, **{name: text for name, _, text in (one.partition("\n") for one in others)}}


def test_the_numbers_are_those_of_a_step_without_a_branch(by_node):
    _, _, expected = trained(Tied)
    step, _, found = trained(Tied, passes=branched())
    assert all(map(torch.equal, found, expected))
    graphs = pieces(step)
    assert {BEFORE, BESIDE, END} <= set(graphs)
    assert "model_table_weight" not in graphs[BESIDE], "its gradient is made last"
    # One update for weights with a copy in 16 bits and one for the norm's, all of which are early.
    assert graphs[BESIDE].count("amp_compiler.adam_update") == 2 and graphs[""].count("amp_compiler.adam_update") == 1


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
        branch.forked(lambda *given: log.append(f"updates {given[0].tolist()}"), 1)(weight, read)
        log.append("the end of the backward")
        branch.join(weight)
        forked = ["branch waits for main", "on branch", "updates [1.0, 1.0, 1.0]", "behind branch"]
        if capturing and read is other:
            assert log == [*forked, "the end of the backward", "main waits for branch"]
        else:
            assert log == ["the end of the backward", "updates [1.0, 1.0, 1.0]"]
