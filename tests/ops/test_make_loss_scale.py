"""Settings of a loss scale as a user or a rule file gives them: read, or refused with the hint."""

import math

import pytest

from amp_compiler.errors import AmpError
from amp_compiler.ops.loss_scale import (
    DynamicLossScale,
    NoLossScale,
    NormAdaptiveLossScale,
    NvcaffeLossScale,
    StaticLossScale,
    make_loss_scale,
)


def test_make_loss_scale_reads_arguments_and_rule_files() -> None:
    section = {"mode": "dynamic", "init": 1024, "growth_interval": 10, "max": None, "hysteresis": 2}
    message = DynamicLossScale(init_scale=1024.0, growth_interval=10, hysteresis=2)
    assert make_loss_scale(section) == make_loss_scale("dynamic", section) == make_loss_scale(message) == message
    assert hash(make_loss_scale(section)) == hash(message)
    assert make_loss_scale("dynamic") == make_loss_scale({}) == DynamicLossScale()
    assert make_loss_scale("norm_adaptive", section) == NormAdaptiveLossScale() != DynamicLossScale()
    assert make_loss_scale({"mode": "norm_adaptive", "init": 8, "target_norm": 64}).first == 8.0
    assert make_loss_scale(None, section) == make_loss_scale("none") == NoLossScale()
    assert make_loss_scale(128, section) == make_loss_scale({"mode": "static", "init": 128}) == StaticLossScale(128.0)
    section = {"mode": "dynamic", "hysteresis": 2, "consecutive_hysteresis": False, "growth_delay": 1}
    assert make_loss_scale(section) == DynamicLossScale(hysteresis=2, consecutive_hysteresis=False, growth_delay=1)
    section = {"mode": "nvcaffe", "coefficient": 32, "formula": "l2"}
    assert make_loss_scale(section) == NvcaffeLossScale(32.0, "l2") and make_loss_scale("nvcaffe").coefficient == 1.0
    assert make_loss_scale({"mode": "none", "check_finite": False}) == NoLossScale(check_finite=False)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("dynamics", "'dynamics' is not known; use one of 'none', 'static', 'dynamic', 'norm_adaptive', 'nvcaffe'"),
        ("static", "no scale; give 'init'"),
        (True, "loss_scale=True is not known"),
        (0, "scale must be a positive number"),
        (math.nan, "scale must be"),
        (10**400, "scale must be"),
        ({"growth_intervall": 5}, "did you mean 'growth_interval'"),
        ({"mode": "static", "init": 2, "growth_factor": 2}, "mode 'static' has no 'growth_factor'"),
        ({"mode": ["dynamic"]}, "is not known"),
        ({"growth_factor": 1.0}, "growth_factor must be a finite number above 1, not 1.0; for example"),
        ({"growth_factor": math.inf}, "growth_factor must be"),
        ({"backoff_factor": 1}, "backoff_factor must be a number between 0 and 1"),
        ({"backoff_factor": 0.0}, "backoff_factor must be"),
        ({"growth_interval": 0}, "growth_interval must be a whole number from 1"),
        ({"growth_interval": 2.5}, "growth_interval must be"),
        ({"hysteresis": True}, "hysteresis must be"),
        ({"patience": 0}, "patience must be"),
        ({"growth_delay": -1}, "growth_delay must be a whole number from 0"),
        ({"consecutive_hysteresis": 1}, "consecutive_hysteresis must be True or False"),
        ({"mode": "nvcaffe", "coefficient": 0}, "coefficient must be a positive number"),
        ({"mode": "nvcaffe", "formula": "l1"}, "formula must be 'max' or 'l2'"),
        ({"mode": "nvcaffe", "init": 8}, "mode 'nvcaffe' has no 'init'"),
        ({"init": "65536"}, "init_scale must be"),
        ({"init": 1e39}, "init_scale must be"),
        ({"min": -1.0}, "min must be"),
        ({"min": 8.0, "max": 4.0}, "min must be no more than max=4.0"),
        ({"mode": "norm_adaptive", "backoff_factor": 0.3}, "backoff_factor must be a power of two, not 0.3"),
        ({"mode": "norm_adaptive", "min": 5.0, "max": 6.0}, "power of two from min=5.0"),
        ({"mode": "none", "check_finite": 1}, "check_finite must be True or False"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_with_the_fix(wrong: object, message: str) -> None:
    with pytest.raises(AmpError) as caught:
        make_loss_scale(wrong)
    assert message in str(caught.value) and caught.value.hint
