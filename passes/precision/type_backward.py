"""`TypeBackward`: make the gradients of a node in the type that its rule asks for."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.errors import PassError
from amp_compiler.fx.graph import (
    CAST,
    canonical_op,
    flat_arguments,
    node_tensor,
    refresh,
    replace_operand,
    replace_other_uses,
    schema_argument,
    tensor_operands,
)
from amp_compiler.fx.lower import made_tensors
from amp_compiler.fx.meta import Key, source_of
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.precision.widen_math import needs_nothing
from amp_compiler.policy.rules import OpTable

_LOW = (torch.float16, torch.bfloat16)
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class TypeBackward(InPlacePass):
    """Put each node marked with a backward type that its forward would not give it into a `typed_op`.

    A node with FP32 gradients hands them to its neighbours unrounded: its result is seen by autograd as FP32 (the
    16-bit number, widened), and it reads past casts that only rounded for it. So between two such nodes, and from such
    a node to an FP32 weight, a gradient is never rounded. `simplify_casts` removes the widening from the joint graph.

    Before (`linear` marked `float32`)::

        to: "bf16[8, 8]" = aten.to.dtype(weight, bfloat16)
        linear: "bf16[4, 8]" = aten.linear(x16, to)
        relu: "bf16[4, 8]" = aten.relu(linear)

    After::

        linear: "f32[4, 8]" = typed_op(aten.linear, (x16, weight), {}, [bfloat16] * 2, [float32] * 2, float32)
        to_1: "bf16[4, 8]" = aten.to.dtype(linear, bfloat16)
        relu: "bf16[4, 8]" = aten.relu(to_1)

    A node whose gradients alone are to be computed in FP32 (`backward: {math: fp32}`) is wrapped as well: its second
    run reads its operands widened, and the gradients are rounded as they leave. Where `math: fp32` holds for a wrapped
    node itself, `typed_op` emulates: FP32 arithmetic on rounded operands, both ways.

    Left alone: a node whose operands and results have the backward type already, and one without gradients.

    Args:
        ops: the op table.
        past_weights: read past casts of placeholders too. Without it a node with FP32 gradients gets a cast of its own
            in front, for `differentiate` and those who keep 16-bit weights between runs: see `gradient_type`.
    """

    ops: OpTable
    past_weights: bool = True
    exact: ClassVar[bool] = False

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place.

        Raises:
            PassError: a node cannot be run a second time in the backward.
        """
        modified = False
        own: dict[tuple[Any, ...], fx.Node] = {}
        for node in list(subject.graph.nodes):
            gradient = self._gradient(node)
            if gradient is not None:
                _check(node)
                node.meta[Key.BACKWARD] = gradient
                self._wrap(subject.graph, node, own)
                modified = True
        if modified:
            _erase_unread(subject.graph)
            refresh(subject)
        return PassResult(subject, modified)

    def _gradient(self, node: fx.Node) -> torch.dtype | None:
        """Type of the gradients of a node that is to be wrapped; `None` for one that is left alone."""
        if Key.BACKWARD not in node.meta and Key.BACKWARD_MATH not in node.meta:
            return None
        types = [tensor.dtype for tensor in made_tensors(node) if _is_plain_float(tensor)]
        operands = [self._data(node, slot, operand) for slot, _, operand in tensor_operands(node)]
        read = [tensor.dtype for tensor in operands if tensor is not None]
        if not types or not read:
            return None
        requested = node.meta.get(Key.BACKWARD)
        if requested is not None and set(types + read) != {requested}:
            return requested  # type: ignore[no-any-return]
        own = {dtype for dtype in types if dtype in _LOW}  # a node that makes FP32 has FP32 gradients
        alone = Key.MATH not in node.meta and self._computes_low(node, own)  # else `widen_math` does both ways at once
        return own.pop() if Key.BACKWARD_MATH in node.meta and len(own) == 1 and alone else None

    def _computes_low(self, node: fx.Node, low_types: set[torch.dtype]) -> bool:
        """Whether the kernels of a node round to one of these types on the way, where nothing is done about it."""
        info = self.ops.info(canonical_op(node.target))
        device = next(tensor.device.type for tensor in made_tensors(node))
        return any(not needs_nothing(info, device, low, differentiable=True) for low in low_types)

    def _data(self, node: fx.Node, slot: str, operand: fx.Node) -> torch.Tensor | None:
        """The tensor of an operand whose type goes with the node's; `None` for one that keeps its own."""
        tensor = node_tensor(operand)
        info = self.ops.info(canonical_op(node.target))
        kept = {slot, slot.partition(".")[0]} & (info.keep | info.any)
        if tensor is None or not _is_plain_float(tensor) or kept or (info.promotes and tensor.dim() == 0):
            return None
        return tensor

    def _wrap(self, graph: fx.Graph, node: fx.Node, own: dict[tuple[Any, ...], fx.Node]) -> None:
        gradient = node.meta[Key.BACKWARD]
        wide_again = Key.BACKWARD_MATH in node.meta and Key.MATH not in node.meta and gradient in _LOW
        results = [(result, node_tensor(result)) for result in _result_nodes(node)]
        reads, rereads = [], []
        for slot, path, operand in tensor_operands(node):
            dtype = node_tensor(operand).dtype  # type: ignore[union-attr]
            reads.append(dtype)
            follows = dtype in _LOW if gradient is torch.float32 else self._data(node, slot, operand) is not None
            widened = wide_again and follows and dtype in _LOW and self._computes_low(node, {gradient})
            rereads.append(dtype if not follows else torch.float32 if widened else gradient)
            source = _past_cast(operand, gradient)
            if not (follows or dtype is gradient) or source is operand:
                continue
            if source.op == "placeholder" and not self.past_weights:
                key = (source, dtype, gradient)
                if key not in own:
                    with graph.inserting_before(node):
                        own[key] = graph.node_copy(operand)
                source = own[key]
            replace_operand(node, path, source)
        emulated = self._emulated(node, [*reads, gradient]) or self._widened(node, reads, gradient)
        names = [path[0] for _, path, _ in flat_arguments(node) if isinstance(path[0], str)]
        kwargs = {name: node.kwargs[name] for name in dict.fromkeys(names)}
        node.args = (node.target, tuple(node.args), kwargs, reads, rereads, gradient, emulated)  # type: ignore[assignment]
        node.kwargs, node.target = {}, typed_op
        if gradient is torch.float32:
            for result, tensor in results:
                if tensor is not None and tensor.dtype in _LOW:
                    self._round_for_others(graph, result, tensor)

    def _round_for_others(self, graph: fx.Graph, result: fx.Node, tensor: torch.Tensor) -> None:
        """Let the readers of a 16-bit result that is now widened read it rounded; those that widened it, as it is."""
        with graph.inserting_after(result):
            rounded = graph.call_function(CAST, (result, tensor.dtype))
        rounded.meta = source_of(result)
        rounded.meta.update({"val": tensor, Key.PLACED: f"{result.name}: its gradient is FP32"})
        result.meta["val"] = tensor.float()
        replace_other_uses(result, rounded)
        for user in list(rounded.users):
            read = node_tensor(user)
            if user.target is CAST and user.args[1] is torch.float32:
                user.replace_all_uses_with(result)
            elif self.ops.info(canonical_op(user.target)).promotes and read is not None and read.dtype is torch.float32:
                user.replace_input_with(rounded, result)

    def _widened(self, node: fx.Node, reads: list[torch.dtype], gradient: torch.dtype) -> bool:
        """Whether arithmetic on 16-bit operands, forward or backward, is to be FP32 by casts within `typed_op`."""
        low_types = {dtype for dtype in reads if dtype in _LOW}
        if Key.MATH in node.meta:
            return self._computes_low(node, low_types)
        backward = Key.BACKWARD_MATH in node.meta and not low_types and gradient in _LOW
        return backward and self._computes_low(node, {gradient})

    def _emulated(self, node: fx.Node, types: list[torch.dtype]) -> bool:
        pairs = self.ops.info(canonical_op(node.target)).emulate
        device = next(tensor.device.type for tensor in made_tensors(node))
        return any(f"{device}.{_SHORT.get(dtype)}" in pairs for dtype in types)


def is_typed(node: fx.Node) -> bool:
    """True for a node that `TypeBackward` made."""
    return node.op == "call_function" and node.target is typed_op


def emulates(graph: fx.Graph) -> bool:
    """True where a `typed_op` node emulates 16-bit arithmetic, so that every down-cast must really round."""
    return any(is_typed(node) and node.args[6] for node in graph.nodes)


def _is_plain_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (*_LOW, torch.float32)


def _result_nodes(node: fx.Node) -> list[fx.Node]:
    if node_tensor(node) is not None:
        return [node]
    return [user for user in node.users if user.target is operator.getitem]


def _past_cast(operand: fx.Node, gradient: torch.dtype) -> fx.Node:
    """What a placed cast reads, where that has the type of the gradient: the cast's own adjoint would round it."""
    if operand.target is not CAST or Key.PLACED not in operand.meta:
        return operand
    source: Any = operand.args[0]
    tensor = node_tensor(source)
    plain = tensor is not None and tensor.dtype is gradient and not source.meta.get(Key.VOLATILE)
    return source if plain else operand


def _erase_unread(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.target is CAST and not node.users:
            graph.erase_node(node)


def gradient_type(placeholder: fx.Node) -> torch.dtype | None:
    """Type of a placeholder's gradient where only `typed_op` nodes of one backward type read it; else `None`."""
    tensor = node_tensor(placeholder)
    requested = {user.args[5] if is_typed(user) else None for user in placeholder.users}
    if tensor is None or not _is_plain_float(tensor) or len(requested) != 1:
        return None
    return requested.pop()  # type: ignore[return-value]


def _check(node: fx.Node) -> None:
    """Raise where a node cannot be run a second time."""
    op, why = node.target, ""
    if not isinstance(op, torch._ops.OpOverload):
        why = "it is no ATen operator"
    elif op._schema.is_mutable or node.meta.get(Key.VOLATILE):
        why = "it changes memory in place"
    elif _draws(node, op):
        why = "it draws random numbers, which a second run would draw anew"
    if why:
        raise PassError(
            f"node '{node.name}' ({canonical_op(op)}) cannot have gradients of another type than its result: {why}",
            where=node.meta.get(Key.BACKWARD_RULE, ""),
            hint=f"except it by a later rule: match: {{op: {canonical_op(op)}}}, with the precision and no 'backward'",
        )


def _draws(node: fx.Node, op: torch._ops.OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags or op is torch.ops.aten.dropout.default:
        return False
    if canonical_op(op) == "aten.scaled_dot_product_attention":
        return bool(schema_argument(node, "dropout_p"))
    trains = [schema_argument(node, name) for name in ("training", "train") if _has(op, name)]
    probability = next((schema_argument(node, name) for name in ("p", "dropout", "dropout_p") if _has(op, name)), None)
    return not (trains == [False] or probability == 0)


def _has(op: torch._ops.OpOverload, name: str) -> bool:
    return any(declared.name == name for declared in op._schema.arguments)
