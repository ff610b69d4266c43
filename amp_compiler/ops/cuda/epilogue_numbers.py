"""Whether results of an operator of `ops.epilogues` are what a product and loops give, on random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.epilogues import ACTIVATION, GELU, GRADIENT, WITH_SUM, composed, shown

_SEED = 0


class Numbers:
    """Arguments of an operator, and what is right for them.

    Args:
        operator: one of `epilogues.OPERATORS`.
        given: its arguments, as `random_like` makes them; a NaN is put into them when `checks` comes to that.
    """

    def __init__(self, operator: Any, given: Sequence[Any]) -> None:
        self.operator, self.given = operator, given
        self._expected = self._composed()

    def checks(self) -> Iterator[tuple[str, Callable[[Sequence[Tensor]], bool]]]:
        """What results must withstand, each by a name for where it fails; they are computed anew for each."""
        spread = _spread(self.operator, *self.given)
        yield "other-numbers", lambda results: self._agree(results, spread)
        if GELU in self.given:
            yield "another-GELU", self._are_by_tanh
        self._put_nan()
        yield "NaN-is-lost-or-made", self._spread_nan

    def _composed(self) -> Sequence[Tensor]:
        return shown(self.operator, self.given, composed(self.operator, *self.given))

    def _pairs(self, results: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(shown(self.operator, self.given, results), self._expected, strict=True)

    def _agree(self, results: Sequence[Tensor], spread: Sequence[Any]) -> bool:
        eps = torch.finfo(results[0].dtype).eps
        return all(
            _near(*pair, wide, eps) if pair[0].is_floating_point() else _same_signs(*pair, wide, eps)
            for pair, wide in zip(self._pairs(results), spread, strict=True)
        )

    def _are_by_tanh(self, results: Sequence[Tensor]) -> bool:
        """Whether GELU is the one by tanh. No element by itself tells: both are within its rounding."""
        argument = (results[1] if self.operator is ACTIVATION else self.given[2]).float()
        away = []
        for form in ("tanh", "none"):
            if self.operator is ACTIVATION:
                expected = torch.nn.functional.gelu(argument, approximate=form)
            else:
                gradient = torch.mm(self.given[0], self.given[1]).float()
                expected = torch.ops.aten.gelu_backward.default(gradient, argument, approximate=form)
            away.append((results[0].float() - expected).square().sum(dtype=torch.float64))
        return bool(away[0] < away[1])

    def _put_nan(self) -> None:
        self.given[0][1, 0] = torch.nan
        if self.operator is WITH_SUM and not self.given[2]:
            self.given[1][0, 1] = torch.nan
        self._expected = self._composed()

    def _spread_nan(self, results: Sequence[Tensor]) -> bool:
        """Whether NaN comes through where it does in the loops, and nowhere else: it tells of a step's overflow."""
        return all(
            torch.equal(*((one.isnan() if one.is_floating_point() else one[1]) for one in pair))
            for pair in self._pairs(results)
        )


def random_like(arguments: Sequence[Any]) -> list[Any]:
    """Random operands whose product is of about 1, drawn beside the user's own random numbers.

    Args:
        arguments: of an operator, with fake tensors.
    """
    device = arguments[0].device
    generator = torch.Generator(device).manual_seed(_SEED)
    made = []
    for place, one in enumerate(arguments):
        if not isinstance(one, Tensor):
            made.append(one)
            continue
        values = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
        if one.dtype is torch.uint8:
            made.append(values.random_(256, generator=generator))
            continue
        values.normal_(generator=generator)
        made.append(values.mul_(one.shape[0] ** -0.5) if place == 1 else values)
    return made


def _spread(operator: Any, left: Tensor, right: Tensor, *rest: Any) -> tuple[Any, Any]:
    """For each result, how large what it is made of may be: see `_near`."""
    if operator is WITH_SUM:
        return 0.0, 0.0
    product = torch.mm(left, right) if operator is GRADIENT or rest[0] is None else torch.addmm(rest[0], left, right)
    if operator is ACTIVATION:
        return product.float().abs_(), product.float().abs_()
    gradient = composed(operator, left, right, *rest)[0] if rest[2] else None
    return product.float().abs_(), 0.0 if gradient is None else gradient.float().square_().sum(0).sqrt_()


def _near(found: Tensor, expected: Tensor, spread: Any, eps: float) -> bool:
    """Whether two roundings explain a difference.

    One side rounds what the other does not (`spread`; the slope of GELU is at most 1.13), and both round their result.
    So they differ by at most one unit in the last place (`eps`) of each. Twice that is allowed, and an eighth of a unit
    of 1, for sums in FP32 in another order and for a hyperbolic tangent in hardware. Sums over rows differ by what was
    rounded in each row, which goes with the root of the sum of squares.
    """
    room = 2 * eps * (expected.float().abs() + spread) + eps / 8
    return bool(((found.float() - expected.float()).abs() <= room).all())


def _same_signs(found: Tensor, expected: Tensor, spread: Any, eps: float) -> bool:
    """Whether bits are the same, but for elements about 0, whose sign is that of the last sum."""
    return bool(((found == expected) | (spread < eps / 8)).all())
