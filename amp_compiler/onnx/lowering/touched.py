"""Which nodes a plan changes, of a model that was planned on what stands in for `onnx_ir`."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from amp_compiler.ir.plan import RETURN, PrecisionPlan
from amp_compiler.onnx.lowering.apply import is_rounded_in_place
from amp_compiler.onnx.lowering.lower import FOLDED, Lowered
from amp_compiler.onnx.lowering.norms import find_norms
from amp_compiler.onnx.model.plain import PlainGraph, PlainNode, PlainValue

_CASTS = frozenset({"Cast", "CastLike"})
_CHANGED = frozenset({*FOLDED, "BatchNormalization"})
_MUCH = 1_800_000_000  # bytes of stored data from which they may have to go to a file of their own


def open_touched(lowered: Lowered, plan: PrecisionPlan) -> None:
    """Make objects of `onnx_ir` of what a plan may change, and of what stands beside that. Changes `lowered`.

    That is: what reads a cast, but of stored data that are rounded where they are, and what makes its operand; the
    makers and readers of the outputs; the model's own casts, stored data, batch norms, and norms that are written out.
    Where nodes are renamed, or a rule says what they compute in, it is all of them.

    Args:
        lowered: the model, planned.
        plan: the plan.
    """
    graph = lowered.model.ir.graph
    if not isinstance(graph, PlainGraph):
        return
    nodes = cast("dict[str, PlainNode]", lowered.nodes)
    stored = sum(tensor.ByteSize() for tensor in graph.proto.initializer)
    everything = lowered.renamed or plan.has_math or stored > _MUCH
    opened = lowered.model.open_nodes(range(len(graph.nodes)) if everything else _touched(lowered, plan, graph))
    if opened is None:
        return
    lowered.value_names = frozenset(lowered.values)
    lowered.node_names = frozenset([node.name for node in graph.nodes])
    lowered.values = {name: value for name, value in opened.values.items() if name in lowered.values}
    lowered.nodes = {name: opened.nodes[node.index] for name, node in nodes.items() if node.index in opened.nodes}
    lowered.sites = {
        name: [replace(site, node=lowered.nodes[name]) for site in sites]
        for name, sites in lowered.sites.items()
        if name in lowered.nodes
    }


def _touched(lowered: Lowered, plan: PrecisionPlan, graph: PlainGraph) -> set[int]:
    """The places of the nodes."""
    nodes = cast("dict[str, PlainNode]", lowered.nodes)
    values = cast("dict[str, PlainValue]", lowered.values)
    found: set[int] = set()
    for planned in plan.casts:
        if planned.value in values and is_rounded_in_place(lowered, planned):
            continue
        maker = values[planned.value].maker
        found.update([nodes[name].index for name, _ in planned.users if name != RETURN])
        found.update([maker.index] if maker is not None else ())
    beside = list(graph.outputs)
    for node in graph.nodes:
        if node.op_type in _CASTS:
            beside += [value for value in (*node.inputs, *node.outputs) if value is not None]
        elif node.op_type in _CHANGED:
            found.add(node.index)
    for value in beside:
        found.update([user.index for user, _ in value.users])
        found.update([value.maker.index] if value.maker is not None else ())
    found.update(nodes[name].index for norm in find_norms(lowered) for name in norm)
    return found
