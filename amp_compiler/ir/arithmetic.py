"""`Fp8`: how a product of 16-bit operands is computed in 8 bits, as `math: fp8` of a rule says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Format = Literal["e4m3", "hybrid"]
Scaling = Literal["tensorwise", "rowwise", "delayed", "mx"]
Word = Literal["fp8"]
_HISTORY = 16
_TEXT = re.compile(
    rf"fp8\(({'|'.join(get_args(Format))}), ({'|'.join(get_args(Scaling))}), power_of_2=(true|false),"
    r" weight_gradient=(fp8|low), unfit=(low|refuse)(?:, history=([0-9]+))?\)"
)


@dataclass(frozen=True, slots=True)
class Fp8:
    """How the operands of a product are scaled and rounded to FP8 (OFP8, Micikevicius et al. 2022).

    A scale `s` maps the largest magnitude of what shares it to the largest number of the format; an operand is
    `round(x * s) / s`. The product accumulates in FP32, and its result has 16 bits.

    Args:
        format: `e4m3` for all operands, or `hybrid`: E5M2, with its wider range, for incoming gradients.
        scaling: `tensorwise`, one scale for an operand; `rowwise`, one for each row of the left operand and each
            column of the right one; `delayed`, one for an operand, from what it was in training steps before; `mx`, a
            power of two for each 32 numbers along the sum (OCP MX 1.0).
        power_of_2: scales are rounded down to powers of two, so that scaling itself rounds nothing.
        weight_gradient: `fp8`, or `low`: the product that makes the gradient of the weight has 16-bit operands.
        unfit: what becomes of a node that has no such product: `low`, it runs in 16 bits with a reason, or `refuse`.
        history: of how many steps before a delayed scale has the largest magnitude; 0 for all other scales.

    Example:
        >>> Fp8.of({"scaling": "rowwise"}).short
        'fp8(e4m3, rowwise, power_of_2=true, weight_gradient=fp8, unfit=low)'
        >>> Fp8.parse(Fp8.of({}).short) == Fp8()
        True
    """

    format: Format = "hybrid"
    scaling: Scaling = "tensorwise"
    power_of_2: bool = False
    weight_gradient: Literal["fp8", "low"] = "fp8"
    unfit: Literal["low", "refuse"] = "low"
    history: int = 0

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> Fp8:
        """What a rule says. Finer scales take E4M3 for gradients too, and powers of two, where it says nothing else."""
        finer, delayed = words.get("scaling") in ("rowwise", "mx"), words.get("scaling") == "delayed"
        history = _HISTORY if delayed else 0
        return cls(**{"format": "e4m3" if finer else "hybrid", "power_of_2": finer, "history": history, **words})

    @property
    def words(self) -> dict[str, Any]:
        """What a rule writes for it, but for what follows from the scaling.

        Example:
            >>> Fp8.of({"scaling": "rowwise", "format": "hybrid"}).words
            {'scaling': 'rowwise', 'format': 'hybrid'}
        """
        plain = Fp8.of({"scaling": self.scaling})
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return {"scaling": self.scaling} | {name: value for name, value in own.items() if value != getattr(plain, name)}

    @property
    def short(self) -> str:
        """As plans and graph text write it."""
        named = [f"{name}={str(getattr(self, name)).lower()}" for name in ("power_of_2", "weight_gradient", "unfit")]
        named += [f"history={self.history}"] * bool(self.history)
        return f"fp8({', '.join([self.format, self.scaling, *named])})"

    @classmethod
    def parse(cls, text: str) -> Fp8 | None:
        """What `short` wrote; `None` for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        format_, scaling, power_of_2, weight_gradient, unfit, history = match.groups()
        return cls(format_, scaling, power_of_2 == "true", weight_gradient, unfit, int(history or 0))  # type: ignore[arg-type]


WORDS: dict[str, Fp8] = {"fp8": Fp8()}  # of rules, for products that round their operands
