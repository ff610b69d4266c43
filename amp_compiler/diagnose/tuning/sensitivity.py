"""What rounding one node's inputs and result makes of the results, to first order, from one run in FP32.

Each node that is to be rounded is computed a second time from its FP32 inputs, rounded; the difference is what its
rounding adds. How much of it reaches the results is read from their gradients: those of a random projection `r·y` with
independent signs give the length of the vector that the difference becomes, on average over `r` (Hutchinson's trick).
For loss and gradients the projection is of the gradients, differentiated once more; what is added to the gradients
themselves, on their way back, is found the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

_PROJECTIONS = 4
_ADDS = ("add", "sub", "rsub", "sum", "mean")  # of aten
_CANCELS = 16.0  # times as large as a sum is what it adds up where that cancels: it loses four bits


@dataclass
class Estimate:
    """What is known of one node's rounding, gathered over batches.

    Args:
        name: the node.
        spread: the squared relative errors of the results that it makes, estimated and added up.
        spoilt: whether it makes an infinity or NaN.
        batches: that were gathered.
        least: the smallest magnitude in its FP32 result but zero; `None` where only the largest is known.
        greatest: the largest one.
        numbers: how many are not zero.
        zero: of these, how many the low type makes zero.
        subnormal: how many are subnormal in the low type.
        infinite: how many are infinite in it.
        cancelled: of a sum or difference that cancels, the largest magnitude of what it adds up; 0 for another node.
        step: the distance of the numbers of the low type at that magnitude.
    """

    name: str
    spread: float = 0.0
    spoilt: bool = False
    batches: int = 1
    least: float | None = math.inf
    greatest: float = 0.0
    numbers: int = 0
    zero: int = 0
    subnormal: int = 0
    infinite: int = 0
    cancelled: float = 0.0
    step: float = 0.0

    @property
    def error(self) -> float:
        """The relative error of the results that it makes, estimated; infinite where it makes an infinity or NaN."""
        return math.inf if self.spoilt else math.sqrt(self.spread / self.batches)

    @property
    def summary(self) -> str:
        """In words."""
        parts = ((self.infinite, "infinite"), (self.zero, "zero"), (self.subnormal, "subnormal"))
        lost = ", ".join(f"{_share(part / self.numbers)} becomes {what}" for part, what in parts if part)
        least = "up" if self.least is None else f"{self.least if self.numbers else 0:.2g}"
        magnitudes = f"it makes {least} to {self.greatest:.2g}"
        if self.least is None and math.isinf(self.error):
            return f"{magnitudes}, which becomes infinite"
        if self.cancelled:
            added = f"numbers up to {self.cancelled:.2g} that cancel"
            magnitudes += f" of {added}, where 16 bits have steps of {self.step:.2g}"
        return f"{magnitudes}, of which {lost}" if lost else magnitudes


def _share(part: float) -> str:
    return "all" if part == 1 else f"{part:.2%}" if part >= 1e-4 else "less than 0.01%"


def in_order(estimates: Mapping[str, Estimate], names: Sequence[str]) -> list[str]:
    """Nodes, the most sensitive first; of several alike the first in execution order. Unknown ones count as typical."""
    known = sorted(one.error for one in estimates.values() if math.isfinite(one.error))
    typical = known[len(known) // 2] if known else 0.0
    return sorted(names, key=lambda name: -(estimates[name].error if name in estimates else typical))


def likely_prefix(estimates: Mapping[str, Estimate], order: Sequence[str], tolerance: float) -> int:
    """How many of the most sensitive nodes have to be kept for a tolerance, by the estimates."""
    rest = 0.0
    for place in range(len(order) - 1, -1, -1):
        error = estimates[order[place]].error if order[place] in estimates else 0.0
        rest = math.hypot(rest, error)
        if rest > tolerance:
            return place + 1
    return 1


class _Tap(torch.autograd.Function):
    """The same value; what comes back has a zero added, by which the gradients can be differentiated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, zero: Tensor) -> Tensor:
        ctx.save_for_backward(zero)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (zero,) = ctx.saved_tensors
        return gradient + zero, None


@dataclass
class _Place:
    """One result of a node in the run of one batch."""

    name: str
    value: Tensor
    zero: Tensor
    difference: Tensor


class ProfiledRun(fx.Interpreter):
    """Runs a graph in FP32, with the rounding of some nodes measured beside it.

    Args:
        graph_module: the graph, of FP32.
        watched: names of the nodes in the plan, by the node of the graph.
        low: the 16-bit type.
        estimates: what is gathered, by name of the node in the plan.
        backward: whether gradients are differentiated.
        device: whose random numbers are drawn, beside the CPU's.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        watched: Mapping[fx.Node, str],
        low: torch.dtype,
        estimates: dict[str, Estimate],
        *,
        backward: bool,
        device: torch.device,
    ) -> None:
        super().__init__(graph_module, garbage_collect_values=True)
        self._watched, self._low, self._estimates, self._backward = watched, low, estimates, backward
        self._devices = [device] if device.type == "cuda" else []
        self.places: list[_Place] = []

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and a watched one again with everything rounded."""
        if n not in self._watched or n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with torch.no_grad(), torch.random.fork_rng(devices=self._devices):  # both draw the same random numbers
            rounded = pytree.tree_map(self._rounded, (args, kwargs))
            low = pytree.tree_map(self._rounded, self.call_function(n.target, *rounded))  # type: ignore[arg-type]
        value = self.call_function(n.target, args, kwargs)  # type: ignore[arg-type]
        if getattr(n.target, "__name__", "").partition(".")[0] in _ADDS and isinstance(value, Tensor):
            self._note_cancelling(self._of(self._watched[n]), args, value)
        if isinstance(value, (list, tuple)):
            return type(value)([self._tapped(self._watched[n], *pair) for pair in zip(value, low, strict=True)])
        return self._tapped(self._watched[n], value, low)

    def _of(self, name: str) -> Estimate:
        return self._estimates.setdefault(name, Estimate(name))

    def _note_cancelling(self, known: Estimate, args: Any, value: Tensor) -> None:
        """Note that a sum is small beside what it adds up, whose rounding in 16 bits it then is made of."""
        added = max((_largest(one) for one in pytree.tree_leaves(args) if isinstance(one, Tensor)), default=0.0)
        if added > known.cancelled and _largest(value) * _CANCELS <= added:
            known.cancelled, known.step = added, torch.finfo(self._low).eps * 2.0 ** math.floor(math.log2(added))

    def _rounded(self, one: Any) -> Any:
        if isinstance(one, Tensor) and one.dtype in (torch.float32, torch.float64):
            return one.detach().to(self._low).to(one.dtype)
        return one

    def _tapped(self, name: str, value: Any, low: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        self._measure(self._of(name), value.detach(), low)
        if not value.requires_grad:
            value = value.detach().requires_grad_()
        zero, tapped = value, value.view_as(value)
        if self._backward:
            zero = torch.zeros_like(value).requires_grad_()
            tapped = _Tap.apply(value, zero)  # type: ignore[no-untyped-call]
        self.places.append(_Place(name, tapped, zero, torch.nan_to_num(low - value.detach(), 0.0, 0.0, 0.0)))
        return tapped

    def _measure(self, known: Estimate, value: Tensor, low: Tensor) -> None:
        finite, info = torch.isfinite(value), torch.finfo(self._low)
        known.spoilt |= bool((finite & ~torch.isfinite(low)).any())
        sizes = value[finite].abs()
        sizes = sizes[sizes > 0]
        if not sizes.numel():
            return
        rounded = sizes.to(self._low).float()
        known.least = min(known.least or math.inf, float(sizes.min()))
        known.greatest = max(known.greatest, float(sizes.max()))
        known.numbers += sizes.numel()
        known.zero += int((rounded == 0).sum())
        known.infinite += int(torch.isinf(rounded).sum())
        known.subnormal += int(((rounded > 0) & (rounded < info.tiny)).sum())

    # ---- how much of it reaches the results

    def spread_to(self, results: Sequence[Tensor]) -> None:
        """Add what reaches some results, each measured by its norm.

        Args:
            results: with the graph of autograd behind them.
        """
        places = [place.value for place in self.places]
        floats = [one for one in results if one.is_floating_point() and one.requires_grad]
        for number in range(_PROJECTIONS if floats and places else 0):
            total = sum((_projected(one, number) for one in floats), torch.zeros(()))
            gradients = torch.autograd.grad(total, places, retain_graph=True, allow_unused=True)
            self._add(gradients, [place.difference for place in self.places], _PROJECTIONS)

    def spread_to_gradients(
        self, loss: Tensor, parameters: Sequence[Tensor], scale: float, *, falls: bool
    ) -> list[Tensor | None]:
        """Add what reaches the loss, and its gradients; where these cannot be differentiated, the loss alone.

        Args:
            loss: a scalar, not scaled.
            parameters: what the gradients are of.
            scale: the loss scale, with which gradients are rounded.
            falls: whether that falls where gradients are too large with it.

        Returns:
            The gradients of the parameters.
        """
        places = [place.value for place in self.places]
        count, differences = len(parameters), [place.difference for place in self.places]
        gradients = torch.autograd.grad(loss, [*parameters, *places], create_graph=True, allow_unused=True)
        if falls:
            scale = max(min(scale, _fitting(gradients[count:], self._low)), 1.0)
        size = abs(float(loss.detach()))
        if size:  # no error is relative to a loss of 0
            self._add(
                [None if one is None else one.detach().double() / size for one in gradients[count:]], differences, 1
            )
        back = [self._lost(place, one, scale) for place, one in zip(self.places, gradients[count:], strict=True)]
        floats = [one for one in gradients[:count] if one is not None and one.requires_grad]
        floor = 1e-3 * math.sqrt(sum(float(one.detach().double().square().sum()) for one in floats))
        zeros = [place.zero for place in self.places]
        for number in range(_PROJECTIONS if floats and places else 0):
            total = sum((_projected(one, number, floor) for one in floats), torch.zeros(()))
            try:
                second = torch.autograd.grad(total, [*places, *zeros], retain_graph=True, allow_unused=True)
            except (RuntimeError, NotImplementedError):  # an op whose backward has no derivative
                break
            self._add(second[: len(places)], differences, _PROJECTIONS)
            self._add(second[len(places) :], back, _PROJECTIONS)
        return [None if one is None else one.detach() for one in gradients[:count]]

    def _lost(self, place: _Place, gradient: Tensor | None, scale: float) -> Tensor:
        """What rounding does to the gradient of a result, which carries the loss scale."""
        if gradient is None:
            return torch.zeros_like(place.value)
        held = gradient.detach()
        rounded = (held * scale).to(self._low).to(held.dtype) / scale
        self._of(place.name).spoilt |= bool((torch.isfinite(held) & ~torch.isfinite(rounded)).any())
        return torch.nan_to_num(rounded - held, 0.0, 0.0, 0.0)

    def _add(self, gradients: Sequence[Tensor | None], differences: Sequence[Tensor], parts: int) -> None:
        for place, gradient, difference in zip(self.places, gradients, differences, strict=True):
            if gradient is None:
                continue
            moved = float((gradient.detach().double() * difference.double()).sum())
            if math.isfinite(moved):
                self._of(place.name).spread += moved**2 / parts
            else:
                self._of(place.name).spoilt = True


def _largest(value: Tensor) -> float:
    """The largest magnitude among the finite floating-point numbers of a tensor; 0 where there is none."""
    sizes = value.detach().abs() if value.is_floating_point() else value.new_empty(0)
    sizes = sizes[torch.isfinite(sizes)]
    return float(sizes.max()) if sizes.numel() else 0.0


def _fitting(gradients: Sequence[Tensor | None], low: torch.dtype) -> float:
    """The greatest power of two with which gradients fit into half of a type's range, but for the largest twentieth."""
    finite = [one.detach()[torch.isfinite(one.detach())] for one in gradients if one is not None]
    sizes = sorted((float(one.abs().max()) for one in finite if one.numel()), reverse=True)
    rest = [size for size in sizes[max(1, len(sizes) // 20) :] if size]
    return 2.0 ** math.floor(math.log2(torch.finfo(low).max / 2 / rest[0])) if rest else math.inf


def _projected(result: Tensor, number: int, floor: float = 0.0) -> Tensor:
    """A result times random signs, over its norm."""
    generator = torch.Generator().manual_seed(number)
    signs = (torch.randint(0, 2, result.shape, generator=generator) * 2 - 1).to(result)
    norm = max(float(result.detach().double().norm()), floor, torch.finfo(torch.float32).tiny)
    finite = torch.where(torch.isfinite(result.detach()), result, torch.zeros_like(result))
    return ((finite * signs).sum() / norm).cpu()
