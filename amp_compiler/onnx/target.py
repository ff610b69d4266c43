"""A model on the execution provider that is to run it: what ONNX Runtime adds to it there, counted from the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from amp_compiler.ir.dtypes import DType
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


def note_of(providers: Providers, after: tuple[Counter[str], int], before: tuple[Counter[str], int]) -> str:
    """What ONNX Runtime adds to a model, beside what it would add to the one that is planned for no target."""
    missing, casts = after
    ops = ", ".join(f"{count} {op.removeprefix('onnx.')}" for op, count in sorted(missing.items()))
    lacking = f"{missing.total()} nodes without a kernel in their type" + (f" ({ops})" if ops else "")
    return (
        f"target {providers.name}: {lacking}, {casts} casts that ONNX Runtime inserts; without a target"
        f" {before[0].total()} and {before[1]}"
    )


def added_by_runtime(
    lowered: Lowered, ops: OpTable, labels: Mapping[str, str], providers: Providers
) -> tuple[Counter[str], int]:
    """What ONNX Runtime does about nodes that its provider has no kernel for in the type that a plan gives them.

    Where no other provider has one either, it runs an FP16 node in FP32 between casts of its own: one for each value
    that such nodes read and none of them makes, and one for each that they make and another node reads in FP16.

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
    cast_in: set[str] = set()
    cast_out: set[str] = set()
    read = set(graph.outputs)
    for name, node in graph.nodes.items():
        needs = typing.needs(node, labels.get(name, KEEP))
        reads = {one.value: need or types[one.value] for one, need in zip(node.inputs, needs, strict=True)}
        makes = {value: types[value] for value in node.outputs}
        floats = {low, DType.FLOAT32} & {*reads.values(), *makes.values()}
        if typing[name].is_cast:
            if DType.FLOAT32 not in makes.values():
                read |= reads.keys()
            continue
        if not floats or node.op in _BODIES:
            continue
        kind = low if low in floats else DType.FLOAT32
        if not providers.tables[0].has(node.op, versions[name], kind):
            missing[node.op] += 1
        casts = kind is DType.FLOAT16 and providers.obstacle(node.op, versions[name], low) is not None
        (cast_in if casts else read).update(value for value, dtype in reads.items() if dtype is low)
        cast_out.update(value for value, dtype in makes.items() if casts and dtype is low)
    return missing, len(cast_in - cast_out) + len(cast_out & read)
