"""Which nodes a plan changes, of a model that was planned on what stands in for `onnx_ir`."""

from __future__ import annotations

from dataclasses import replace

from amp_compiler.ir.plan import RETURN, PrecisionPlan
from amp_compiler.onnx.lowering.apply import is_rounded_in_place
from amp_compiler.onnx.lowering.lowered import FOLDED, Lowered
from amp_compiler.onnx.model.plain import PlainGraph

_CASTS = frozenset({"Cast", "CastLike"})
_CHANGED = frozenset({*FOLDED, "BatchNormalization"})
_LOOKED_AT = _CASTS | _CHANGED
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
    places = lowered.places
    stored = sum(tensor.ByteSize() for tensor in graph.proto.initializer)
    everything = lowered.renamed or plan.has_math or stored > _MUCH
    opened = lowered.model.open_nodes(range(len(graph.texts)) if everything else _touched(lowered, plan, graph))
    if opened is None:
        return
    lowered.value_names = graph.makers.keys()
    lowered.node_names = frozenset([text.name for text in graph.texts])
    lowered.values = {name: value for name, value in opened.values.items() if name in graph.makers}
    found = opened.nodes
    lowered.nodes = {name: found[place] for name, place in places.items() if place in found}
    lowered.sites = {
        name: [replace(site, node=lowered.nodes[name]) for site in sites]
        for name, sites in lowered.sites.items()
        if name in lowered.nodes
    }


def _touched(lowered: Lowered, plan: PrecisionPlan, graph: PlainGraph) -> set[int]:
    """The places of the nodes."""
    places, makers = lowered.places, graph.makers
    found: set[int] = set()
    for planned in plan.casts:
        if planned.value in makers and is_rounded_in_place(lowered, planned):
            continue
        found.add(makers[planned.value])
        found.update([places[name] for name, _ in planned.users if name != RETURN])
    beside = [value.name for value in graph.outputs]
    for place, text in enumerate(graph.texts) if not _LOOKED_AT.isdisjoint([text[1] for text in graph.texts]) else ():
        if text[1] in _CASTS:
            beside += [*text.inputs, *text.outputs]
        elif text[1] in _CHANGED:
            found.add(place)
    for value in beside:
        if value:
            found.add(makers[value])
            found.update([places[user.name] for user, _ in lowered.graph.users(value)])
    found.update(places[name] for names in lowered.compounds for name in names)
    found.discard(-1)  # the place of what no node makes
    return found
