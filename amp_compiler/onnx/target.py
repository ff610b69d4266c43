"""A model on the execution provider that is to run it: what ONNX Runtime adds to it there, counted from the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import many
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.types import canonical_domain
from amp_compiler.planner.typing import KEEP, TypingRules
from amp_compiler.policy.rules import OpTable
from amp_compiler.policy.targets import Providers

_BODIES = ("onnx.If", "onnx.Loop", "onnx.Scan")


def versions_of(lowered: Lowered) -> dict[str, int]:
    """The opset by which each node is read."""
    opset = lowered.model.opset
    return {name: node.version or opset(canonical_domain(node.domain)) for name, node in lowered.nodes.items()}


def drop_useless_opsets(lowered: Lowered, providers: Providers) -> None:
    """Forget later opsets that bring no kernel for a node (`Lowered.late`), or in which others have none any more."""
    first, nodes, now = providers.tables[0], lowered.graph.nodes, lowered.model.opset("")
    ops = {node.op for node in nodes.values() if first.has(node.op, now, DType.FLOAT32)}
    loses = {late: not all(first.has(op, late, DType.FLOAT32) for op in ops) for late in {*lowered.late.values()}}
    lowered.late = {
        name: late
        for name, late in lowered.late.items()
        if not loses[late] and providers.obstacle(nodes[name].op, late, lowered.low) is None
    }


def note_of(providers: Providers, after: tuple[Counter[str], int], before: tuple[Counter[str], int]) -> str:
    """What ONNX Runtime adds to a model, beside what it would add to the one that is planned for no target."""
    missing, casts = after
    ops = ", ".join(f"{count} {op.removeprefix('onnx.')}" for op, count in sorted(missing.items()))
    lacking = f"{many(missing.total(), 'node')} without a kernel in their type" + (f" ({ops})" if ops else "")
    return (
        f"target {providers.name}: {lacking}, {many(casts, 'cast')} that ONNX Runtime inserts; without a target"
        f" {before[0].total()} and {before[1]}"
    )


def added_by_runtime(
    lowered: Lowered, ops: OpTable, labels: Mapping[str, str], providers: Providers
) -> tuple[Counter[str], int]:
    """What ONNX Runtime does about nodes that its provider has no kernel for in the type that a plan gives them.

    Where no other provider has one either, it runs an FP16 node in FP32 between casts of its own, and takes a node with
    a kernel along that stands alone between such nodes. Two casts in a row that undo each other vanish, a cast of the
    plan with them.

    Args:
        lowered: the lowered model, with the graph that was planned.
        ops: the op table.
        labels: by node, the label of the plan.
        providers: of the target.

    Returns:
        The number of nodes by op that fall to another provider, or are cast; and the number of casts.
    """
    graph, low, versions = lowered.graph, lowered.low, versions_of(lowered)
    typing = TypingRules(graph, ops, low)
    types = typing.results(labels)
    missing: Counter[str] = Counter()
    reads: dict[str, set[str]] = {}  # by node, what it reads in the low type, itself or by a cast of the plan
    widened: dict[str, None] = {}  # the nodes that run in FP32 between casts
    for name, node in graph.nodes.items():
        if typing[name].is_cast or node.op in _BODIES:
            continue
        needs = (typing.need(node, index, labels.get(name, KEEP)) for index in range(len(node.inputs)))
        read = {one.value: need or types[one.value] for one, need in zip(node.inputs, needs, strict=True)}
        floats = {low, DType.FLOAT32} & {*read.values(), *(types[value] for value in node.outputs)}
        if not floats:
            continue
        kind = low if low in floats else DType.FLOAT32
        reads[name] = {value for value, dtype in read.items() if dtype is low}
        missing[node.op] += not providers.tables[0].has(node.op, versions[name], kind)
        if kind is DType.FLOAT16 and reads[name] and providers.obstacle(node.op, versions[name], low) is not None:
            widened[name] = None
    returned = {value.name or "" for value in lowered.model.ir.graph.outputs}
    writes = {name: {value for value in graph.nodes[name].outputs if types[value] is low} for name in reads}
    for name, node in graph.nodes.items():
        firsts = {one.value for one in node.inputs if one.slot.partition(".")[2] in ("", "0")}  # of a list, all it asks
        makers = {value: graph.producer(value) for value in reads.get(name, set()) & firsts}
        readers = {user for value in writes.get(name, ()) for user, _ in graph.readers(value)}
        if name in widened or not any(makers.values()) or not readers or returned & {*node.outputs}:
            continue
        if readers <= widened.keys() and all(
            maker is None or (types[value] is low and maker.name in widened) for value, maker in makers.items()
        ):
            widened[name] = None
    inward = {value for name in widened for value in reads[name] if types[value] is low or graph.is_folded(value)}
    outward = {value for name in widened for value in writes[name]}
    kept = {value for name, read in reads.items() if name not in widened for value in read}
    kept |= {value for value in outward if not graph.readers(value) and value not in returned}  # cast all the same
    kept |= {value for value in returned & outward if graph.values[value].dtype is low or value not in graph.outputs}
    undone = {value for value in inward if (maker := graph.producer(value)) is not None and typing[maker.name].is_cast}
    return +missing, len(inward - outward - undone) + len(outward & kept)
