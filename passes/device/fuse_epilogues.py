"""`FuseEpilogues`: activations, their gradients and those of biases at the end of products that stand there anyway."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.ops.cuda import cublaslt
from amp_compiler.ops.epilogues import ACTIVATION, GELU, GRADIENT, RELU, WITH_SUM
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.device.tried import tell
from amp_compiler.passes.step.simplify_casts import cast_type

aten = torch.ops.aten
_MM, _ADDMM = aten.mm.default, aten.addmm.default
_SUM, _T = aten.sum.dim_IntList, (aten.t.default, aten.transpose.int)
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_FORWARD: dict[Any, str] = {aten.gelu.default: GELU, aten.relu.default: RELU}
_BACKWARD: dict[Any, str] = {aten.gelu_backward.default: GELU, aten.threshold_backward.default: RELU}
TryOut = Callable[[Any, tuple[Any, ...]], str]


@dataclass(frozen=True)
class FuseEpilogues(InPlacePass):
    """Let cuBLASLt do at the end of a product what would be a loop over its result.

    Such loops read and write the widest values of a transformer, and products of that size wait for the chip's
    arithmetic, not for its memory. There are three: an activation behind a product, which also keeps what its gradient
    needs (GELU's argument, of ReLU a bit for each element); the gradient of an activation behind the product that it
    is of, with the sums over rows that are the gradient of the bias before it; and such sums of a value of which the
    gradient of a weight is made too.

    Before::

        addmm: bf16[16, 32] = aten.addmm.default(b, x, w)  # phase=forward
        gelu: bf16[16, 32] = aten.gelu.default(addmm, approximate="tanh")  # phase=forward
        …
        mm: bf16[16, 32] = aten.mm.default(grad, v)  # phase=backward
        gelu_backward: bf16[16, 32] = aten.gelu_backward.default(mm, addmm, approximate="tanh")  # phase=backward
        sum_1: bf16[1, 32] = aten.sum.dim_IntList(gelu_backward, [0], True)  # phase=backward

    After::

        made: (bf16[16, 32], bf16[16, 32]) = amp_compiler.mm_activation.default(x, w, b, "gelu")  # phase=forward
        gelu: bf16[16, 32] = getitem(made, 0)  # phase=forward
        addmm: bf16[16, 32] = getitem(made, 1)  # phase=forward
        …
        both: (bf16[16, 32], bf16[32]) = amp_compiler.mm_activation_backward.default(grad, v, addmm, "gelu", True)
        gelu_backward: bf16[16, 32] = getitem(both, 0)  # phase=backward

    It is done in the mode `max-autotune` alone, and only for what was tried out on the device: what cuBLASLt refuses,
    computes otherwise or more slowly stays as it is, and a mark says why. A value that two roundings led to is rounded
    once then, see `ops.epilogues`.

    Left alone: GELU by the error function, which cuBLASLt does not know; an activation that a loop reads, as dropout
    does, which would be a loop all the same, and its gradient; a ReLU whose argument something else reads; sizes that
    are dynamic or no multiples of 8; products that are not of two matrices in 16 bits.

    Args:
        try_out: gives, for an operator of `ops.epilogues` and its arguments as fake tensors, why it is not to be used,
            in words joined by hyphens, and nothing where it is. `None` where nothing is done.
    """

    try_out: TryOut | None = None
    name: ClassVar[str] = "fuse_epilogues"
    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        if self.try_out is None:
            return PassResult(subject, False)
        work = _Work(subject.graph, self.try_out)
        for node in list(subject.graph.nodes):
            if node.op != "call_function":
                continue
            if _phase(node) == "forward" and node.target in _FORWARD:
                work.activation(node)
            elif _phase(node) == "backward" and node.target in _BACKWARD:
                work.gradient(node)
        for node in subject.graph.find_nodes(op="call_function", target=_SUM):
            work.sum(node)
        if work.modified:
            subject.recompile()
        return PassResult(subject, work.modified)


class _Work:
    """The rewrites of one graph; `modified` says whether there were any."""

    def __init__(self, graph: fx.Graph, try_out: TryOut) -> None:
        self.graph, self.modified = graph, False
        self._try_out = try_out

    def activation(self, node: fx.Node) -> None:
        """An activation of a product in the forward."""
        kind = _FORWARD[node.target]
        product, links = _behind(node.args[0])
        results = _results(node, product)
        if not _is_product(product) or not results or not _of_form(node, kind) or not _is_trained(node, kind, product):
            return
        if kind == RELU and not _read_alone((product, *links, node)):
            return
        if any(not _read_by_products(one) for one in results):
            return
        bias, left, right = product.args if product.target is _ADDMM else (None, *product.args)
        arguments = (left, right, bias, kind)
        if not self._tried(product, ACTIVATION, arguments):
            return
        out, kept = self._pair(product, ACTIVATION, arguments)
        for one in results:
            one.replace_all_uses_with(self._shaped(out, one))
        if kind == GELU:
            product.replace_all_uses_with(kept)
        self._erase([*results, node, *reversed(links), product])

    def gradient(self, node: fx.Node) -> None:
        """The gradient of an activation, where that of its result is a product."""
        kind = _BACKWARD[node.target]
        product, links = _behind(node.args[0])
        kept, results = _kept(node, kind), _results(node, product)
        if not _is_product(product) or product.target is not _MM or kept is None or not results:
            return
        if not _read_alone((product, *links, node)):
            return
        value = product.meta["val"]
        if not _of_form(node, kind) or kept.meta["val"].shape[0] != value.shape[0] or _phase(kept) != "forward":
            return
        if kind == GELU and kept.meta["val"].shape != value.shape:
            return
        sums = [user for one in results for view in _matrices(one) for user in view.users if _adds_rows(user)]
        for wanted in dict.fromkeys((bool(sums), False)):
            arguments = (*product.args, kept, kind, wanted)
            if self._tried(product, GRADIENT, arguments):
                break
        else:
            return
        sums = sums if wanted else []
        out, total = self._pair(product, GRADIENT, arguments)
        for one in sums:
            one.replace_all_uses_with(self._shaped(total, one))
        for one in results:
            one.replace_all_uses_with(self._shaped(out, one))
        self._erase([*sums, *results, node, *reversed(links), product])

    def sum(self, node: fx.Node) -> None:
        """The sums over rows of a value of which a product is made as well, over the same dimension."""
        value: Any = node.args[0]
        if not _adds_rows(node):
            return
        order = {one: place for place, one in enumerate(self.graph.nodes)}
        for product, of_left in _products_over_rows(value):
            arguments = (*product.args, of_left)
            late = any(order[user] < order[product] for user in node.users)
            if late or not _is_product(product) or not self._tried(product, WITH_SUM, arguments):
                continue
            out, total = self._pair(product, WITH_SUM, arguments)
            node.replace_all_uses_with(self._shaped(total, node))
            product.replace_all_uses_with(out)
            self._erase([node, product])
            return

    def _tried(self, product: fx.Node, target: Any, arguments: tuple[Any, ...]) -> bool:
        reason = self._try_out(target, fx.node.map_arg(arguments, lambda one: one.meta["val"]))
        if reason:
            self.modified |= tell(product, f"{target.overloadpacket.__name__}-{reason}")
        return not reason

    def _pair(self, product: fx.Node, target: Any, arguments: tuple[Any, ...]) -> tuple[fx.Node, fx.Node]:
        """A call in the place of a product, and its two results."""
        self.modified = True
        values = target(*fx.node.map_arg(arguments, lambda one: one.meta["val"]))
        meta = {key: value for key, value in product.meta.items() if key != "val"}
        with self.graph.inserting_before(product):
            made = self.graph.call_function(target, arguments)
            made.meta = {**meta, "val": values}
            results = []
            for place, value in enumerate(values):
                results.append(self.graph.call_function(operator.getitem, (made, place)))
                results[-1].meta = {**meta, "val": value}
        return results[0], results[1]

    def _shaped(self, source: fx.Node, like: fx.Node) -> fx.Node:
        """A result in the shape of what it takes the place of."""
        shape = list(like.meta["val"].shape)
        if shape == list(source.meta["val"].shape):
            return source
        with self.graph.inserting_before(like):
            view = self.graph.call_function(aten.view.default, (source, shape))
        view.meta = {**like.meta, "val": source.meta["val"].view(shape)}
        return view

    def _erase(self, nodes: list[fx.Node]) -> None:
        for node in dict.fromkeys(nodes):
            if not node.users:
                self.graph.erase_node(node)


def _phase(node: fx.Node) -> Any:
    return node.meta.get(Key.PHASE)


def _of_form(node: fx.Node, kind: str) -> bool:
    """Whether it is the activation that cuBLASLt knows, or its gradient."""
    if kind == GELU:
        return bool(schema_argument(node, "approximate") == "tanh")
    return node.target is aten.relu.default or schema_argument(node, "threshold") == 0


def _is_static(value: torch.Tensor) -> bool:
    """Whether its sizes are known: asking a symbolic one would put a bound on it."""
    return all(type(one) is int for one in (*value.shape, *value.stride()))


def _fits(node: Any) -> bool:
    """Whether it is a matrix in 16 bits that cuBLASLt reads as it lies."""
    value = node_tensor(node) if isinstance(node, fx.Node) else None
    if value is None or value.dim() != 2 or value.dtype not in cublaslt.TYPES or not _is_static(value):
        return False
    return cublaslt.lies(value.shape, value.stride()) is not None


def _is_product(node: Any) -> bool:
    """Whether it is a plain product of two matrices, with a bias for each row or none, that cuBLASLt can compute."""
    if not isinstance(node, fx.Node) or node.target not in (_MM, _ADDMM) or node.kwargs or not _fits(node):
        return False
    value = node.meta["val"]
    operands: Any = node.args
    if node.target is _ADDMM:
        bias, operands = node_tensor(operands[0]), operands[1:]
        if bias is None or bias.shape != value.shape[1:] or not bias.is_contiguous() or bias.dtype is not value.dtype:
            return False
    return bool(value.is_contiguous()) and all(map(_fits, operands))


def _links(node: fx.Node) -> bool:
    """Whether it hands its operand on, row by row: a view that keeps the rows whole, a copy, a cast that widens."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node_tensor(node.args[0]), node_tensor(node)
    if before is None or after is None or not (_is_static(before) and _is_static(after)):
        return False
    if before.shape[-1:] != after.shape[-1:] or not after.dim() or not after.is_contiguous():
        return False
    if node.target is aten.clone.default:
        return before.is_contiguous()
    return node.target in _VIEWS or (cast_type(node) is torch.float32 and before.dtype in cublaslt.TYPES)


def _behind(node: Any) -> tuple[Any, list[fx.Node]]:
    """What a value comes from, and what hands it on, in the order of the data."""
    links: list[fx.Node] = []
    while isinstance(node, fx.Node) and _links(node):
        links.insert(0, node)
        node = node.args[0]
    return node, links


def _read_alone(chain: tuple[fx.Node, ...]) -> bool:
    """Whether each node is read by the next one and nothing else."""
    return all(set(one.users) == {other} for one, other in pairwise(chain))


def _results(node: fx.Node, product: Any) -> list[fx.Node]:
    """What gives the result in the product's type: the node or, of one in FP32, the casts that are all that read it."""
    value, made = node_tensor(node), node_tensor(product) if isinstance(product, fx.Node) else None
    if value is None or made is None:
        return []
    if value.dtype is made.dtype:
        return [node]
    users = list(node.users)
    return users if all(cast_type(user) is made.dtype for user in users) else []


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value, views and copies aside."""
    for user in node.users:
        if _links(user) or user.target in _T:
            yield from _readers(user)
        else:
            yield user


def _read_by_products(node: fx.Node) -> bool:
    """Whether the forward reads it in products alone: any loop could make it as well."""
    return all(one.target in (_MM, _ADDMM) for one in _readers(node) if _phase(one) == "forward")


def _is_trained(node: fx.Node, kind: str, product: fx.Node) -> bool:
    """Whether the backward has a gradient of this activation, which needs what is kept."""
    waiting, seen = [node if kind == RELU else product], set()
    while waiting:
        one = waiting.pop()
        for user in one.users:
            if _BACKWARD.get(user.target) == kind and _of_form(user, kind) and user.args[1] is one:
                return True
            if user not in seen and (_links(user) or (kind == RELU and cast_type(user) is not None)):
                seen.add(user)
                waiting.append(user)
    return False


def _kept(node: fx.Node, kind: str) -> fx.Node | None:
    """What the gradient of an activation is to read: a mask that stands beside the result, or GELU's argument."""
    source, links = _behind(node.args[1])
    chain: list[Any] = [source, *links]
    if kind == GELU:
        return next((one for one in chain if _fits(one) and one.meta["val"].is_contiguous()), None)
    made = source.args[0] if isinstance(source, fx.Node) and source.target is operator.getitem else None
    if not isinstance(made, fx.Node) or made.target is not ACTIVATION or made.args[3] != RELU or source.args[1] != 0:
        return None
    return next(user for user in made.users if user.args[1] == 1)


def _matrices(node: fx.Node) -> Iterator[fx.Node]:
    """A value, and views of it."""
    yield node
    for user in node.users:
        if _links(user) and user.target in _VIEWS:
            yield from _matrices(user)


def _adds_rows(node: fx.Node) -> bool:
    """Whether it gives the sums over the rows of a matrix in 16 bits, in its type."""
    value: Any = node.args[0] if node.target is _SUM else None
    if not _fits(value) or _phase(node) != "backward":
        return False
    dims = schema_argument(node, "dim")
    return list(dims or ()) in ([0], [-2]) and node.meta["val"].dtype is value.meta["val"].dtype


def _products_over_rows(value: fx.Node) -> Iterator[tuple[fx.Node, bool]]:
    """The products whose inner dimension is the rows of a value, and whether it is their left operand, turned."""
    for user in value.users:
        if user.target is _MM and user.args[1] is value and user.args[0] is not value:
            yield user, False
        elif user.target in _T:
            for product in user.users:
                if product.target is _MM and product.args[0] is user and product.args[1] is not user:
                    yield product, True
