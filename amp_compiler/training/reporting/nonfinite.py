"""Where non-finite gradients come from: read from the flags of a step, and found by running its graph again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, fx

from amp_compiler.fx.finiteness import (
    Finiteness,
    Replay,
    is_forward,
    only_update_reads,
    planned_for,
    rounds,
)
from amp_compiler.fx.graph import module_of, op_of, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.ir.nonfinite import INPUT, SHOWN, NonfiniteNode, NonfiniteReport, ValueRange
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.training.program import StepProgram

_NO_RANGES: Mapping[fx.Node, ValueRange] = MappingProxyType({})


def report_nonfinite(
    program: StepProgram, flags: Sequence[int], leaves: Sequence[Any] | None, scale: Tensor
) -> NonfiniteReport:
    """Name the parameters and the first nodes of a step that were not finite.

    A skipped step changes no weight and no buffer, so forward and backward of its graph can run again on the same
    batch, node by node.

    Args:
        program: what ran.
        flags: per parameter of `program.report.updated` whether its gradient was not finite.
        leaves: the batch; `None` where the step was not skipped and cannot be run again.
        scale: the loss scale that the step ran with, FP32 scalar.
    """
    bad = [number for number, flag in enumerate(flags) if flag]
    if not bad:
        return NonfiniteReport()
    parameters = tuple(program.report.updated[number] for number in bad)
    gradients = {program.gradient_node(number) for number in bad}
    origins: set[fx.Node] = set()
    ranges = _NO_RANGES
    if leaves is not None:
        seen = _replayed(program, leaves, scale)
        origins, ranges = seen.origins(gradients), seen.ranges
    nodes = sorted(origins or gradients)[:SHOWN]  # in the order in which they run
    shown = tuple(described(node, is_forward=is_forward(node), ranges=ranges, plan=program.plan) for node in nodes)
    return NonfiniteReport(parameters, shown, bool(origins))


def _replayed(program: StepProgram, leaves: Sequence[Any], scale: Tensor) -> Finiteness:
    values = {}
    placeholders = program.report.graph_module.graph.find_nodes(op="placeholder")
    for node, resolve in zip(placeholders, program.compiled.resolve, strict=True):
        if not only_update_reads(node):
            is_scale = node.meta.get(Key.STATE) == ("scale", "scale", 0)
            values[node] = scale if is_scale else resolve(leaves)
    return Replay(program.report.graph_module).run_again(values, scale.device)


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
