"""The loss scale of a step: settings and state together, one for all steps that were given the same object."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch

from amp_compiler.errors import AmpError
from amp_compiler.ops.loss_scale.base import HELD, LossScale, LossScaleState


class HeldScale:
    """What a loss scale is at present.

    Args:
        config: its settings.
        device: where its state lives.

    Attributes:
        config: its settings now; those of a loaded state take their place.
        state: its state now.
        assigned: how often a scale was set or a state loaded.
        last: which one that was, as text.
    """

    def __init__(self, config: LossScale, device: torch.device) -> None:
        self.config, self.device = config, device
        self.state = config.init(device)
        self.assigned, self.last = 0, ""

    @classmethod
    def of(cls, config: LossScale, argument: object, device: torch.device) -> HeldScale:
        """The one that belongs to an object that the user has given, a new one where that is no `LossScale`.

        Args:
            config: the settings that `argument` stands for.
            argument: what was passed as `loss_scale`. Two steps with the same object have one scale: each step of
                theirs counts, and a skipped one lowers the scale of both.
            device: of the step's parameters.

        Raises:
            AmpError: the object belongs to a step on another device.
        """
        if argument is not config:
            return cls(config, device)
        held: HeldScale | None = config.__dict__.get(HELD)
        if held is None:
            held = cls(config, device)
            object.__setattr__(config, HELD, held)  # its dataclass is frozen, this is none of its settings
        if held.device != device:
            raise AmpError(
                f"one loss scale for steps on {held.device} and {device}",
                hint="give each step a LossScale object of its own, or bring the models to one device",
            )
        return held

    def set(self, scale: Any) -> None:
        """Go on with another scale.

        Args:
            scale: a number, or a tensor of one, which is read from its device.

        Raises:
            AmpError: it is no number, or none that this loss scale can have.
        """
        one = isinstance(scale, torch.Tensor) and scale.numel() == 1
        if isinstance(scale, bool) or not (one or isinstance(scale, Real)):
            raise AmpError(f"loss_scale={scale!r} cannot be set", hint="assign one number, such as 1024.0")
        number = float(scale)
        self.config = self.config.with_scale(number)
        self.state.scale.fill_(number)
        self._note(number)

    def load(self, saved: Any) -> None:
        """Take over what `LossScale.state_dict` or a `torch.amp.GradScaler` saved.

        Raises:
            AmpError: keys are missing or do not fit the kind of loss scale.
        """
        config = self.config.matching(saved)
        self.state = LossScaleState(*config.load_state_dict(saved, self.device))
        self.config = config
        self._note(saved)

    def _note(self, value: Any) -> None:
        self.assigned, self.last = self.assigned + 1, repr(value)
