"""`JoinGelu`: GELU by the hyperbolic tangent, written out in products and sums, as the one operator that it is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor
from amp_compiler.fx.meta import source_of
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.step.simplify_casts import cast_type

aten = torch.ops.aten
_MUL, _ADD = (aten.mul.Tensor, aten.mul.Scalar), (aten.add.Tensor, aten.add.Scalar)
_POW = aten.pow.Tensor_Scalar
_LOW = (torch.float16, torch.bfloat16)
_MOST = 3  # degree of the polynomial
_MOST_PARTS = 16  # nodes that one is looked for among
_ROOT = math.sqrt(2 / math.pi)
_ARGUMENT, _OUTSIDE = {1: _ROOT, 3: 0.044715 * _ROOT}, {1: 0.5}
_NEAR = 1e-6  # of the numbers, which libraries write with 8 digits or more
Polynomial = dict[int, float]


@dataclass(frozen=True)
class JoinGelu(InPlacePass):
    """Put `aten.gelu` in the place of GELU that a model writes out by the hyperbolic tangent, as GPT-2's.

    Its gradient is one operator then, too, where autograd of the written form makes some ten, which round each for
    itself. `fuse_epilogues` looks for these two.

    Before::

        mul: fp32[4, 8] = aten.mul.Tensor(x, 0.5)
        pow_1: fp32[4, 8] = aten.pow.Tensor_Scalar(x, 3.0)
        mul_1: fp32[4, 8] = aten.mul.Tensor(pow_1, 0.044715)
        add: fp32[4, 8] = aten.add.Tensor(x, mul_1)
        mul_2: fp32[4, 8] = aten.mul.Tensor(add, 0.7978845608028654)
        tanh: fp32[4, 8] = aten.tanh.default(mul_2)
        add_1: fp32[4, 8] = aten.add.Tensor(tanh, 1.0)
        mul_3: fp32[4, 8] = aten.mul.Tensor(mul, add_1)

    After::

        gelu: fp32[4, 8] = aten.gelu.default(x, approximate="tanh")

    Any order of the factors and terms is found, and any way to write the cube. A value in 16 bits that a part of the
    form reads in FP32 is widened first.

    Left alone: other numbers in the same form, a part that something else reads, and all in a step that is not tuned.

    Args:
        tuned: whether it is done.
    """

    tuned: bool = False
    name: ClassVar[str] = "join_gelu"
    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        found = subject.graph.find_nodes(op="call_function", target=aten.tanh.default) if self.tuned else []
        modified = False
        for tanh in found:
            written = _Written.around(tanh)
            if written is not None:
                written.replace()
                modified = True
        if modified:
            subject.recompile()
        return PassResult(subject, modified)


@dataclass(frozen=True)
class _Written:
    """A GELU that is written out.

    Args:
        source: its argument.
        last: what gives its result.
        parts: the nodes that it is made of, all but casts of the argument.
    """

    source: fx.Node
    last: fx.Node
    parts: frozenset[fx.Node]

    @classmethod
    def around(cls, tanh: fx.Node) -> _Written | None:
        """That which a hyperbolic tangent is a part of, if it is one."""
        found = (cls._of(tanh, source) for source in _sources(tanh.args[0]))
        return next((one for one in found if one is not None), None)

    @classmethod
    def _of(cls, tanh: fx.Node, source: fx.Node) -> _Written | None:
        parts: set[fx.Node] = {tanh}
        if not _same(_polynomial(tanh.args[0], source, parts), _ARGUMENT):
            return None
        last = _only_user(tanh)
        if last is None or last.target not in _ADD or last.kwargs or len(last.args) != 2 or 1 not in last.args:
            return None
        parts.add(last)
        outside: Polynomial | None = {0: 1.0}
        while outside is not None and not _same(outside, _OUTSIDE):
            before, last = last, _only_user(last)
            if last is None or last.target not in _MUL:
                return None
            other = last.args[1] if last.args[0] is before else last.args[0]
            outside = _times(outside, _polynomial(other, source, parts))
            parts.add(last)
        return cls(source, last, frozenset(parts)) if outside is not None and _fits(source, last, parts) else None

    def replace(self) -> None:
        """Put the operator in its place."""
        graph, wide = self.last.graph, self.last.meta["val"]
        source: Any = self.source
        with graph.inserting_before(self.last):
            if source.meta["val"].dtype is not wide.dtype:
                source = graph.call_function(aten.to.dtype, (source, wide.dtype))
                source.meta = {**source_of(self.last), "val": wide.new_empty(wide.shape)}
            made = graph.call_function(aten.gelu.default, (source,), {"approximate": "tanh"})
        made.meta = {**source_of(self.last), "val": aten.gelu.default(source.meta["val"], approximate="tanh")}
        self.last.replace_all_uses_with(made)
        parts, node = set(self.parts), self.last
        while parts:  # none of them is read elsewhere, so that the later ones can go first
            before = node.prev
            if node in parts:
                parts.remove(node)
                graph.erase_node(node)
            node = before
        for cast in [user for user in self.source.users if _widens(user) and not user.users]:
            graph.erase_node(cast)


def _fits(source: fx.Node, last: fx.Node, parts: set[fx.Node]) -> bool:
    """Whether nothing else reads a part, and the types are those of one operator, behind a cast at most."""
    alone = all(user in parts for part in parts if part is not last for user in part.users)
    given, made = node_tensor(source), node_tensor(last)
    if not alone or given is None or made is None or given.shape != made.shape:
        return False
    return made.dtype in (given.dtype, torch.float32) and given.dtype in (*_LOW, torch.float32)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _widens(node: fx.Node) -> bool:
    before = node_tensor(node.args[0]) if isinstance(node.args[0], fx.Node) else None  # type: ignore[arg-type]
    return cast_type(node) is torch.float32 and before is not None and before.dtype in _LOW


def _sources(value: Any) -> list[fx.Node]:
    """The nodes that it may be a polynomial of."""
    found: dict[fx.Node, None] = {}
    waiting = [value]
    while waiting and len(found) < _MOST_PARTS:
        node = waiting.pop(0)
        if not isinstance(node, fx.Node) or node in found:
            continue
        found[node] = None
        if node.op == "call_function" and (node.target in (*_MUL, *_ADD, _POW) or _widens(node)):
            waiting += node.args
    return list(found)


def _polynomial(value: Any, source: fx.Node, parts: set[fx.Node]) -> Polynomial | None:
    """A value as a polynomial of another one; adds to `parts` the nodes that it is made of."""
    if isinstance(value, (int, float)):
        return {0: float(value)}
    if value is source:
        return {1: 1.0}
    if not isinstance(value, fx.Node) or value.op != "call_function":
        return None
    if (value.kwargs or len(value.args) > 2) and cast_type(value) is None:  # such as a factor of the second term
        return None
    if _widens(value):
        if value.args[0] is not source:
            parts.add(value)
        return _polynomial(value.args[0], source, parts)
    parts.add(value)
    operands = [_polynomial(one, source, parts) for one in value.args]
    if value.target in _MUL:
        return _times(*operands)
    if value.target in _ADD and None not in operands:
        return {
            degree: sum(one.get(degree, 0.0) for one in operands if one)
            for degree in sorted({degree for one in operands if one for degree in one})
        }
    if value.target is _POW and value.args[1] in (2, 3):
        square = _times(operands[0], operands[0])
        return square if value.args[1] == 2 else _times(square, operands[0])
    return None


def _times(one: Polynomial | None, other: Polynomial | None) -> Polynomial | None:
    if one is None or other is None:
        return None
    made: Polynomial = {}
    for degree, factor in one.items():
        for more, by in other.items():
            made[degree + more] = made.get(degree + more, 0.0) + factor * by
    return made if max(made, default=0) <= _MOST else None


def _same(one: Polynomial | None, other: Polynomial) -> bool:
    if one is None:
        return False
    found = {degree: factor for degree, factor in one.items() if factor}
    return found.keys() == other.keys() and all(math.isclose(found[key], other[key], rel_tol=_NEAR) for key in other)
