"""`PlaceOperands`: weights in FP8, and their scales, as state of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from amp_compiler.fx.alias import is_view
from amp_compiler.fx.graph import LOW_TYPES, call_before, node_tensor
from amp_compiler.fx.meta import Key
from amp_compiler.ops.fp8 import FP8
from amp_compiler.passes.base import InPlacePass, PassResult

_aten = torch.ops.aten
OPERAND = "operand"  # mark of what a step keeps of a weight: (it, how it is made, number)


@dataclass(frozen=True)
class Operand:
    """How a value is made of a weight.

    Args:
        weight: placeholder of the 16-bit weight.
        graph: of the value, by the weight.
    """

    weight: str
    graph: fx.Graph

    def __str__(self) -> str:
        return self.weight

    def __call__(self, weight: Tensor) -> Tensor:
        """The value of a weight as that is now."""
        return fx.Interpreter(fx.GraphModule({}, self.graph)).run(weight)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PlaceOperands(InPlacePass):
    """Turn what FP8 products make of a weight alone into placeholders, and make it anew behind the update.

    That is its FP8 copies, and what else they are made by and is smaller than the weight: scales and magnitudes. No
    step, and none of several batches that are gathered, rounds such a weight; a step that is skipped makes the same
    again. Delayed scaling knows its scale from steps before, so that of its weights the magnitude alone is kept.

    Before::

        in w_low0: bf16[16, 16]  # cast low=w:bf16
        abs_1: bf16[16, 16] = aten.abs.default(w_low0)
        scale: bf16[] = aten.amax.default(abs_1)
        mul: bf16[16, 16] = aten.mul.Tensor(w_low0, scale)
        w8: float8_e4m3fn[16, 16] = aten._to_copy.default(mul, dtype=torch.float8_e4m3fn)
        product = aten._scaled_mm.default(x8, w8, x_scale, scale)
        sgd_update = amp_compiler.sgd_update.default([w], [product], [], [w_low0], …)

    After::

        in w_low0_operand0: bf16[]  # state=operand/w_low0/0
        in w_low0_operand1: float8_e4m3fn[16, 16]  # state=operand/w_low0/1
        product = aten._scaled_mm.default(x8, w_low0_operand1, x_scale, w_low0_operand0)
        sgd_update = amp_compiler.sgd_update.default([w], [product], [], [w_low0], …)
        abs_2: bf16[16, 16] = aten.abs.default(w_low0)
        scale_1: bf16[] = aten.amax.default(abs_2)
        …
        copy_ = aten.copy_.default(w_low0_operand0, scale_1)
        copy__1 = aten.copy_.default(w_low0_operand1, w8_1)

    Left alone: weights without FP32 masters, frozen ones, and values of 16 bits and more that are as large as a weight.

    Args:
        trained: placeholders of the parameters to train.
        masters: whether 16-bit parameters have FP32 masters.
        gather: as for `GatherGradients`; with `"add"` there is no update.
    """

    trained: tuple[str, ...]
    masters: bool = True
    gather: str = ""
    name: ClassVar[str] = "place_operands"
    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        weight_of = _of_weights_alone(subject.graph, self._is_weight)
        inner: set[fx.Node] = set()  # of which FP8 values and magnitudes are made, and these
        for node in reversed(weight_of):
            if _is_fp8(node) or node.target is _aten.amax.default or not inner.isdisjoint(node.users):
                inner.add(node)
        read = [node for node in weight_of if node in inner and not inner.issuperset(node.users)]
        made = dict.fromkeys(_source(node) for node in read)
        kept = [node for node in made if node is not weight_of[node] and _pays(node, weight_of[node])]
        if kept:
            self._place(kept, weight_of, inner)
            subject.recompile()
        return PassResult(subject, bool(kept))

    def _is_weight(self, node: fx.Node) -> bool:
        tensor = node_tensor(node)
        stored_low = self.masters and node.name in self.trained and tensor is not None and tensor.dtype in LOW_TYPES
        return Key.LOW in node.meta or stored_low

    def _place(self, kept: list[fx.Node], weight_of: dict[fx.Node, fx.Node], inner: set[fx.Node]) -> None:
        graph = kept[0].graph
        last, output = graph.find_nodes(op="placeholder")[-1], graph.output_node()
        operands = [Operand(weight_of[node].name, _graph_of(node, weight_of[node])) for node in kept]
        new: dict[fx.Node, fx.Node] = {}  # behind the update
        made = [None if self.gather == "add" else _again(node, new) for node in kept]
        placed: dict[tuple[str, str], fx.Node] = {}
        for node, operand, value in zip(kept, operands, made, strict=True):
            key = operand.weight, str(operand.graph)
            if key not in placed:
                with graph.inserting_after(last):
                    last = placed[key] = graph.placeholder(f"{operand}_{OPERAND}{len(placed)}")
                last.meta = {"val": node.meta["val"], Key.STATE: (OPERAND, operand, len(placed) - 1)}
                if value is not None:
                    call_before(output, _aten.copy_.default, [last, value], "update")
            node.replace_all_uses_with(placed[key])
        for node in reversed(weight_of):
            if node in inner and node.op == "call_function" and not node.users:
                graph.erase_node(node)


def operand_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What stands behind the update of a step to write operands."""
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    found = {one for one in copies if one.args[0].meta.get(Key.STATE, ("",))[0] == OPERAND}
    for node in reversed(graph.nodes):
        if node in found:
            found.update(one for one in node.all_input_nodes if one.op == "call_function")
    return found


def _of_weights_alone(graph: fx.Graph, is_weight: Any) -> dict[fx.Node, fx.Node]:
    """The values of forward and backward that depend on one weight and nothing else, with that; weights among them."""
    weight_of = {node: node for node in graph.find_nodes(op="placeholder") if is_weight(node)}
    for node in graph.nodes:
        weights = {weight_of.get(one) for one in node.all_input_nodes}
        pure = isinstance(node.target, torch._ops.OpOverload) and not (
            node.target._schema.is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags
        )
        if pure and len(weights) == 1 and None not in weights and node.meta.get(Key.PHASE) != "update":
            weight_of[node] = weights.pop()  # type: ignore[assignment]
    return weight_of


def _is_fp8(node: fx.Node) -> bool:
    tensor = node_tensor(node)
    return tensor is not None and tensor.dtype in FP8


def _source(node: fx.Node) -> fx.Node:
    """What a value is a view of, or itself."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def _pays(node: fx.Node, weight: fx.Node) -> bool:
    """Whether a value is there to be kept: an FP8 copy, or what is smaller than the weight."""
    value, whole = node_tensor(node), node_tensor(weight)
    return _is_fp8(node) or (value is not None and whole is not None and bool(value.numel() < whole.numel()))


def _graph_of(node: fx.Node, weight: fx.Node) -> fx.Graph:
    """How a value is made of a weight; the same text wherever it is made alike."""
    graph = fx.Graph()
    made = {weight: graph.placeholder("weight")}

    def copied(old: fx.Node) -> fx.Node:
        if old not in made:
            args, kwargs = fx.node.map_arg((old.args, old.kwargs), copied)
            made[old] = graph.call_function(old.target, args, kwargs)  # type: ignore[arg-type]
        return made[old]

    graph.output(copied(node))
    return graph


def _again(node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    """A value of a weight made once more, behind all else."""
    if node.op == "placeholder":
        return node
    if node not in new:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda old: _again(old, new))
        with node.graph.inserting_before(node.graph.output_node()):
            new[node] = node.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        new[node].meta = {"val": node.meta["val"], Key.PHASE: "update"}
    return new[node]
