"""How DeepSpeed counts overflows, as plain Python: the rules of its loss scalers, written anew.

Facts of `deepspeed/runtime/fp16/loss_scaler.py` and `fused_optimizer.py`; their versions are in
`tests/rules/lists/deepspeed.yaml`.
"""

from dataclasses import dataclass


class AtMinimum(Exception):
    """An overflow at the minimum scale, where DeepSpeed ends the run."""


@dataclass
class Scaler:
    """DeepSpeed's scaler of ZeRO steps.

    Args:
        scale: first scale.
        window: `loss_scale_window`.
        hysteresis: overflows until it backs off.
        consecutive: `consecutive_hysteresis`.
        least: `min_loss_scale`.
        delay: 1 since 0.17.1 (and always in its optimizers without ZeRO, which know no hysteresis), 0 before.
    """

    scale: float
    window: int
    hysteresis: int = 1
    consecutive: bool = False
    least: float = 1.0
    delay: int = 1

    def __post_init__(self) -> None:
        self.left, self.step_number, self.last = self.hysteresis, 0, -1

    def step(self, overflow: bool) -> float:
        """The scale of the next step."""
        if overflow:
            if self.left == 1:
                if self.scale == self.least:
                    raise AtMinimum
                self.scale = max(self.scale / 2, self.least)
            else:
                self.left -= 1
            self.last = self.step_number
        else:
            if self.consecutive:
                self.left = self.hysteresis
            good = self.step_number - self.last - self.delay
            if good > 0 and good % self.window == 0:
                self.left = self.hysteresis
                self.scale *= 2
        self.step_number += 1
        return self.scale
