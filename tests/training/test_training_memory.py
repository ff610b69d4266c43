"""Memory of a compiled step on a CPU: one block from the second call on, and nothing that a caller holds lies in it."""

import copy
import inspect
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fx_reader import parse_fx
from torch import nn

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, eager, inductor
from amp_compiler.ops.cpu.arena import ArenaRun
from amp_compiler.training import build as step_build

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 20, 24, generator=GENERATOR)
Y = torch.randint(0, 7, (12, 20), generator=GENERATOR)
SIZES = (14, 20)  # of the batches in turn: the second program needs a larger block than the first
STEPS = 8
MOST_KEPT = 8  # requests for what outlives a step: five results and three readings
OPTIONS = {"plain": {}, "accumulate": {"accumulate": 2}}

SMALL = """
in x: bf16[20, 24]
sum_1: bf16[20] = aten.sum.dim_IntList(x, [1])
exp: bf16[20] = aten.exp.default(sum_1)
return sum_1, exp
"""

guards = pytest.importorskip("torch._C._dynamo.guards")
pytestmark = pytest.mark.skipif(
    not hasattr(guards, "_empty_strided_cpu"), reason="the code of this torch's Inductor asks for memory elsewhere"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(24, 136, bias=False), nn.BatchNorm1d(136), nn.Linear(136, 7)

    def forward(self, x):
        hidden = F.relu(self.norm(self.a(x)))
        return self.b(hidden), hidden


def loss_fn(model, x, y):
    logits, hidden = model(x)
    loss = F.cross_entropy(logits, y)
    return loss, {"loss": loss, "logits": logits, "hidden": hidden, "view": hidden.t()[3:9]}


def make(backend="inductor", **options):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    inputs = {"backend": backend, "dtype": "bf16", "dynamic_shapes": None} | options  # a program for each of two sizes
    return model, amp.training_step(model, loss_fn, optimizer, **inputs)


def batch(number):
    size = SIZES[number % len(SIZES)]
    return X[number][:size], Y[number][:size]


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def places(step):
    """Where the last step's gradients lie, or the factors of those that are not made."""
    gradients = step._last[1].gradients
    factors = [[one] if isinstance(one, torch.Tensor) else [one.left, one.right] for one in gradients]
    return {storage(tensor) for pair in factors for tensor in pair}


class Run:
    """A short training: what each step gave, with copies made at once, and how often it asked for ordinary memory."""

    def __init__(self, **options) -> None:
        self.options, self.requests, self.counts = options, 0, []
        self.places, self.blocks, self.held = [], [], []
        allocate, build = guards._empty_strided_cpu, BACKENDS["inductor"].build

        def counted(*request):
            self.requests += 1
            return allocate(*request)

        def remembered(subgraph, inputs, round_exactly):
            self.rounds = round_exactly
            return build(subgraph, inputs, round_exactly)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(guards, "_empty_strided_cpu", counted)
            patch.setitem(BACKENDS, "inductor", replace(BACKENDS["inductor"], build=remembered))
            patch.setattr(step_build, "ArenaRun", partial(ArenaRun, least=0))  # however small the model is
            self.model, self.step = make(**options)
            for number in range(STEPS):
                self.train(number)
        self.end = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.used = [inspect.unwrap(program.compiled.run._run) for program in self.step._choice.programs.values()]

    @property
    def block(self):
        return self.step._state.memory._block

    def train(self, number):
        before = self.requests
        loss, aux = self.step(*batch(number))
        self.counts.append(self.requests - before)
        self.places.append(places(self.step))
        self.blocks.append(storage(self.block))
        held = {"returned": loss, "norm": self.step.grad_norm, **aux, **self.step.gradients()}
        self.held.append((held, {name: value.clone() for name, value in held.items()}))


@pytest.fixture(scope="module", params=["plain", pytest.param("accumulate", marks=pytest.mark.slow)])
def run(request):
    return Run(**OPTIONS[request.param])


@pytest.mark.compiles
def test_from_the_third_step_on_one_block_holds_all_but_what_is_kept(run):
    assert all(count > 2 * MOST_KEPT for count in run.counts[:2])
    assert all(0 < count <= MOST_KEPT for count in run.counts[2:])
    assert len({*run.counts[2::2]}) == len({*run.counts[3::2]}) == 1
    assert all(result == {block} for result, block in zip(run.places[2:], run.blocks[2:], strict=True))
    assert len({*run.blocks[3:]}) == 1


@pytest.mark.compiles
def test_two_programs_share_a_block_as_large_as_the_larger_needs(run):
    assert len(run.used) == 2 and all(isinstance(one, ArenaRun) for one in run.used)
    sizes = [one._plan.size for one in run.used]
    assert 0 < min(sizes) < max(sizes) == run.block.numel()


@pytest.mark.compiles
def test_what_earlier_steps_gave_keeps_its_values(run):
    assert len(run.held) == STEPS
    for held, copies in run.held:
        assert set(held) >= {"returned", "norm", "loss", "logits", "hidden", "view", "a.weight", "b.bias"}
        for name, value in held.items():
            assert torch.equal(value, copies[name]) and storage(value) != storage(run.block), name
        assert torch.equal(held["returned"], held["loss"].float())
        assert torch.equal(held["view"], held["hidden"].t()[3:9]) and bool(held["hidden"].any())
    for name in ("returned", "norm"):
        assert len({float(copies[name]) for _, copies in run.held}) == STEPS


@pytest.mark.compiles
def test_the_training_is_that_of_the_eager_backend(run):
    model, step = make("eager", **run.options)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    for number, (_, copies) in enumerate(run.held):
        loss, aux = step(*batch(number))
        torch.testing.assert_close(copies["returned"], loss, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(copies["norm"], step.grad_norm, rtol=5e-2, atol=1e-2)
        torch.testing.assert_close(copies["hidden"], aux["hidden"], rtol=5e-2, atol=1e-1)
        for name, gradient in step.gradients().items():
            assert (copies[name] - gradient).norm() <= 0.05 * gradient.norm(), name
    assert int(run.end["norm.num_batches_tracked"]) == STEPS
    for name, value in model.state_dict().items():
        moved = (value - start[name]).float().norm()
        assert moved > 0 and (run.end[name] - value).float().norm() <= 0.05 * moved, name


@pytest.mark.compiles
def test_a_user_who_compiles_the_same_graph_gets_ordinary_memory(run):
    """A small one that Inductor has compiled for us before and finds in its cache."""
    from torch._inductor.compile_fx import compile_fx

    subgraph, inputs, round_exactly = parse_fx(SMALL), [X[0].bfloat16()], run.rounds
    settings = {"reorder_for_peak_memory": False, "triton.cudagraphs": False, "emulate_precision_casts": round_exactly}
    mine = inductor.compile_graph(copy.deepcopy(subgraph), inputs, round_exactly)
    theirs = compile_fx(copy.deepcopy(subgraph), inputs, config_patches=settings)
    kept = []
    for number in range(2 * len(SIZES)):
        with torch.no_grad():
            outputs = [one for call in (theirs, mine) for one in call(*inputs)]
        kept += [(one, one.clone()) for one in outputs]
        run.step(*batch(number))
        assert places(run.step) == {storage(run.block)}
    assert kept and all(torch.equal(value, same) and storage(value) != storage(run.block) for value, same in kept)


@pytest.mark.parametrize("case", ["eager", "dynamic_shapes"])
def test_steps_that_ask_anew_at_each_call_have_no_block(case, monkeypatch):
    monkeypatch.setitem(BACKENDS, "inductor", replace(BACKENDS["inductor"], build=eager.build))
    rows = {0: torch.export.Dim("rows", min=2, max=64)}
    _, step = make("eager") if case == "eager" else make(dynamic_shapes=(rows, rows))
    for number in range(4):
        step(*batch(number))
    assert step._state.memory._block.numel() == 0
    runs = [program.compiled.run for program in step._choice.programs.values()]
    assert not any(isinstance(inspect.unwrap(run._run), ArenaRun) for run in runs)
