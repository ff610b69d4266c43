"""`FoldMasks`: attention masks that no input decides, left out or said in a word."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.fx.graph import node_tensor, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.tracing import without_fake_tensors
from amp_compiler.passes.base import RewritePass

aten = torch.ops.aten
_ATTENTION = aten.scaled_dot_product_attention.default
_MOST = 1 << 27  # elements of a value that is worked out: 128 million
# They take no more than the form of their first argument.
_LIKE = frozenset({
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
})  # fmt: skip
_EVERYTHING, _CAUSAL = "everything", "causal"


@dataclass(frozen=True)
class FoldMasks(RewritePass):
    """Work out attention masks that are made of constants: one that hides nothing goes, a causal one becomes a flag.

    Kernels for attention (FlashAttention, cuDNN) take no mask, or are slower with one; the flag also saves them half of
    their work. Libraries write masks all the same, because what they capture has to hold for any batch.

    Before::

        arange: i64[8] = aten.arange.default(8)
        column: i64[8, 1] = aten.unsqueeze.default(arange, 1)
        le: bool[8, 8] = aten.le.Tensor(arange, column)
        attend: fp32[2, 4, 8, 16] = aten.scaled_dot_product_attention.default(q, k, v, le)

    After::

        attend: fp32[2, 4, 8, 16] = aten.scaled_dot_product_attention.default(q, k, v, is_causal=True)

    A mask that is added hides where it is minus infinity, or the lowest number of its type, and must be zero elsewhere.

    Left alone: a mask that depends on an input or on random numbers, is of a dynamic shape, or hides anything else; a
    causal one of as many queries as keys alone becomes a flag, which kernels understand differently otherwise.
    """

    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        constants, modified = _Constants(graph), False
        for node in graph.find_nodes(op="call_function", target=_ATTENTION):
            mask = schema_argument(node, "attn_mask")
            if not isinstance(mask, fx.Node) or schema_argument(node, "is_causal"):
                continue
            shows = constants.shown_by(mask)
            if shows is None:
                continue
            _without_mask(node, shows == _CAUSAL)
            _erase_unread(graph, mask)
            modified = True
        return modified


def _without_mask(node: fx.Node, causal: bool) -> None:
    dropout = schema_argument(node, "dropout_p")
    kept = {name: value for name, value in node.kwargs.items() if name not in ("attn_mask", "is_causal", "dropout_p")}
    if dropout:
        kept["dropout_p"] = dropout
    if causal:
        kept["is_causal"] = True
    node.args, node.kwargs = tuple(schema_argument(node, name) for name in ("query", "key", "value")), kept


def _erase_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node that has no users any more, and what only it read."""
    waiting, gone = [node], set()
    while waiting:
        one = waiting.pop()
        if one not in gone and not one.users and one.op == "call_function":
            waiting += one.all_input_nodes
            gone.add(one)
            graph.erase_node(one)


class _Constants:
    """Values that are made of constants alone. Nodes that compute the same are worked out once."""

    def __init__(self, graph: fx.Graph) -> None:
        self._numbers: dict[fx.Node, int | None] = {}  # of a constant node: equal ones have one number
        self._known: dict[Hashable, int] = {}
        self._shown: dict[int, str | None] = {}
        for node in graph.nodes:
            self._numbers[node] = self._number(node)

    def shown_by(self, mask: fx.Node) -> str | None:
        """What a mask lets through; `None` where that is no constant, or something else."""
        number = self._numbers.get(mask)
        if number is None:
            return None
        if number not in self._shown:
            with without_fake_tensors(), torch.no_grad():
                self._shown[number] = _shows(_worked_out(mask))
        return self._shown[number]

    def _number(self, node: fx.Node) -> int | None:
        target, value = node.target, node.meta.get("val")
        if node.op != "call_function" or node.meta.get(Key.VOLATILE):
            return None  # it is written to later on, itself or through a view
        if target is not operator.getitem:
            if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
                return None
            if torch.Tag.nondeterministic_seeded in target.tags or target.namespace != "aten":
                return None
        values = [one for one in pytree.tree_leaves(value) if isinstance(one, Tensor)]
        if not values or any(not _is_small(one) for one in values):
            return None
        if target in _LIKE:
            if not _is_small(node_tensor(node.args[0])):  # type: ignore[arg-type]
                return None
        elif any(self._numbers.get(source) is None for source in node.all_input_nodes):
            return None
        named = fx.node.map_arg((node.args, node.kwargs), self._name)
        key = (str(target), repr(named))
        return self._known.setdefault(key, len(self._known))

    def _name(self, source: fx.Node) -> str:
        number, value = self._numbers.get(source), source.meta.get("val")
        form = (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        return f"value {number} {form}"


def _is_small(value: Tensor | None) -> bool:
    """Whether a value is of a size that is known, and not too large to work out."""
    return value is not None and all(isinstance(size, int) for size in value.shape) and value.numel() <= _MOST


def _worked_out(node: fx.Node) -> Any:
    """The value of a constant node, on the CPU."""
    values: dict[fx.Node, Any] = {}
    waiting = [node]
    while waiting:
        one = waiting[-1]
        sources = [] if one.target in _LIKE else one.all_input_nodes
        missing = [source for source in sources if source not in values]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        if one not in values:
            values[one] = _run(one, values)
    return values[node]


def _run(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    def operand(source: fx.Node) -> Any:
        if node.target in _LIKE:
            like = source.meta["val"]
            return torch.empty(like.shape, dtype=like.dtype)
        return values[source]

    def on_cpu(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    args, kwargs = pytree.tree_map(on_cpu, fx.node.map_arg((node.args, node.kwargs), operand))
    named = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    return node.target(*args, **named)  # type: ignore[operator]


def _shows(mask: Tensor) -> str | None:
    if mask.dtype is torch.bool:
        free = mask
    elif mask.dtype.is_floating_point:
        free = mask == 0
        if not bool((free | (mask <= torch.finfo(mask.dtype).min)).all()):
            return None
    else:
        return None
    if bool(free.all()):
        return _EVERYTHING
    if free.dim() < 2 or free.shape[-1] != free.shape[-2]:
        return None
    below = torch.ones(free.shape[-2:], dtype=torch.bool).tril()
    return _CAUSAL if bool((free == below).all()) else None
