"""`Parts`: weights whose masters and optimizer states are split over the ranks: each holds and updates a part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.passes.step.shard_update import part_of
from amp_compiler.ranks.ranks import Ranks

UNSPLIT = "leave `shard: update` out of the rules' `reduce` section"


class Parts:
    """Which weights are split over the ranks, and this rank's part of a tensor of such a weight.

    Part `r` of N is the r-th of N slices of equal length of all elements in row-major order, the last ones filled up
    with zeros; so what lies where depends on the weight alone, and not on how gradients are sent.

    Args:
        ranks: the processes; `None` for one, for which nothing is split.

    Example:
        >>> Parts(None).of(torch.arange(3.0))
        tensor([0., 1., 2.])
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks
        self.count, self.rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        self._split: dict[int, str] = {}
        self._whole: dict[int, str] = {}
        self.names: tuple[str, ...] = ()

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._split

    def decide(self, parameter: Tensor, name: str, fits: bool) -> bool:
        """Whether a weight is split: what is decided when a graph first reads it holds from then on.

        Args:
            parameter: the weight.
            name: its qualified name.
            fits: whether the graph reads it in the low type alone.

        Raises:
            CaptureError: another graph read it in the low type alone, and this one does not.
        """
        if id(parameter) in self._split and not fits:
            raise CaptureError(
                f"the parameter '{name}' is split over the ranks in 16 bits, and is read in FP32 now", hint=UNSPLIT
            )
        if fits and id(parameter) not in self._whole and parameter.numel() >= self.count:
            self._split[id(parameter)] = name
            self.names = tuple(sorted(self._split.values()))
        elif id(parameter) not in self._split:
            self._whole[id(parameter)] = name
        return id(parameter) in self._split

    @property
    def decided(self) -> dict[str, bool]:
        """Whether each weight is split that was decided on, by name."""
        return {**dict.fromkeys(self._whole.values(), False), **dict.fromkeys(self.names, True)}

    def size(self, tensor: Tensor) -> int:
        """Number of elements of a part."""
        return part_of(tensor, self.count)

    def of(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor, [size], in memory of its own."""
        size, flat = self.size(tensor), tensor.detach().reshape(-1)
        part = flat[self.rank * size : (self.rank + 1) * size]
        missing = size - part.numel()
        return torch.nn.functional.pad(part, (0, missing)) if missing else part.clone()

    def zeros(self, parameter: Tensor) -> Tensor:
        """New FP32 state of this rank's part of a weight."""
        return torch.zeros(self.size(parameter), dtype=torch.float32, device=parameter.device)

    def held(self, state: dict[str, Any], column: str, parameter: Tensor) -> Tensor:
        """This rank's part of a state; cut, in the state, where a whole one was loaded.

        Args:
            state: the optimizer's state of the weight.
            column: key in it.
            parameter: the weight.

        Raises:
            AmpError: it is neither.
        """
        value: Tensor = state[column]
        if value.shape == parameter.shape:
            value = state[column] = self.of(value)
        if value.shape != (self.size(parameter),):
            raise AmpError(
                f"optimizer.state holds '{column}' of shape {list(value.shape)} for a parameter of"
                f" {list(parameter.shape)}, split over {self.count} ranks",
                hint="load what optimizer.state_dict() gave, which is whole",
            )
        return value

    def whole_on_save(self, optimizer: torch.optim.Optimizer, begin: Callable[[], None]) -> None:
        """Let `optimizer.state_dict()` give whole tensors: all ranks have to call it then.

        Args:
            optimizer: whose state is split.
            begin: sees to it that all ranks are there.
        """

        def whole(one: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            order = [parameter for group in one.param_groups for parameter in group["params"]]
            split = {number: parameter for number, parameter in enumerate(order) if parameter in self}
            if not any(number in saved["state"] for number in split):
                return saved
            begin()
            state = dict(saved["state"])
            for number in sorted(split.keys() & state.keys()):
                state[number] = self._gathered(state[number], split[number])
            return {**saved, "state": state}

        optimizer.register_state_dict_post_hook(whole)

    def _gathered(self, state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
        gathered = dict(state)
        for column in sorted(key for key, value in state.items() if isinstance(value, Tensor) and value.dim()):
            gathered[column] = self.whole(self.held(gathered, column, parameter), parameter)
        return gathered

    def whole(self, part: Tensor, parameter: Tensor) -> Tensor:
        """The parts of all ranks, in the shape of the weight; all wait for all.

        Args:
            part: [size], this rank's.
            parameter: the weight.
        """
        if self._ranks is None:
            return part.reshape(parameter.shape)
        return self._ranks.gather(part)[: parameter.numel()].view(parameter.shape)
