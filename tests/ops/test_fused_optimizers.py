"""Every fused optimizer as its description says: nothing here knows one by name.

The Triton kernels stand in `kernels_interpreted.py`, with the same arguments.
"""

import functools

import pytest
import torch
from toys import plain_step
from update_arguments import EVERY, NAMES, assert_same_bits, copies, update_arguments

import amp_compiler as amp
from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update import reference
from amp_compiler.ops.update.formulas import exact_sqrt
from amp_compiler.ops.update.fused import FusedOptimizer, State
from amp_compiler.ops.update.operators import FUSED
from amp_compiler.ops.update.sgd import SGD

SIZES = (0, 1, 7, 16383, 16384, 16385, 3 * 16384 + 5)  # around kRun in chunks.h


NUMBERS = [
    {"beta1": 0.5, "started": 0.0, "step": 0.0},
    {"beta1": 0.0, "more": 0.1},
    {"momentum": 0.9, "started": 0.0, "weight_decay": 0.1, "step": 999.0},
    {"more": 0.1, "skip": 1.0},
]
needs_loops = pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine")


def run_by_loop(one, inputs):
    """Leaves the bits of the formula."""
    expected = copies(inputs)
    reference.update(one, one.bound(False, expected), exact_sqrt)
    cpu_update.update(one, one.bound(False, inputs))
    assert_same_bits(inputs, expected)


@needs_loops
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
@pytest.mark.parametrize(("one", "flags"), EVERY, ids=NAMES)
def test_the_loop_gives_the_bits_of_the_formula(one, flags, numbers):
    inputs = update_arguments(one, flags, SIZES, watched=True, **numbers)
    before = copies(inputs)
    if "skip" in numbers:
        cpu_update.update(one, one.bound(False, inputs))
        assert_same_bits(inputs, before)
        return
    run_by_loop(one, inputs)
    assert not any(map(torch.equal, inputs[0][1:], before[0][1:]))


@needs_loops
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e38, 1e-42, -0.0])
@pytest.mark.parametrize("one", FUSED, ids=lambda one: one.name)
def test_odd_values_come_out_as_of_the_formula(one, value):
    inputs = update_arguments(one, {}, SIZES, more=0.1, coef=1.0, watched=True)
    for tensor in (*inputs[0][1:], *inputs[1][1:]):
        tensor[0] = value
    run_by_loop(one, inputs)


@pytest.mark.parametrize("one", FUSED, ids=lambda one: one.name)
def test_a_step_trains_as_torch_does(one):
    """Eagerly, in FP32: what differs is the square root, which is correctly rounded here."""
    result, x = [], torch.linspace(-1, 1, 20).reshape(4, 5)

    def loss_of(module, batch):
        return module(batch).square().mean()

    for fused in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        optimizer = one.classes[0](model.parameters(), lr=0.05, foreach=False)
        step = functools.partial(plain_step, model, loss_of, optimizer)
        if fused:
            step = amp.training_step(model, loss_of, optimizer, enabled=False, backend="eager")
        for _ in range(4):
            step(x)
        if fused:
            assert f"amp_compiler.{one.operator(low=False)}.default" in step.stages["fuse_update"].text
        result.append([parameter.detach() for parameter in model.parameters()])
    for mine, theirs in zip(*result, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


def test_a_step_count_of_another_type_is_taken_over():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] = state["step"].double()  # as torch makes it under set_default_dtype(torch.float64)
    step = amp.training_step(model, lambda m, x: m(x).sum(), optimizer, enabled=False, backend="eager")
    step(torch.ones(1, 2))
    assert {(state["step"].dtype, float(state["step"])) for state in optimizer.state.values()} == {(torch.float32, 2.0)}


@pytest.mark.parametrize(
    ("states", "flags"),
    [("abcd", ("maximize",)), (("hyper",), ("maximize",)), (("square",), ())],
    ids=["four states", "a reserved name", "no maximize"],
)
def test_what_the_loops_have_no_place_for_is_refused(states, flags):
    with pytest.raises(LoweringError, match="at most 3 states"):
        FusedOptimizer(
            name="odd",
            classes=(),
            states=tuple(map(State, states)),
            hyper={},
            flags=dict.fromkeys(flags, lambda optimizer, group: False),
            numbers=SGD.numbers,
            step=SGD.step,
        )
