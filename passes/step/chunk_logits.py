"""`ChunkLogits`: a classifier and its cross-entropy as one operator, which never holds all logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import hint, schema_argument
from amp_compiler.fx.meta import Key, source_of
from amp_compiler.ops import classifier_loss
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.step.simplify_casts import cast_type

aten = torch.ops.aten
_CHUNKED = torch.ops.amp_compiler.classifier_loss.default
_CROSS_ENTROPY = (aten.cross_entropy_loss.default,)
_NEGATIVE = (aten.nll_loss.default, aten.nll_loss_nd.default)
_LOG_SOFTMAX = aten.log_softmax.int
_PRODUCTS = (aten.linear.default, aten.matmul.default, aten.mm.default, aten.addmm.default)
_SHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_CUTS = (aten.slice.Tensor,)
_FLATTEN = aten.flatten.using_ints
_PASSED = (
    *_SHAPES, *_CUTS, _FLATTEN, _LOG_SOFTMAX, aten.transpose.int, aten.permute.default, aten.contiguous.default,
    aten.clone.default,
)  # fmt: skip
_MIB = 1 << 20
_ROWS_ON_CPU, _ROWS = 256, 2048


@dataclass(frozen=True)
class ChunkLogits(InPlacePass):
    """Let the cross-entropy of a classifier go over its rows in chunks, so that all logits are never stored.

    They and their gradient are the largest values of a language model's step. The operator multiplies a chunk of rows,
    takes the softmax in FP32, and is done with it before the next one. Views and slices of the logits' rows (the last
    word of each sequence has no label) are done with the rows before. See `join_chunks` for the gradients.

    Before (`least=0`, on a GPU)::

        linear: bf16[6, 32] = aten.linear.default(x, w)
        to: fp32[6, 32] = aten.to.dtype(linear, torch.float32)
        loss: fp32[] = aten.cross_entropy_loss.default(to, target)

    After::

        classifier_loss: fp32[] = amp_compiler.classifier_loss.default(x, w, None, target, torch.bfloat16, …)

    Left alone: logits that are small, or read by anything else (returned, say), a loss that is not computed in FP32,
    one with class weights, with probabilities as targets, or not reduced to a number. Of large ones, a mark says why.

    On a CPU it is not done unless that is asked for: there it takes a third longer (torch's compiler does softmax and
    rounding in one loop), and the FP32 sum of the weight's gradient is larger than the logits of 1,024 words.

    Args:
        devices: types of device on which it is done.
        least: MiB of logits, in the type that the classifier gives, from which on it is done.
        rows: rows of a chunk; 0 for 256 on a CPU and 2048 elsewhere. Each chunk adds once to the weight's gradient in
            FP32, and so many make that a tenth of its work.
    """

    devices: tuple[str, ...] = ("cuda",)
    least: int = 64
    rows: int = 0
    name: ClassVar[str] = "chunk_logits"
    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        modified = False
        for node in list(subject.graph.nodes):
            found = _Classifier.behind(node)
            if found is None or found.bytes < self.least * _MIB:
                continue
            device = _tensor(found.loss).device.type
            if device not in self.devices:
                continue
            reason = found.unfit()
            if reason:
                modified |= node.meta.get(Key.LOGITS) != reason
                node.meta[Key.LOGITS] = reason
                continue
            found.replace(self.rows or (_ROWS_ON_CPU if device == "cpu" else _ROWS))
            modified = True
        if modified:
            subject.recompile()
        return PassResult(subject, modified)


@dataclass(frozen=True)
class _Classifier:
    """A loss, and what its logits go through.

    Args:
        loss: the cross-entropy, or the negative log-likelihood.
        product: what makes the logits.
        chain: what stands between the two, in the order of the data.
    """

    loss: fx.Node
    product: fx.Node
    chain: tuple[fx.Node, ...]

    @classmethod
    def behind(cls, loss: fx.Node) -> _Classifier | None:
        """What is found behind a node, if that is a loss of logits."""
        if loss.op != "call_function" or loss.target not in (*_CROSS_ENTROPY, *_NEGATIVE):
            return None
        chain: list[fx.Node] = []
        node: Any = loss.args[0]
        while isinstance(node, fx.Node) and node.target not in _PRODUCTS:
            if node.op != "call_function" or not (cast_type(node) or node.target in _PASSED):
                return None
            chain.insert(0, node)
            node = node.args[0]
        one = any(link.target is _LOG_SOFTMAX for link in chain)
        return cls(loss, node, tuple(chain)) if one == (loss.target in _NEGATIVE) else None

    @property
    def low(self) -> torch.dtype:
        """The narrowest type that the logits go through."""
        return min((_tensor(node).dtype for node in self._nodes), key=lambda dtype: dtype.itemsize)

    @property
    def bytes(self) -> int:
        """How large the logits are in that type, in bytes."""
        return math.prod(map(hint, _tensor(self.product).shape)) * self.low.itemsize

    @property
    def _nodes(self) -> tuple[fx.Node, ...]:
        return self.product, *self.chain

    def unfit(self) -> str:
        """Why it must be left as it is, in words joined by hyphens; empty where it need not be."""
        for node, follower in zip(self._nodes, (*self.chain, self.loss), strict=True):
            other = next((user for user in node.users if user is not follower), None)
            if other is not None:
                return f"read-by-{other.name}"
        return self._unfit_loss() or self._unfit_product() or _unfit_shapes(self.chain, _tensor(self.product))

    def _unfit_loss(self) -> str:
        target, whole = schema_argument(self.loss, "target"), _tensor(self.loss.args[0])
        if schema_argument(self.loss, "weight") is not None:
            return "class-weights"
        if _tensor(target).dtype is not torch.int64:
            return "probabilities"
        if schema_argument(self.loss, "reduction") not in (classifier_loss.MEAN, classifier_loss.SUM):
            return "not-reduced"
        types = {_tensor(node).dtype for node in self._nodes}
        if whole.dtype is not torch.float32 or types - {self.low} - {torch.float32}:
            return "not-in-FP32"
        return ""

    def _unfit_product(self) -> str:
        x, weight, bias = self._operands()
        if _tensor(x).dim() < 2 or _tensor(weight).dim() != 2:
            return "not-by-a-matrix"
        if bias is not None and _tensor(bias).dim() != 1:
            return "more-than-a-bias"
        if self.product.kwargs:
            return "scaled"
        return ""

    def _operands(self) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """Left operand, the right one as it stands there, bias."""
        args = self.product.args
        if self.product.target is aten.addmm.default:
            return args[1], args[2], args[0]  # type: ignore[return-value]
        return args[0], args[1], args[2] if len(args) > 2 else None  # type: ignore[return-value]

    def replace(self, rows: int) -> None:
        """Put the operator in the place of the loss, and erase what it makes needless."""
        graph, loss = self.loss.graph, self.loss

        def call(op: Any, *args: Any) -> fx.Node:
            node = graph.create_node("call_function", op, args, name=op.overloadpacket.__name__)
            node.meta = {**source_of(loss), "val": op(*fx.node.map_arg(args, lambda one: one.meta["val"]))}
            return node

        x, weight, bias = self._operands()
        target, features = schema_argument(loss, "target"), _tensor(x).shape[-1]
        with graph.inserting_before(loss), torch.no_grad():
            if self.product.target is not aten.linear.default:
                weight = call(aten.t.default, weight)
            place = _tensor(x).dim() - 1
            for link in self.chain:
                moved = _on_rows(link, place, features)
                if moved is not None:
                    op, args, place = moved
                    x = call(op, x, *args) if op is not None else x
            dims = _tensor(x).dim()
            if dims > 2:
                x = call(aten.permute.default, x, [0, *range(2, dims), 1])
                x, target = call(aten.reshape.default, x, [-1, features]), call(aten.reshape.default, target, [-1])
            options = [schema_argument(loss, name) for name in ("reduction", "ignore_index", "label_smoothing")]
            fixed = (self.low, options[0], options[1], options[2] or 0.0, rows)
            made = call(_CHUNKED, x, weight, bias, target, *fixed)
        loss.replace_all_uses_with(made)
        for node in (loss, *reversed(self._nodes)):
            graph.erase_node(node)


def _tensor(node: Any) -> torch.Tensor:
    return node.meta["val"]  # type: ignore[no-any-return]


_Moved = tuple[Any, tuple[Any, ...], int]


def _unfit_shapes(chain: Sequence[fx.Node], logits: torch.Tensor) -> str:
    place, dims = logits.dim() - 1, logits.dim()
    for link in chain:
        moved = _on_rows(link, place, 1)
        if moved is None:
            return f"behind-{link.name}"
        place, dims = moved[2], _tensor(link).dim()
    return "" if dims > 1 and place == 1 else "classes-not-second"


def _on_rows(link: fx.Node, place: int, features: Any) -> _Moved | None:
    """What a node does with logits, as it is done with the rows that they are made of.

    Args:
        link: a node between the product and the loss.
        place: which dimension of what it is given holds the classes.
        features: size of that dimension of the rows.

    Returns:
        An operator, its arguments behind the first, and the place of the classes afterwards; no operator where rows
        stay as they are. `None` where it mixes or picks classes.
    """
    before, after = _tensor(link.args[0]), _tensor(link)
    if link.target is _LOG_SOFTMAX:
        return (None, (), place) if schema_argument(link, "dim") % after.dim() == place else None
    if link.target in _CUTS:
        where, *bounds = (schema_argument(link, name) for name in ("dim", "start", "end", "step"))
        return None if where % before.dim() == place else (link.target, (where, *bounds), place)
    if link.target is _FLATTEN:
        first, last = (schema_argument(link, name) % before.dim() for name in ("start_dim", "end_dim"))
        fewer = last - first if place > last else 0
        return None if first <= place <= last else (link.target, (first, last), place - fewer)
    if link.target in _SHAPES:
        if place != before.dim() - 1 or not after.dim() or after.shape[-1] != before.shape[-1]:
            return None
        sizes: Any = link.args[1]
        return aten.reshape.default, ([*sizes[:-1], features],), len(sizes) - 1
    if link.target is aten.transpose.int:
        pair = [schema_argument(link, name) % before.dim() for name in ("dim0", "dim1")]
        order = [pair[1 - pair.index(one)] if one in pair else one for one in range(before.dim())]
        return link.target, tuple(pair), order.index(place)
    if link.target is aten.permute.default:
        order = [one % before.dim() for one in schema_argument(link, "dims")]
        return link.target, (order,), order.index(place)
    return None, (), place
