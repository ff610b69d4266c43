"""The table from ONNX operators to the functions that a converted `torch.fx` graph calls.

An operator that is not here runs by the function body that ONNX defines it by, where it has one. To add another, write
a function in the module of its family and register it:

    @op("Relu")
    def _relu(x: Tensor) -> Tensor:
        return torch.relu(x)

Inputs come by position (`None` for one that is left out), attributes as keywords under their ONNX names with ONNX's
defaults; one annotated with `Literal[...]` may hold nothing else. A function may also ask for `kind` (the operator's
name), `opset` (the version of its domain), `outputs` (how many outputs the node has) and `like` (any tensor of the
graph, for its device; `None` while constants are folded).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])
ASKED = ("kind", "opset", "outputs", "like")


@dataclass(frozen=True)
class Op:
    """How one operator runs.

    Args:
        function: what the graph calls.
        host: positions of inputs that are read as plain numbers (shapes, axes, counts), not as tensors.
        scalars: a constant of rank 0 is passed as a Python number, which takes the type of the other operand.
        many: the function returns a tuple of outputs, whatever their number.
        pure: the same inputs give the same outputs, so that a node of constants is computed once.
        when: tells from attributes, given inputs and used outputs whether the function covers a node; ONNX's own
            function body is used for the rest.
        attributes: names of the attributes that the function takes.
        choices: by attribute, the texts that it may hold, where it is annotated so.
        requested: which of `kind`, `opset`, `outputs` and `like` the function takes.
    """

    function: Callable[..., Any]
    host: frozenset[int] = frozenset()
    scalars: bool = False
    many: bool = False
    pure: bool = True
    when: Callable[[dict[str, Any], list[bool], list[bool]], bool] | None = None
    attributes: frozenset[str] = field(default_factory=frozenset)
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    requested: frozenset[str] = field(default_factory=frozenset)


_OPS: dict[tuple[str, str], Op] = {}
_HOST: dict[str, Op] = {}


def op(
    *names: str,
    domain: str = "",
    host: tuple[int, ...] = (),
    scalars: bool = False,
    many: bool = False,
    pure: bool = True,
    when: Callable[[dict[str, Any], list[bool], list[bool]], bool] | None = None,
) -> Callable[[F], F]:
    """Register a function for the operators `names` of `domain`; see `Op` for the options.

    Example:
        >>> @op("Twice", domain="my.domain")
        ... def twice(x):
        ...     return x + x
        >>> find_op("my.domain", "Twice").function(2)
        4
    """

    def register(function: F) -> F:
        entry = replace(make(function, frozenset(host), scalars, many, pure), when=when)
        for name in names:
            _OPS[domain, name] = entry
        return function

    return register


def host_op(*names: str) -> Callable[[F], F]:
    """Register how operators of ONNX's own domain run on plain numbers (NumPy arrays of sizes, see `host`)."""

    def register(function: F) -> F:
        for name in names:
            _HOST[name] = make(function, frozenset(range(64)), False, False, True)
        return function

    return register


def make(function: Callable[..., Any], host: frozenset[int], scalars: bool, many: bool, pure: bool) -> Op:
    """An entry of the table, with the attributes read off the function's keyword-only parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin of torch: positional inputs only
        return Op(function, host, scalars, many, pure)
    keywords = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY}
    attributes, requested = frozenset(keywords - set(ASKED)), frozenset(keywords & set(ASKED))
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError):  # annotations that mean nothing here, as those of a function within a function
        hints = {}
    choices = {name: known for name in sorted(attributes) if (known := _choices(hints.get(name)))}
    return Op(function, host, scalars, many, pure, attributes=attributes, choices=choices, requested=requested)


def _choices(hint: Any) -> tuple[Any, ...]:
    """What an attribute may hold; empty where it may hold anything of its type."""
    return next((get_args(one) for one in (hint, *get_args(hint)) if get_origin(one) is Literal), ())


def find_op(domain: str, name: str) -> Op | None:
    """The entry of an operator that runs on tensors, or `None`."""
    return _OPS.get((domain, name))


def find_host_op(domain: str, name: str) -> Op | None:
    """The entry of an operator that runs on plain numbers, or `None`."""
    return None if domain else _HOST.get(name)
