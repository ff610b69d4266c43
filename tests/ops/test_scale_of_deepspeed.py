"""A dynamic loss scale set as DeepSpeed's goes DeepSpeed's way, over any row of overflows."""

import torch
from deepspeed_scaler import AtMinimum, Scaler
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amp_compiler.ops.loss_scale import DynamicLossScale, LossScaleState

OVERFLOWS = st.lists(st.booleans(), max_size=60)


def ways(scaling: DynamicLossScale, scaler: Scaler, overflows: list[bool]) -> tuple[list[float], list[float]]:
    """The scales of both, up to where DeepSpeed ends the run; then ours is stuck, and not before."""
    state, ours, theirs = scaling.init("cpu"), [], []
    for overflow in overflows:
        state = LossScaleState(*scaling.next(state, torch.tensor(float(overflow))))
        try:
            theirs.append(scaler.step(overflow))
        except AtMinimum:
            assert scaling.stuck(state)
            return ours, theirs
        assert not scaling.stuck(state)
        ours.append(float(state.scale))
    return ours, theirs


@settings(deadline=None, max_examples=150)
@given(
    overflows=OVERFLOWS,
    window=st.integers(1, 5),
    hysteresis=st.integers(1, 4),
    consecutive=st.booleans(),
    delay=st.integers(0, 1),
    least=st.sampled_from([1.0, 4.0, 16.0]),
)
@example([True, False] * 12, 3, 2, False, 1, 1.0)
@example([True, False] * 12, 3, 2, True, 1, 1.0)
@example([True] * 12, 1, 3, False, 1, 16.0)
def test_the_scale_goes_as_deepspeeds(
    overflows: list[bool], window: int, hysteresis: int, consecutive: bool, delay: int, least: float
) -> None:
    scaling = DynamicLossScale(
        init_scale=16.0,
        growth_interval=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        growth_delay=delay,
        min=least,
        patience=1,
    )
    ours, theirs = ways(scaling, Scaler(16.0, window, hysteresis, consecutive, least, delay), overflows)
    assert ours == theirs
