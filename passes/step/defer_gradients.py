"""`DeferGradients`: gradients that the update makes itself: products and added rows."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from amp_compiler.fx.alias import source_of
from amp_compiler.fx.graph import results_of, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.ops.update.operators import ADD_ROWS, CHECK, OPERATORS
from amp_compiler.ops.update.product import Product, pays
from amp_compiler.passes.base import RewritePass

_GRADIENTS = 1  # place among the arguments of every update operator
_NARROWEST = 64  # columns of a table whose gradient is left as rows: a row is a chunk of its own to the update's loops
_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


@dataclass(frozen=True)
class DeferGradients(RewritePass):
    """Leave a gradient that only the check and an update read, and that is smaller as factors and rows, to the update.

    Such a gradient is written as a `Product`, which lies nowhere in memory: the update's loops make it panel by panel.

    Before::

        mm: bf16[512, 256] = aten.mm.default(t, x)
        grad_check: (fp32[], fp32[], u8[1]) = amp_compiler.grad_check.default([mm], inverse)
        adam_update = amp_compiler.adam_update.default([w], [mm], …)
        return loss, mm

    After::

        product: bf16[512, 256] = Product(t, x)  # phase=update
        grad_check: (fp32[], fp32[], u8[1]) = amp_compiler.grad_check.default([product], inverse)
        adam_update = amp_compiler.adam_update.default([w], [product], …)
        return loss, product

    Left alone: products, where the norm of all gradients is needed before the update (clipping, a loss scale that
    follows the norm), for the squares of a product's elements are known when it is made; a gradient whose factors are
    larger than itself, or lie in an input of the graph, which another update may write; one that an update without a
    kernel reads, as that of a weight without a master.

    Args:
        most_inner: largest number of inner elements with which products are made fast; 0 where no kernel takes them.
        kernels: the operators that a kernel runs.
    """

    most_inner: int = 0
    kernels: tuple[Any, ...] = ()
    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        taken = set(self.kernels).intersection(OPERATORS.values())
        updates = [node for node in graph.nodes if node.target in taken]
        checks = graph.find_nodes(op="call_function", target=CHECK)
        if not updates or len(checks) != 1 or self.most_inner <= 0:
            return False
        gradients = product_gradients(graph, checks[0], updates, self.most_inner)
        for one in gradients:
            with graph.inserting_before(checks[0]):
                deferred = one.emit(graph)
            one.gradient.replace_all_uses_with(deferred)
        for one in gradients:
            for node in reversed(one.nodes):
                if not node.users:
                    graph.erase_node(node)
        return bool(gradients)


@dataclass(frozen=True)
class Lookup:
    """Rows that a lookup in a table adds to the table's gradient; the arguments are those of `Product.plus_rows`."""

    values: fx.Node
    places: fx.Node
    skipped: int


@dataclass(frozen=True)
class ProductGradient:
    """A gradient that a step need not make.

    Args:
        gradient: its node.
        nodes: those that need not run: the matrix product, the transpositions and a change of shape behind it, and what
            adds rows.
        factors: the operands of the matrix product; none where all comes from lookups.
        transposed: whether the gradient is the transposed product.
        shape: of the gradient, where it is not that of the product, as that of a convolution's weight.
        lookups: what adds rows, in this order.
    """

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]
    factors: tuple[fx.Node, ...]
    transposed: bool = False
    shape: tuple[int, ...] | None = None
    lookups: tuple[Lookup, ...] = ()

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """All that it is made from."""
        return (*self.factors, *(node for one in self.lookups for node in (one.values, one.places)))

    def emit(self, graph: fx.Graph) -> fx.Node:
        """Write it as a `Product`, at the place where the graph inserts."""
        value = self.gradient.meta["val"]
        if self.factors:
            product = graph.call_function(Product, self.factors)
        else:
            product = graph.call_function(Product.zeros, tuple(value.shape))
        nodes = [product]
        if self.transposed:
            nodes.append(graph.call_method("transposed", (nodes[-1],)))
        if self.shape is not None:
            nodes.append(graph.call_method("reshaped", (nodes[-1], *self.shape)))
        for one in self.lookups:
            nodes.append(graph.call_method("plus_rows", (nodes[-1], one.values, one.places, one.skipped)))
        for node in nodes:
            node.meta = {"val": value, Key.PHASE: "update"}
        return nodes[-1]


def product_gradients(
    graph: fx.Graph, check: fx.Node, updates: Collection[fx.Node], most_inner: int
) -> list[ProductGradient]:
    """The gradients that nothing but the check and an update needs, and that are smaller as factors and rows.

    Empty where the norm of all gradients is needed before the update (clipping, a loss scale that follows the norm):
    the squares of a product's elements are known when it is made.

    Args:
        graph: the step graph.
        check: its `grad_check` node.
        updates: its update nodes that take a `Product`.
        most_inner: largest number of inner elements with which making the products is fast.
    """
    output = graph.output_node()
    norm = next((user for user in check.users if user.args[1] == 0), None)
    if norm is not None and set(norm.users) != {output}:
        return []
    readers = {check, output, *updates}
    weights: dict[fx.Node, list[fx.Node]] = {}
    for update in updates:
        for weight, gradient in zip(update.args[0], update.args[_GRADIENTS], strict=True):  # type: ignore[arg-type]
            weights.setdefault(gradient, []).append(weight)  # type: ignore[arg-type]
    gradients = list(weights)
    returned = {
        source_of(result) for result in results_of(graph) if isinstance(result, fx.Node) and result not in gradients
    }
    matches = (_gradient(node) for node in gradients if readers.issuperset(node.users))
    return [
        one
        for one in matches
        if one is not None
        and (_can_be_transposed(one) or all(weight.meta["val"].is_contiguous() for weight in weights[one.gradient]))
        and returned.isdisjoint(map(source_of, one.operands))  # the user may write into it, and read the gradient then
        and _is_worth_it(one, most_inner)
    ]


def _can_be_transposed(one: ProductGradient) -> bool:
    """Whether it can be made column by column as well."""
    return one.shape is None and not one.lookups


def _gradient(gradient: fx.Node) -> ProductGradient | None:
    """A gradient of the kinds that can be left, whatever the sizes."""
    match = _rows(gradient) or _product(gradient)
    return None if match is None else replace(match, gradient=gradient)


def _rows(gradient: fx.Node) -> ProductGradient | None:
    """Rows that are added to nothing, to other rows, or to a product; see `passes.sum_gradients`."""
    value = gradient.meta["val"]
    if value.dtype != torch.float32 or value.dim() != 2 or value.shape[1] < _NARROWEST:
        return None
    if gradient.target is _aten.embedding_dense_backward.default:
        values, places = gradient.args[:2]
        if schema_argument(gradient, "scale_grad_by_freq") or not _are_rows(values, places, value):
            return None
        lookup = Lookup(values, places, schema_argument(gradient, "padding_idx"))  # type: ignore[arg-type]
        return ProductGradient(gradient, (gradient,), (), lookups=(lookup,))
    if gradient.target is ADD_ROWS:
        base, values, places, skipped = gradient.args
        below = _addend(base, value)
        if below is None or not _are_rows(values, places, value):
            return None
        lookup = Lookup(values, places, skipped)  # type: ignore[arg-type]
        return replace(below, nodes=(*below.nodes, gradient), lookups=(*below.lookups, lookup))
    if gradient.target is _aten.add.Tensor and schema_argument(gradient, "alpha") == 1:
        first, second = (_addend(one, value) for one in gradient.args[:2])
        if first is None or second is None or (first.factors and second.factors):
            return None
        (most, rest) = (second, first) if second.factors else (first, second)
        nodes = (*first.nodes, *second.nodes, gradient)
        return replace(most, nodes=nodes, lookups=(*most.lookups, *rest.lookups))
    return None


def _addend(value: Any, table: Tensor) -> ProductGradient | None:
    """A part of a table's gradient, summed in FP32, that nothing else reads."""
    nodes = [value]
    if isinstance(value, fx.Node) and value.target is _aten._to_copy.default:
        nodes.append(value.args[0])
    if not all(isinstance(node, fx.Node) and len(node.users) == 1 for node in nodes):
        return None
    if value.meta["val"].dtype != torch.float32 or value.meta["val"].shape != table.shape:
        return None
    match = _gradient(nodes[-1])
    return None if match is None or match.shape is not None else replace(match, nodes=(*match.nodes, *nodes[:-1]))


def _are_rows(values: Any, places: Any, table: Tensor) -> bool:
    value = values.meta["val"]
    return value.dtype == torch.float32 and bool(value.shape == (*places.meta["val"].shape, table.shape[1]))


def _product(gradient: fx.Node) -> ProductGradient | None:
    nodes = [gradient]
    reshaped = gradient.target in _RESHAPES and gradient.meta["val"].is_contiguous()
    while nodes[0].target is _aten.t.default or (reshaped and len(nodes) == 1):
        source: Any = nodes[0].args[0]
        if len(source.users) > 1:
            return None
        nodes.insert(0, source)
    if nodes[0].target is not _aten.mm.default:
        return None
    transpositions = len(nodes) - 1 - reshaped
    shape = tuple(gradient.meta["val"].shape) if reshaped else None
    left, right = nodes[0].args
    return ProductGradient(gradient, tuple(nodes), (left, right), transpositions % 2 == 1, shape)  # type: ignore[arg-type]


def _is_worth_it(one: ProductGradient, most_inner: int) -> bool:
    if any(source_of(node).op == "placeholder" for node in (*one.factors, *(lookup.values for lookup in one.lookups))):
        return False  # the update of another weight, or the user, may write it before the gradient is made
    values = [node.meta["val"] for node in one.operands]
    if not all(_is_fixed(value) for value in values):
        return False
    if any(value.dtype != torch.bfloat16 for value in values[: len(one.factors)]):
        return False
    added = sum(lookup.places.meta["val"].numel() for lookup in one.lookups)
    if not one.factors:
        rows, columns = one.gradient.meta["val"].shape
        return pays(rows, 0, columns, added)
    (rows, inner), columns = values[0].shape, values[1].shape[1]
    return inner <= most_inner and pays(rows, inner, columns, added)


def _is_fixed(value: Tensor) -> bool:
    return all(isinstance(size, int) for size in (*value.shape, *value.stride()))
