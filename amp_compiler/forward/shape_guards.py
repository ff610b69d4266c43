"""`InputForm`: for which inputs a program can be used again when shapes are dynamic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_compiler.forward.signature import traits_key, without_numbers
from amp_compiler.fx.capture import Captured, Source


@dataclass(frozen=True)
class InputForm:
    """What a capture took for granted of its inputs.

    Args:
        traits: form of the flattened inputs besides their sizes.
        inputs: for each input its place among the leaves, and its stand-in of symbolic shape.
        guards: raises an `AssertionError` for leaves that the capture does not hold for; `None` where it noted nothing.
        numbers: where it holds for any `float` among the leaves, those of the capture.
    """

    traits: tuple[Any, ...]
    inputs: tuple[tuple[int, Any], ...]
    guards: Callable[..., Any] | None
    numbers: tuple[Any, ...] = ()

    @property
    def any_number(self) -> bool:
        """Whether it holds for any `float` among the leaves."""
        return bool(self.numbers)

    @property
    def is_dynamic(self) -> bool:
        """Whether it holds for more than one shape of the inputs."""
        sizes = (size for _, value in self.inputs if isinstance(value, torch.Tensor) for size in value.shape)
        return any(_is_symbolic(size) for size in sizes)

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
        if not any(one.of_arguments for one in captured.numbers.values()):
            return cls(traits_key(leaves), inputs, captured.guards)
        numbers = tuple(leaf if type(leaf) is float else None for leaf in leaves)
        return cls(traits_key(without_numbers(leaves)), inputs, captured.guards, numbers)

    def accepts(self, leaves: Sequence[Any]) -> bool:
        """True where the program was captured for inputs of these shapes, symbolic dimensions bound consistently."""
        if traits_key(without_numbers(leaves) if self.any_number else leaves) != self.traits:
            return False
        bound: dict[str, int] = {}
        if not all(_matches(value, leaves[place], bound) for place, value in self.inputs):
            return False
        if not all(_lies_alike(value, leaves[place], bound) for place, value in self.inputs) or not self._holds(bound):
            return False
        try:
            if self.guards is not None:
                self.guards(*self._known(leaves))
        except AssertionError:
            return False
        return True

    def _known(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves with the numbers of the capture, which `guards` compares as it does all that is no tensor."""
        if not self.any_number:
            return leaves
        return [now if before is None else before for now, before in zip(leaves, self.numbers, strict=True)]

    def _holds(self, bound: dict[str, int]) -> bool:
        """Whether the sizes are such as tracing and compiling took for granted, after the capture too."""
        sizes = (size for _, value in self.inputs if isinstance(value, torch.Tensor) for size in value.shape)
        symbolic: Any = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
        environment = None if symbolic is None else symbolic.node.shape_env
        if environment is None:
            return True
        guards = [environment.replace(guard.expr) for guard in environment.guards]
        return all(_value(guard, bound) == True for guard in guards)  # noqa: E712  # sympy's own truth


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _value(expression: Any, bound: dict[str, int]) -> Any:
    return expression.subs({symbol: bound[str(symbol)] for symbol in expression.free_symbols if str(symbol) in bound})


def _lies_alike(captured: Any, leaf: Any, bound: dict[str, int]) -> bool:
    """Whether an input lies in memory as the one that was captured: compiled code takes its strides for granted."""
    if not isinstance(captured, torch.Tensor) or captured.layout is not torch.strided:
        return True
    for size, wanted, stride in zip(leaf.shape, captured.stride(), leaf.stride(), strict=True):
        known = wanted if isinstance(wanted, int) else _value(wanted.node.expr, bound)
        if size > 1 and known != stride:
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
