"""What a step finds as it left it is not looked up again; whatever is assigned in between is seen at once."""

import copy
import gc
import math
import weakref

import pytest
import torch
from fake_graphs import FakeGraphs
from torch import nn
from toys import classes, eager_step

import amp_compiler as amp
from amp_compiler.backends.batch_buffers import Buffers
from amp_compiler.training.reporting.scale_watch import StuckWatch

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(200, 6, 4, generator=GENERATOR)
Y = torch.randint(0, 4, (200, 6), generator=GENERATOR)


pytestmark = pytest.mark.usefixtures("node_by_node")


class Scale(nn.Module):
    def __init__(self, value) -> None:
        super().__init__()
        self.register_buffer("value", torch.full((4,), value))

    def forward(self, x):
        return x * self.value


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh())
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.ones(()))
        self.scale = Scale(1.0)
        self.register_buffer("offset", torch.zeros(4))

    def forward(self, x):
        x = self.norm(self.layers(x)) * self.gain + self.offset
        return self.scale(self.out(x))


class Run:
    """One training run; `noted=False`: every call looks everything up, as the first one does."""

    def __init__(self, noted: bool, graphs: bool, kind=torch.optim.AdamW, **options) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = kind(self.model.parameters(), 0.05)
        settings = {"dtype": "bf16", "loss_scale": "dynamic", **options}
        self.step = amp.training_step(self.model, classes, self.optimizer, **settings)
        if graphs:
            self.step._state.graphs.api = FakeGraphs()
        if not noted:
            self.step._detector._is_same = lambda: False
        self.results: list[torch.Tensor] = []
        torch.manual_seed(1)

    def train(self, calls: int) -> None:
        for _ in range(calls):
            number = len(self.results) // 2
            self.results += [self.step(X[number], Y[number]), self.step.grad_norm]

    @property
    def found_anew(self) -> bool:
        return self.step._last[0].update.found_anew

    def everything(self) -> list[torch.Tensor]:
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        return [*self.results, *self.model.state_dict().values(), *states, *self.step._scale]


def weight(run):
    return run.model.out.weight


def group(run):
    return run.optimizer.param_groups[0]


def moment(run):
    return run.optimizer.state[weight(run)]["exp_avg"]


def replaced(run, old, new):
    """Put a parameter into the place of another one in the optimizer."""
    parameters = group(run)["params"]
    parameters[[p is old for p in parameters].index(True)] = new


def new_weight(run):
    old, run.model.out.weight = weight(run), nn.Parameter(torch.full((4, 4), 0.1))
    replaced(run, old, weight(run))


def new_group(run):
    run.optimizer.param_groups[0] = {**group(run), "lr": 0.5}


def lr_as_a_tensor(run):
    group(run)["lr"] = torch.tensor(0.5)
    run.train(2)
    group(run)["lr"].fill_(0.001)


def betas_in_a_list(run):
    group(run)["betas"] = betas = [0.9, 0.999]
    run.train(2)
    betas[0] = 0.1


def loaded_optimizer(run):
    saved = copy.deepcopy(run.optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"].zero_()
    run.optimizer.load_state_dict(saved)


def swapped_groups(run):
    parameters = group(run)["params"]
    group(run)["params"] = parameters[2:]
    run.optimizer.add_param_group({"params": parameters[:2], "lr": 0.5})


def moved_between_groups(run):
    swapped_groups(run)
    run.train(3)
    groups = run.optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())  # one behind the other they are as before


def steps_of_the_optimizer(run):
    for parameter in group(run)["params"]:
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    run.optimizer.zero_grad()


QUIET = {  # the program stays, its tensors or numbers are others
    "new data": lambda run: setattr(weight(run), "data", torch.full((4, 4), 0.1)),
    "written in place": lambda run: weight(run).detach().mul_(0.5),
    "moved": lambda run: run.model.to(torch.float64).to(torch.float32),
    "new rate": lambda run: group(run).update(lr=0.5),
    "new group": new_group,
    "rate as a tensor": lr_as_a_tensor,
    "betas in a list": betas_in_a_list,
    "new decay": lambda run: group(run).update(weight_decay=0.5),
    "loaded optimizer": loaded_optimizer,
    "no state": lambda run: run.optimizer.state.clear(),
    "new state of one": lambda run: run.optimizer.state[weight(run)].update(exp_avg=torch.ones(4, 4)),
    "state moved in place": lambda run: setattr(moment(run), "data", torch.ones(4, 4)),
    "state written": lambda run: moment(run).fill_(1.0),
    "new buffer": lambda run: setattr(run.model, "offset", torch.ones(4)),
    "new module without parameters": lambda run: setattr(run.model, "scale", Scale(3.0)),
    "buffer written": lambda run: run.model.offset.fill_(2.0),
    "loaded scale": lambda run: run.step.load_state_dict({**run.step.state_dict(), "scale": 4.0}),
    "steps of the optimizer": steps_of_the_optimizer,
}
CAPTURED = {  # another program; what Dynamo's guards see of modules and hooks is in tests/behaviour
    "new weight": new_weight,
    "frozen": lambda run: weight(run).requires_grad_(False),
    "amsgrad": lambda run: group(run).update(amsgrad=True),
    "transposed data": lambda run: setattr(weight(run), "data", weight(run).data.t()),
    "moved between groups": moved_between_groups,
    "buffer in another type": lambda run: setattr(run.model.offset, "data", run.model.offset.data.half()),
}
CHANGES = QUIET | CAPTURED
TOGETHER = [("new weight", "frozen", "amsgrad"), ("moved between groups", "transposed data", "buffer in another type")]


def same_runs(changes, graphs: bool = True, **options) -> None:
    """Make the changes one after another, between calls that find all as they left it, and between calls that do not
    look for that: both runs are the same to the bit."""
    results = []
    for noted in (True, False):
        run = Run(noted, graphs, **options)
        for change in changes:
            run.train(5 if "accumulate" in options else 3)
            assert run.found_anew is not noted, change  # else nothing is tried here
            CHANGES[change](run)
        run.train(3)
        results.append(run.everything())
    assert len(results[0]) == len(results[1])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "changes",
    [tuple(QUIET), TOGETHER[0], pytest.param(TOGETHER[1], marks=pytest.mark.slow)],
    ids=lambda changes: changes[0],
)
def test_a_change_is_seen_at_the_next_call(changes):
    same_runs(changes)


LOW = {"dtype": "bf16", "loss_scale": None, "rules": {"version": 1, "extends": "default", "weights": {"master": "low"}}}
WRITTEN = ("written in place", "new rate", "loaded optimizer", "frozen")


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        (WRITTEN, {"accumulate": 2, "dtype": "fp16", "clip_norm": 1.0}),
        (("written in place", "new state of one", "loaded optimizer"), LOW),
        pytest.param(WRITTEN, {"kind": torch.optim.RAdam, "graphs": False}, marks=pytest.mark.slow),
    ],
    ids=["accumulate", "no masters", "traced, no graphs"],
)
def test_changes_are_seen_by_steps_of_every_kind(changes, options):
    same_runs(changes, **options)


def test_weights_beside_the_model_may_be_others_later():
    torch.manual_seed(0)
    model, beside = nn.Linear(4, 4), [nn.Parameter(torch.full((4,), value)) for value in (1.0, 2.0)]
    reference, held = copy.deepcopy(model), beside[0]

    def loss(model, x):
        return (model(x) * held).square().mean()

    step = eager_step(model, loss, torch.optim.SGD([*model.parameters(), *beside], 0.1), enabled=False)
    for number in range(6):
        held = beside[number in (3, 4)]
        reference.load_state_dict(model.state_dict())
        expected = loss(reference, X[number])
        (gradient,) = torch.autograd.grad(expected, held)
        after = [one.detach() - 0.1 * gradient * (one is held) for one in beside]
        torch.testing.assert_close(step(X[number]), expected.detach())
        torch.testing.assert_close([one.detach() for one in beside], after)


def test_two_steps_that_write_the_same_parameters_stay_quick():
    run = Run(True, graphs=False)
    other = amp.training_step(run.model, classes, torch.optim.SGD(run.model.parameters(), 0.1), dtype="fp16")
    for number in range(8):
        other(X[number], Y[number])
        run.train(1)
        assert number < 2 or (not run.found_anew and not other._last[0].found_anew)


@pytest.mark.usefixtures("few_objects")
def test_a_batch_is_not_kept_alive_by_what_is_remembered():
    run = Run(True, graphs=False)
    run.train(4)
    x = torch.randn(6, 4)
    gone = weakref.ref(x)
    run.step(x, Y[0])
    run.train(1)
    del x
    gc.collect()
    assert gone() is None and not run.found_anew


@pytest.mark.parametrize("change", ["new data", "state moved in place", "new state of one"])
def test_what_lies_elsewhere_is_captured_anew(change):
    """A replay would use the old address, which the stand-in for graphs does not show."""
    run = Run(True, graphs=True)
    run.train(6)
    assert not run.found_anew and run.step.execution == "as one graph, replayed as a CUDA graph"
    CHANGES[change](run)
    run.train(1)
    assert run.found_anew and run.step.execution != "as one graph, replayed as a CUDA graph"


def test_beside_a_replay_two_calls_go_to_the_device():
    run = Run(True, graphs=True, dtype="fp16", clip_norm=1.0)
    run.step._watch = StuckWatch(torch.device("meta"))  # on a GPU it looks at every eighth step
    run.train(6)
    run.step._last[0].compiled.run._graph.replay = lambda: None
    x, y = X[0], Y[0]
    with torch.autograd.profiler.profile() as profiler:
        run.step(x, y)
    operators = [event for event in profiler.function_events if event.name.startswith("aten::")]
    called = [event.name for event in operators if event.cpu_parent not in operators]
    assert not run.found_anew
    assert [name for name in called if name not in ("aten::view", "aten::expand", "aten::detach")] == [
        "aten::_foreach_copy_",
        "aten::clone",
    ]


def test_a_batch_of_several_types_is_copied():
    shapes = {torch.float32: (3, 5), torch.int64: (3, 2), torch.bool: (7,), torch.bfloat16: (4, 2), torch.int32: ()}
    batch = [torch.arange(math.prod(shape)).reshape(shape).to(dtype) for dtype, shape in shapes.items()]
    wide = [batch[0].expand(2, 3, 5), batch[0].t(), batch[1], batch[0].view(-1).unfold(0, 3, 1)]
    for args in (batch, batch[:2], batch[2:3], wide, [batch[0], batch[0] * 2]):
        inputs = [None, *args]
        buffers = Buffers(inputs, range(1, len(inputs)))
        fixed = buffers.put_into(inputs)
        for _ in range(2):
            buffers.fill(inputs)
            for stored, tensor in zip(fixed[1:], args, strict=True):
                assert torch.equal(stored, tensor) and stored.stride() == tensor.stride()
                assert stored.data_ptr() != tensor.data_ptr()
            for tensor in batch:
                tensor.copy_(tensor.flip(0) if tensor.dim() else tensor + 1)
