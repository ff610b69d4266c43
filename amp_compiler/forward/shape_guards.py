"""`InputForm`: for which inputs a program can be used again when shapes are dynamic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_compiler.forward.signature import traits_key
from amp_compiler.fx.capture import Captured, Source


@dataclass(frozen=True)
class InputForm:
    """What a capture took for granted of its inputs.

    Args:
        traits: form of the flattened inputs besides their sizes.
        inputs: for each input its place among the leaves, and its stand-in of symbolic shape.
        guards: raises an `AssertionError` for leaves that the capture does not hold for; `None` where it noted nothing.
    """

    traits: tuple[Any, ...]
    inputs: tuple[tuple[int, Any], ...]
    guards: Callable[..., Any] | None

    @classmethod
    def of(cls, captured: Captured, leaves: Sequence[Any]) -> InputForm:
        """The form of a fresh capture, whose placeholders still stand beside its inputs.

        Args:
            captured: as `capture_module` gives it.
            leaves: the flattened inputs that it was made for.
        """
        placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
        inputs = tuple(
            (entry.index, node.meta.get("val"))
            for node, entry in zip(placeholders, captured.inputs, strict=True)
            if entry.source is Source.USER
        )
        return cls(traits_key(leaves), inputs, captured.guards)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """True where the program was captured for inputs of these shapes, symbolic dimensions bound consistently."""
        if traits_key(leaves) != self.traits:
            return False
        bound: dict[str, int] = {}
        if not all(_matches(value, leaves[place], bound) for place, value in self.inputs):
            return False
        try:
            if self.guards is not None:
                self.guards(*leaves)
        except AssertionError:
            return False
        return True


def _matches(captured: Any, leaf: Any, bound: dict[str, int]) -> bool:
    if not isinstance(captured, torch.Tensor):
        return not isinstance(leaf, torch.Tensor)
    if not isinstance(leaf, torch.Tensor) or leaf.dtype != captured.dtype or leaf.device.type != captured.device.type:
        return False
    if leaf.dim() != captured.dim():
        return False
    for size, actual in zip(captured.shape, leaf.shape, strict=True):
        if isinstance(size, int):
            if size != actual:
                return False
        elif not _binds(size, int(actual), bound):
            return False
    return True


def _binds(size: torch.SymInt, actual: int, bound: dict[str, int]) -> bool:
    expression = size.node.expr
    if expression.is_symbol:
        allowed = size.node.shape_env.var_to_range.get(expression)
        inside = allowed is None or (actual >= allowed.lower and actual <= allowed.upper)
        return bool(inside) and bound.setdefault(str(expression), actual) == actual
    known = {symbol: bound.get(str(symbol)) for symbol in expression.free_symbols}
    return None in known.values() or int(expression.subs(known)) == actual
