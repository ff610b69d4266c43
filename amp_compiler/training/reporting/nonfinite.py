"""Nodes that made something that is not finite, as a report names them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import fx

from amp_compiler.fx.finiteness import planned_for, rounds
from amp_compiler.fx.graph import module_of, op_of, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.ir.nonfinite import INPUT, NonfiniteNode, ValueRange
from amp_compiler.ir.plan import PrecisionPlan

_NO_RANGES: Mapping[fx.Node, ValueRange] = MappingProxyType({})


def described(
    node: fx.Node,
    *,
    is_forward: bool,
    subgraph: str = "",
    ranges: Mapping[fx.Node, ValueRange] = _NO_RANGES,
    plan: PrecisionPlan | None = None,
) -> NonfiniteNode:
    """A node as a report names it.

    Args:
        node: of a graph.
        is_forward: whether it is meant itself; else its backward.
        subgraph: the name of the subgraph that it stands in.
        ranges: of values that were seen.
        plan: of the forward; of several subgraphs, that of all of them.
    """
    prefix = f"{subgraph}/" if subgraph else ""
    low, is_op = rounds(node), node.op == "call_function"
    mine = () if plan is None else plan.nodes
    names: Mapping[str, str] = {} if plan is None else plan.model.names
    known = {one.name.removeprefix(prefix): one for one in mine if one.name.startswith(prefix)}
    planned = planned_for(node, known) if known or not is_op else str(node.meta.get(Key.PLANNED, ""))
    decided, read = known.get(planned), ""
    if decided is None and low:  # an input that is rounded: for the first node that reads it
        values = {planned, prefix + planned}
        decided = next((one for one in known.values() if values & {*one.inputs}), None)
        read = f"read by {decided.name}, " if decided is not None else ""
    return NonfiniteNode(
        prefix + node.name,
        op_of(node) if is_op else INPUT,
        (module_of(node)[0] if is_op else "") or (decided.module if decided is not None else ""),
        "forward" if is_forward or not is_op else "backward",
        user_source(node.meta.get("stack_trace")) or (decided.source if decided is not None else ""),
        prefix + planned if planned and (is_op or low) else "",
        read + decided.decision if decided is not None else "",
        tuple((names.get(prefix + one.name, one.name), ranges[one]) for one in node.all_input_nodes if one in ranges),
        ranges.get(node),
        low,
        names.get(prefix + planned, ""),
    )
