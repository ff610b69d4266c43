"""Loss scales against a real `torch.amp.GradScaler`, their bounds, their state and their traceability."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.errors import AmpError, LossScaleError
from amp_compiler.ops.loss_scale import (
    DynamicLossScale,
    LossScale,
    LossScaleState,
    NoLossScale,
    NormAdaptiveLossScale,
    NvcaffeLossScale,
    StaticLossScale,
)

KINDS = [NoLossScale(), NoLossScale(check_finite=False), StaticLossScale(128.0), DynamicLossScale()]
KINDS += [DynamicLossScale(hysteresis=3, min=1.0, max=2.0**20), NormAdaptiveLossScale()]
KINDS += [DynamicLossScale(hysteresis=2, consecutive_hysteresis=False, growth_delay=1), NvcaffeLossScale(1000.0)]
KINDS += [NvcaffeLossScale(8.0, formula="l2")]
FACTORS = {
    "init_scale": st.sampled_from([65536.0, 1.0, 1000.0, 0.1, 2.0**126, 3.0e38]),
    "growth_factor": st.sampled_from([2.0, 4.0, 1.1, 3.7, 1.0001]),
    "backoff_factor": st.sampled_from([0.5, 0.25, 0.9, 0.3]),
    "growth_interval": st.integers(1, 5),
}
SKIPS = st.lists(st.booleans(), max_size=50)


class Reference:
    """A real GradScaler over one CPU parameter, with gradients made by hand."""

    def __init__(self, **options: float) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", **options)
        self.scaler.scale(torch.zeros(()))  # GradScaler makes its tensors at the first loss

    def step(self, bad: bool) -> None:
        self.parameter.grad = torch.full((1,), math.inf if bad else 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def numbers(self) -> tuple[float, int]:
        return self.scaler.get_scale(), self.scaler._get_growth_tracker()


def step(
    scaling: LossScale, state: LossScaleState, bad: bool, norm: float | None = None, calls: int = 1
) -> LossScaleState:
    given_norm = None if norm is None else torch.tensor(norm)
    for _ in range(calls):
        state = scaling.next(state, torch.tensor(float(bad)), given_norm)
    return state


def numbers(state: LossScaleState) -> tuple[float, int]:
    return float(state.scale), int(state.growth_tracker)


def scales(scaling: LossScale, flags: str, norms: list[float] | None = None) -> list[float]:
    """The scale after each step; `x` in `flags` is a non-finite step."""
    state, seen = scaling.init("cpu"), []
    for index, flag in enumerate(flags):
        state = step(scaling, state, flag == "x", norms[index] if norms else None)
        seen.append(float(state.scale))
    return seen


@pytest.mark.parametrize("bad, steps, last", [(False, 130, 2.0**127), (True, 142, 2.0**-126)])
def test_the_trajectory_is_that_of_grad_scaler_out_to_the_ends_of_fp32(bad, steps, last) -> None:
    reference, scaling = Reference(growth_interval=1), DynamicLossScale(growth_interval=1)
    state = scaling.init("cpu")
    for _ in range(steps):
        reference.step(bad)
        state = step(scaling, state, bad)
        assert numbers(state) == reference.numbers()
    assert float(step(scaling, state, bad).scale) == float(state.scale) == last
    assert float(scaling.inverse(state)) == 1 / last


@settings(deadline=None, max_examples=150)
@given(st.fixed_dictionaries(FACTORS), SKIPS, SKIPS)
def test_a_run_is_that_of_grad_scaler_and_moves_both_ways(options, before, after) -> None:
    old, scaling = Reference(**options), DynamicLossScale(**options)
    state = scaling.init("cpu")
    for bad in before:
        old.step(bad)
        state = step(scaling, state, bad)
        assert numbers(state) == old.numbers()
    assert scaling.inverse(state).equal(old.scaler._scale.double().reciprocal().float())
    assert int(state.skipped_steps) == sum(before)
    ours, theirs = json.loads(json.dumps(scaling.state_dict(state))), old.scaler.state_dict()
    assert {key: ours[key] for key in theirs} == theirs and set(ours) - set(theirs) == {"amp_compiler"}

    new = Reference()
    new.scaler.load_state_dict(ours)
    taken = DynamicLossScale().matching(theirs)
    state = taken.load_state_dict(theirs, "cpu")
    for bad in after:
        new.step(bad)
        old.step(bad)
        state = step(taken, state, bad)
        assert numbers(state) == new.numbers() == old.numbers()


@pytest.mark.parametrize("scaling", KINDS, ids=repr)
def test_a_state_dict_brings_back_every_number(scaling: LossScale) -> None:
    state = scaling.init("cpu")
    for bad in (True, False, True, True):
        state = step(scaling, state, bad, norm=3.0)
    saved = scaling.state_dict(state)
    assert list(saved)[:5] == list(torch.amp.GradScaler("cpu").state_dict())
    loaded = scaling.load_state_dict(saved, "cpu")
    assert loaded == state and [value.dtype for value in loaded] == [value.dtype for value in state]


@pytest.mark.parametrize("scaling, scale", [(StaticLossScale(100.0), 100.0), (NoLossScale(), 1.0)])
def test_a_grad_scaler_keeps_the_scale_of_a_constant_loss_scale(scaling: LossScale, scale: float) -> None:
    reference = Reference()
    reference.scaler.load_state_dict(scaling.state_dict(scaling.init("cpu")))
    for count in range(2001):
        reference.step(bad=count == 0)
    assert reference.scaler.get_scale() == scale
    # and back: what the other kind of run saved does not change a constant
    assert float(scaling.load_state_dict(Reference().scaler.state_dict(), "cpu").scale) == scale
    assert float(scaling.load_state_dict({}, "cpu").scale) == scale


def test_a_saved_state_that_does_not_fit_is_refused() -> None:
    saved = Reference(growth_interval=7).scaler.state_dict()
    with pytest.raises(AmpError, match=r"growth_interval=7, this one 2000; use .*matching"):
        DynamicLossScale().load_state_dict(saved, "cpu")
    with pytest.raises(AmpError, match="no 'scale'"):
        DynamicLossScale().load_state_dict({}, "cpu")
    fitting = DynamicLossScale(growth_interval=7, max=1024.0)
    assert float(fitting.load_state_dict(saved, "cpu").scale) == 1024.0
    for key, value in {"scale": math.nan, "_growth_tracker": 0.5}.items():
        with pytest.raises(AmpError, match=key):
            fitting.load_state_dict({**saved, key: value}, "cpu")
    adaptive = NormAdaptiveLossScale(growth_interval=7)
    assert float(adaptive.load_state_dict({**saved, "scale": 1000.0}, "cpu").scale) == 512.0
    # GradScaler's scale can fall to 0, which has no inverse
    assert float(fitting.load_state_dict({**saved, "scale": 0.0}, "cpu").scale) == 2.0**-126


def test_hysteresis_counts_non_finite_steps_in_a_row() -> None:
    scaling = DynamicLossScale(init_scale=16.0, hysteresis=3, growth_interval=2)
    #                                 two do not lower it; the third does, and each after it; a finite step starts anew
    assert scales(scaling, "xx.xxxx.xx") == [16, 16, 16, 16, 16, 8, 4, 4, 4, 4]
    assert scales(scaling, ".x.x..") == [16, 16, 16, 16, 16, 32]  # a step without effect still restarts the growth


def test_floor_and_ceiling_hold_and_keep_powers_of_two() -> None:
    scaling = DynamicLossScale(init_scale=16.0, min=3.0, max=100.0, growth_interval=1)
    assert (scaling.floor, scaling.ceiling) == (4.0, 64.0)
    assert scales(scaling, "xxx.....") == [8, 4, 4, 8, 16, 32, 64, 64]
    other = DynamicLossScale(init_scale=10.0, min=3.0, max=100.0, growth_interval=1)  # never was a power of two
    assert scales(other, "xx" + "." * 6) == [5, 3, 6, 12, 24, 48, 96, 100]
    assert DynamicLossScale(max=1024.0).first == 1024.0 and DynamicLossScale(min=2.0**20).first == 2.0**20


def test_steps_at_the_floor_end_in_an_error_that_names_what_is_wrong() -> None:
    scaling = DynamicLossScale(init_scale=4.0, min=1.0, patience=3)
    state = step(scaling, scaling.init("cpu"), bad=True, calls=4)  # two to come down, two at the floor
    assert int(state.floor_steps) == 2 and not scaling.stuck(state)
    scaling.check(state)
    assert int(step(scaling, state, bad=False).floor_steps) == 0
    with pytest.raises(LossScaleError, match=r"3 steps in a row at the loss scale 1.*parameters: fc\.w; nodes: exp_1"):
        scaling.check(step(scaling, state, bad=True), parameters=["fc.w"], nodes=["exp_1"])
    error = LossScaleError("no", parameters=[f"p{index}" for index in range(7)])
    assert (
        str(error) == "no (first non-finite parameters: p0, p1, p2, p3, p4 and 2 more)" and len(error.parameters) == 7
    )


def test_a_constant_scale_counts_and_stays() -> None:
    for scaling in (NoLossScale(patience=2), StaticLossScale(100.0, patience=2)):
        state = step(scaling, scaling.init("cpu"), bad=True, calls=2)
        assert float(state.scale) == scaling.first == scaling.constant
        assert (int(state.skipped_steps), bool(scaling.stuck(state))) == (2, True)
        assert not scaling.stuck(step(scaling, state, bad=False))
    unchecked = NoLossScale(check_finite=False)
    assert not unchecked.checks_finite and NoLossScale().checks_finite
    assert step(unchecked, unchecked.init("cpu"), bad=True) == unchecked.init("cpu")


@settings(deadline=None, max_examples=100)
@given(st.floats(2.0**-60, 2.0**60, width=32), st.booleans())
def test_the_norm_adaptive_scale_brings_the_norm_to_its_target(norm: float, exact: bool) -> None:
    norm = 2.0 ** math.floor(math.log2(norm)) if exact else norm
    state = step(NormAdaptiveLossScale(), NormAdaptiveLossScale().init("cpu"), bad=False, norm=norm)
    scale = float(state.scale)
    assert math.frexp(scale)[0] == 0.5
    # 4096 / norm is rounded to fp32 once, so that the upper bound holds to half a unit in the last place
    assert 4096.0 / 2 < scale * norm <= 4096.0 * (1 + 2.0**-24)
    assert scale * norm == 4096.0 or not exact


def test_the_norm_adaptive_scale_learns_from_overflows() -> None:
    scaling = NormAdaptiveLossScale(growth_interval=3, max=2.0**20)
    norms = [1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 64.0, 1.0, 0.0, math.inf]
    #        4096  4096  overflow: limit 2048, for three steps   | 64 | limit 4096 again; the last two say nothing
    expected = [4096, 4096, 2048, 2048, 2048, 4096, 64, 4096, 4096, 4096]
    assert scales(scaling, "..x.......", norms) == expected
    assert scales(NormAdaptiveLossScale(min=8.0, max=32.0), "..", [1e-9, 1e9]) == [32, 8]
    assert scales(NormAdaptiveLossScale(hysteresis=2), ".xx", [1.0, 64.0, 64.0]) == [4096, 4096, 2048]
    with pytest.raises(AmpError, match="norm"):
        step(scaling, scaling.init("cpu"), bad=False)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.floats(1e-30, 1e30)), max_size=30))
def test_the_norm_adaptive_scale_stays_a_power_of_two_in_its_bounds(steps) -> None:
    scaling = NormAdaptiveLossScale(growth_interval=2, min=3.0, max=1e6)
    state = scaling.init("cpu")
    for bad, norm in steps:
        state = step(scaling, state, bad, norm)
        assert 4.0 <= float(state.scale) <= float(state.limit) <= 2.0**19
        assert math.frexp(float(state.scale))[0] == 0.5
        assert float(scaling.inverse(state)) * float(state.scale) == 1.0


@settings(deadline=None, max_examples=200)
@given(st.floats(0.0, width=32) | st.just(math.nan), st.floats(2.0**-20, 2.0**20, width=32), st.booleans())
def test_the_scales_of_nvcaffe_are_its_formulas_to_the_bit(norm: float, coefficient: float, largest: bool) -> None:
    scaling = NvcaffeLossScale(coefficient, formula="max" if largest else "l2")
    assert scaling.norm_order == (math.inf if largest else 2)
    with np.errstate(over="ignore", divide="ignore"):
        factor = np.float32(4) / np.float32(norm) if largest else np.float32(norm)
        wanted = factor * np.float32(coefficient) if 0 < norm < math.inf else np.float32(coefficient)
    bounds = np.float32(2.0**-126), np.finfo(np.float32).max
    state = step(scaling, scaling.init("cpu"), bad=False, norm=norm)
    assert float(state.scale) == float(np.clip(wanted, *bounds)) and scaling.first == 1.0
    assert float(scaling.load_state_dict(scaling.state_dict(state), "cpu").scale) == float(state.scale)


def test_a_scale_of_nvcaffe_can_be_set_but_not_loaded_from_nothing() -> None:
    scaling = NvcaffeLossScale()
    assert scaling.with_scale(3.0) is scaling and scaling.constant is None
    with pytest.raises(AmpError, match="needs the norm"):
        step(scaling, scaling.init("cpu"), bad=False)
    saved = scaling.state_dict(scaling.init("cpu"))
    with pytest.raises(AmpError, match="scale=0"):
        scaling.load_state_dict({**saved, "scale": 0.0}, "cpu")


@pytest.mark.parametrize("scaling", KINDS, ids=repr)
def test_next_is_pure_and_traced_without_reads_or_host_constants(scaling: LossScale) -> None:
    def run(state: LossScaleState, flag: torch.Tensor, norm: torch.Tensor):
        after = scaling.next(state, flag, norm)
        return after, scaling.inverse(after), scaling.stuck(after)

    example = (scaling.init("cpu"), torch.tensor(0.0), torch.tensor(1.0))
    traced = make_fx(run, tracing_mode="fake")(*example)
    targets = {str(node.target) for node in traced.graph.nodes}
    assert not {name for name in targets if "scalar_dense" in name or name.startswith("_tensor_constant")}
    state = example[0]
    for flag, norm in ((0.0, 3.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (0.0, 1e-3)):
        inputs = (state, torch.tensor(flag), torch.tensor(norm))
        kept = [value.clone() for value in state]
        (after, *_), expected = traced(*inputs), run(*inputs)
        assert traced(*inputs) == expected and all(map(torch.equal, state, kept))
        state = after
    # a read of a meta tensor raises, and so does a mix of devices
    args = scaling.init("meta"), torch.empty((), device="meta"), torch.empty((), device="meta")
    after, *others = run(*args)
    assert {value.device.type for value in (*after, *others)} == {"meta"}
    assert [(one.shape, one.dtype) for one in after] == [(one.shape, one.dtype) for one in state]


@pytest.mark.compiles
@pytest.mark.parametrize("scaling", [KINDS[4], NormAdaptiveLossScale(growth_interval=2)], ids=repr)
def test_inductor_gives_the_same_bits(scaling: LossScale) -> None:
    compiled = torch.compile(lambda state, flag, norm: scaling.next(state, flag, norm), fullgraph=True)
    state = scaling.init("cpu")
    for flag, norm in ((0.0, 3.0), (1.0, math.nan), (1.0, 1.0), (1.0, math.inf), (0.0, 1e-3), (0.0, 1e30)):
        inputs = (state, torch.tensor(flag), torch.tensor(norm))
        expected = scaling.next(*inputs)
        assert compiled(*inputs) == expected
        state = expected
