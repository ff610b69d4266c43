"""`PlaceOperands`: weights in FP8, and their scales, as state of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from amp_compiler.fx.alias import readers, source_of
from amp_compiler.fx.graph import (
    LOW_TYPES,
    add_placeholder,
    call_before,
    node_tensor,
    replace_call,
    splice_before,
)
from amp_compiler.fx.meta import Key
from amp_compiler.fx.meta import source_of as written_at
from amp_compiler.fx.torch_private.tracing import traced_graph
from amp_compiler.ops.fp8 import FP8, fp8_product
from amp_compiler.passes.base import RewritePass

OPERAND = "operand"  # mark of what a step keeps of a weight: (it, how it is made, number)
_aten = torch.ops.aten


@dataclass(frozen=True)
class Operands:
    """How some values are made of a weight.

    Args:
        weight: placeholder of the 16-bit weight.
        graph: of the values, by the weight; its text is the same wherever they are made alike.
    """

    weight: str
    graph: fx.Graph

    def __str__(self) -> str:
        return self.weight

    def __call__(self, weight: Tensor) -> list[Tensor]:
        """The values of a weight as that is now."""
        return fx.Interpreter(fx.GraphModule({}, self.graph)).run(weight)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PlaceOperands(RewritePass):
    """Turn what FP8 products make of a weight alone into placeholders, and make it anew behind the update.

    That is its FP8 copies, and what else they are made by and has fewer bytes than it: scales and magnitudes. No
    step, and none of several batches that are gathered, rounds such a weight; a step that is skipped makes the same
    again. Delayed scaling knows its scale from steps before, so that of its weights the magnitude alone is kept.

    Before::

        scale: bf16[] = aten.amax.default(w_low0)
        mul: bf16[16, 16] = aten.mul.Tensor(w_low0, scale)
        w8: float8_e4m3fn[16, 16] = aten._to_copy.default(mul, dtype=torch.float8_e4m3fn)
        product = aten._scaled_mm.default(x8, w8, x_scale, scale)
        sgd_update = amp_compiler.sgd_update.default([w], [product], [], [w_low0], …)

    After::

        in w_low0_operand0: float8_e4m3fn[16, 16]  # state=operand/w_low0/0
        in w_low0_operand1: bf16[]  # state=operand/w_low0/1
        product = aten._scaled_mm.default(x8, w_low0_operand0, x_scale, w_low0_operand1)
        sgd_update = amp_compiler.sgd_update.default([w], [product], [], [w_low0], …)
        …
        copy_ = aten.copy_.default(w_low0_operand0, w8_1)
        copy__1 = aten.copy_.default(w_low0_operand1, scale_1)

    In inference nothing is written: whoever keeps the 16-bit copies of weights keeps these beside them. Products that
    nothing differentiates are opened for it.

    Left alone: weights without FP32 masters, frozen ones, and what the step returns; in inference weights on a GPU,
    where nobody waits to see that a copy is another.

    Args:
        trained: placeholders of the parameters to train; none in inference.
        masters: whether 16-bit parameters have FP32 masters.
        gather: as for `GatherGradients`; with `"add"` there is no update.
    """

    trained: tuple[str, ...] = ()
    masters: bool = True
    gather: str = ""
    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        closed = graph.find_nodes(op="call_function", target=fp8_product)
        opened = [node for node in closed if any(map(_is_copy_on_cpu, map(source_of, node.all_input_nodes)))]
        for node in opened:
            open_call(node, fp8_product, "")
        weight_of, output = self._of_weights_alone(graph), graph.output_node()
        inner: set[fx.Node] = set()  # of which FP8 values and magnitudes are made, and these
        for node in reversed(weight_of):
            is_made = node.meta["val"].dtype in FP8 or node.target is _aten.amax.default
            if is_made or not inner.isdisjoint(node.users):
                inner.add(node)
        read = [node for node in weight_of if node in inner and not inner.issuperset(node.users)]
        kept: dict[fx.Node, list[fx.Node]] = {}
        for node in dict.fromkeys(map(source_of, read)):
            is_less = node.meta["val"].nbytes < weight_of[node].meta["val"].nbytes
            if is_less and output not in readers(node):  # who is given a value keeps it
                kept.setdefault(weight_of[node], []).append(node)
        for weight, values in kept.items():
            _place(weight, values, bool(self.trained) and self.gather != "add")
        for node in reversed(weight_of):
            if node in inner and node.op == "call_function" and not node.users:
                graph.erase_node(node)
        return bool(opened or kept)

    def _of_weights_alone(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """The values that depend on one weight and nothing else, with that; weights among them."""
        weight_of: dict[Any, Any] = {}
        for node in graph.find_nodes(op="placeholder"):
            stored_low = self.masters and node.name in self.trained and node.meta["val"].dtype in LOW_TYPES
            if stored_low or (Key.LOW in node.meta if self.trained else _is_copy_on_cpu(node)):
                weight_of[node] = node
        for node in graph.nodes:
            target, weights = node.target, {weight_of.get(one) for one in node.all_input_nodes}
            if not isinstance(target, torch._ops.OpOverload) or None in weights or len(weights) != 1:
                continue
            drawn = torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
            if not drawn and node_tensor(node) is not None and node.meta.get(Key.PHASE) != "update":
                weight_of[node] = weights.pop()
        return weight_of


def open_call(node: fx.Node, target: Any, phase: str) -> None:
    """Put the torch calls that a call stands for in its place.

    Args:
        node: the call.
        target: makes them of its arguments.
        phase: `forward`, `backward` or `update`; empty in a graph of one phase.
    """
    read = node.all_input_nodes

    def calls(*inputs: Any) -> Any:
        by_node = dict(zip(read, inputs, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), by_node.__getitem__)
        return target(*args, **kwargs)

    traced = traced_graph(calls, *(one.meta["val"] for one in read), _allow_non_fake_inputs=True)
    traced.graph.eliminate_dead_code()
    for one in traced.graph.nodes:
        one.meta.update(written_at(node))
    results = splice_before(node, traced.graph, read, phase)
    replace_call(node, results if isinstance(traced.graph.output_node().args[0], (list, tuple)) else results[0])


def _is_copy_on_cpu(node: fx.Node) -> bool:
    return Key.LOW in node.meta and bool(node.meta["val"].is_cpu)


def _place(weight: fx.Node, values: list[fx.Node], is_updated: bool) -> None:
    """Let placeholders be some values of a weight, written behind the update."""
    graph, recipe = weight.graph, fx.Graph()
    copies, known = {weight: recipe.placeholder("weight")}, dict[str, fx.Node]()

    def copied(old: fx.Node) -> fx.Node:
        if old not in copies:
            args, kwargs = fx.node.map_arg((old.args, old.kwargs), copied)
            text = str((old.target, args, kwargs))  # what is made twice, as under checkpointing, is kept once
            known[text] = known.get(text) or recipe.call_function(old.target, args, kwargs)  # type: ignore[arg-type]
            known[text].meta["val"], copies[old] = old.meta["val"], known[text]
        return copies[old]

    once = {copied(node): node for node in values}
    recipe.output([*once])
    operands, last = Operands(weight.name, recipe), graph.find_nodes(op="placeholder")[-1]
    placed = {}
    for number, (copy, node) in enumerate(once.items()):
        meta = {"val": node.meta["val"], Key.STATE: (OPERAND, operands, number)}
        last = placed[copy] = add_placeholder(last, f"{weight.name}_{OPERAND}{number}", meta)
    for node in values:
        node.replace_all_uses_with(placed[copies[node]])
    output = graph.output_node()
    new = splice_before(output, recipe, [weight], "update") if is_updated else []
    for placeholder, value in zip(placed.values(), new, strict=False):
        call_before(output, _aten.copy_.default, [placeholder, value], "update")


def operand_nodes(graph: fx.Graph) -> set[fx.Node]:
    """What stands behind the update of a step to write operands."""
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    writers = {one for one in copies if one.args[0].meta.get(Key.STATE, ("",))[0] == OPERAND}
    for node in reversed(graph.nodes):
        if node in writers:
            writers.update(one for one in node.all_input_nodes if one.op == "call_function")
    return writers
