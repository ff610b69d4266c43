"""`WriteOutTypes`: implied element types become arguments, and casts have one form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import flat_arguments, node_tensor, schema_argument, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.ir.graph import Pin
from amp_compiler.passes.base import RewritePass

aten = torch.ops.aten
_LIKE_FACTORIES = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
     "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"}
)  # fmt: skip
_CASTING = frozenset({"to", "type_as", "_to_copy"})
_SPARSE = "the model asks for a sparse gradient of its table, for which casts have no backward"


@dataclass(frozen=True)
class WriteOutTypes(RewritePass):
    """Write the element type into every op that would take it from an operand, and casts as `to.dtype`.

    A cast, and an op that the model gave a type, gets a pin: plans obey it. So does a lookup with `sparse=True`: the
    gradient of its table is a sparse tensor, for which a cast in front of the lookup has no backward.

    Before::

        zeros_like: fp32[4] = aten.zeros_like.default(x)
        half: fp16[4] = aten.to.dtype_layout(x, dtype=torch.float16)
        sum_1: fp32[] = aten.sum.default(x, dtype=torch.float32)
        embedding: fp32[2, 8] = aten.embedding.default(table, rows, -1, False, True)

    After::

        zeros_like: fp32[4] = aten.zeros_like.default(x, dtype=torch.float32)
        half: fp16[4] = aten.to.dtype(x, torch.float16)  # pin=cast
        sum_1: fp32[] = aten.sum.default(x, dtype=torch.float32)  # pin=cast
        embedding: fp32[2, 8] = aten.embedding.default(table, rows, -1, False, True)  # pin=keep

    Left alone: a cast that moves to another device as well, or asks for a memory format, keeps its form.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        changed = [_write_out(node) for node in list(graph.nodes) if node.op == "call_function"]
        return any(changed)


def _write_out(node: fx.Node) -> bool:
    """Change one call; whether anything changed."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    changed = schema_argument(node, "sparse") is True and _pin(node, "keep", _SPARSE)
    result = node_tensor(node)
    if result is None:
        return changed
    name = node.target._schema.name.removeprefix("aten::")
    if node.target is aten.view.dtype:
        return _pin(node, "keep", "it reads the bits of its operand as another type") or changed
    if name in _LIKE_FACTORIES and schema_argument(node, "dtype") is None:
        node.update_kwarg("dtype", result.dtype)
        return True
    if name in _CASTING:
        return _write_out_cast(node, result) or changed
    return (_has_explicit_type(node) and _pin(node, "cast", "explicit dtype argument in the model")) or changed


def _pin(node: fx.Node, precision: str, reason: str) -> bool:
    """Pin a node that has no pin; whether it had none."""
    pinned = Key.PIN in node.meta
    if not pinned:
        node.meta[Key.PIN] = Pin(precision, reason)
    return not pinned


def _write_out_cast(node: fx.Node, result: torch.Tensor) -> bool:
    source = node.args[0]
    before = node_tensor(source) if isinstance(source, fx.Node) else None
    changed = _pin(node, "cast", _cast_reason(node))
    if before is None or before.device != result.device or schema_argument(node, "memory_format") is not None:
        return changed
    form = aten.to.dtype, (source, result.dtype), dict[str, Any]()
    changed = changed or (node.target, node.args, dict(node.kwargs)) != form
    node.target, node.args, node.kwargs = form
    return changed


def _cast_reason(node: fx.Node) -> str:
    source = user_source(node.meta.get("stack_trace"))
    return f"explicit cast in the model{f' at {source}' if source else ''}"


def _has_explicit_type(node: fx.Node) -> bool:
    reads_float = any(
        isinstance(argument, fx.Node)
        and node_tensor(argument) is not None
        and node_tensor(argument).is_floating_point()  # type: ignore[union-attr]
        for _, _, argument in flat_arguments(node)
    )
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    return reads_float and name not in _LIKE_FACTORIES and isinstance(schema_argument(node, "dtype"), torch.dtype)
