"""Which gradients of a step are left as products of two matrices, for the update to make them; see `Product`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.fx_tools import results_of
from amp_compiler.passes.trace_update import is_view, lies_in_input
from amp_compiler.runtime.products import pays

_GRADIENTS = 1  # place among the arguments of every update operator
_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


@dataclass(frozen=True)
class ProductGradient:
    """A gradient that a step need not make.

    Args:
        gradient: its node.
        nodes: the matrix product, and the transpositions and a change of shape between it and the gradient.
        transposed: whether the gradient is the transposed product.
        shape: of the gradient, where it is not that of the product, as that of a convolution's weight.
    """

    gradient: fx.Node
    nodes: tuple[fx.Node, ...]
    transposed: bool
    shape: tuple[int, ...] | None

    @property
    def factors(self) -> tuple[fx.Node, fx.Node]:
        """The operands of the matrix product."""
        left, right = self.nodes[0].args
        return left, right  # type: ignore[return-value]


def product_gradients(
    graph: fx.Graph, check: fx.Node, updates: Collection[fx.Node], most_inner: int
) -> list[ProductGradient]:
    """The gradients that nothing but the check and an update needs, and that are smaller as two factors.

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
    returned = {_source(result) for result in results_of(graph) if result not in gradients}
    found = (_product(node) for node in gradients if readers.issuperset(node.users))
    return [
        product
        for product in found
        if product is not None
        and (product.shape is None or all(one.meta["val"].is_contiguous() for one in weights[product.gradient]))
        and returned.isdisjoint(map(_source, product.factors))  # the user may write into it, and read the gradient then
        and _is_worth_it(*product.factors, most_inner)
    ]


def _source(value: Any) -> Any:
    """The value that another is a view of, or itself."""
    while isinstance(value, fx.Node) and is_view(value):
        value = value.args[0]
    return value


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
    return ProductGradient(gradient, tuple(nodes), transposed=transpositions % 2 == 1, shape=shape)


def _is_worth_it(left: fx.Node, right: fx.Node, most_inner: int) -> bool:
    if lies_in_input(left) or lies_in_input(right):
        return False  # the update of another weight, or the user, may write it before the product is made
    one, other = left.meta["val"], right.meta["val"]
    if not (_is_fixed_bf16(one) and _is_fixed_bf16(other)):
        return False
    (rows, inner), columns = one.shape, other.shape[1]
    return inner <= most_inner and pays(rows, inner, columns)


def _is_fixed_bf16(value: Tensor) -> bool:
    return value.dtype == torch.bfloat16 and all(isinstance(size, int) for size in (*value.shape, *value.stride()))
