"""`classify`: what the rules, and the model itself, ask of every node.

What decides the type of a node, in the order in which it does. A later line changes what an earlier one said only where
it is told so.

| what decides | it gives | where |
|---|---|---|
| the model: its casts, `autocast(enabled=False)`, ops of one type | pin | `fx/lower.py`, `onnx/lowering/pins.py` |
| ONNX_PLAN, on a file: numbers, overflows, calibration, parameters, norms | pin | `passes/onnx_plan/`, in its order |
| a pin, of either | FP32, kept | `_decide` |
| data that no plan converts: FP64, complex numbers, no FP32 at all | kept | `_why_untouchable` |
| the rules, the last that matches; without one it is kept | any | `policy/matching.py` |
| a number among the arguments that the low type does not hold | FP32 | `_too_large`, of what is not kept or FP32 |
| the logarithm of a probability: a loss in FP32, or in a file | FP32 | `planner/probabilities.py`, of what was open |
| an output between bounds, of a graph that may be trained | FP32 | the same file, of what no own rule asks |
| sizes, indices, angles | kept, widest | `planner/numbers.py`, of what would be rounded |
| `between` | low, FP32 | `planner/between.py` |
| lists of tensors | one for all | `planner/lists.py`, of every node of one list |
| what a node can do: no operand to cast, shared memory, `widest` | low, FP32, kept | `planner/fixed_labels.py` |
| what is still free: least memory traffic | low, FP32 | `planner/cut.py` |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Attr, Node, PrecisionGraph, Value
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.planner.between import settle_between
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.lists import unify_lists
from amp_compiler.planner.numbers import find_numbers
from amp_compiler.planner.probabilities import makers_of_outputs, makers_of_probabilities
from amp_compiler.policy.marks import error_at
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Decision, Precision

# Whole numbers are shapes and axes far more often than operands: only those of these arguments are operands.
_OPERANDS = frozenset({"value", "other", "min", "max", "fill_value"})
_UNTOUCHABLE = frozenset({DType.FLOAT64, DType.COMPLEX32, DType.COMPLEX64, DType.COMPLEX128})
_FP8_ALIGNED, _FP8_BLOCK = 16, 32  # what the lengths of FP8 operands are multiples of
_GUARDED = (Precision.LOW, Precision.WIDEST, Precision.BETWEEN, Precision.FOLLOW)


@dataclass(frozen=True)
class Classify(FunctionalPass[Draft]):
    """Give every node a decision: with the rule that made it, by file and line, and the reason in words.

    The model's own pins come first, then what cannot be converted, then the rules, of which the last match wins, then a
    guard for numbers that the low type does not hold, one for probabilities that a loss in FP32 reads, and one for
    sizes, indices, positions and angles. What is `between` comes to low or FP32, and then all that reads or
    makes one list of tensors to one precision.

    Before (rules `default`, low type fp16):

        %y = aten.linear(%x, %weight)          # module mlp.fc1
        %z = aten.softmax(%y) {dim=-1}

    After, as decisions:

        %y: low   default.yaml:40
        %z: fp32  default.yaml:71

    Not changed: a node inside `autocast(enabled=False)` (fp32 by its pin), `aten.to` (kept by its pin), and
    `aten.masked_fill` with -3.4e38 in fp16 (fp32: the number would become an infinity).
    """

    exact: ClassVar[bool] = True

    def requires(self, subject: Draft) -> str | None:
        """No decision was made before."""
        return "the nodes are classified already" if subject.decisions else None

    def ensures(self, subject: Draft, remembered: Any) -> str | None:
        """Every node has a decision, and every decision a reason."""
        if not subject.graph.nodes.keys() <= subject.decisions.keys():
            missing = next(name for name in subject.graph.nodes if name not in subject.decisions)
            return f"node '{missing}' has no decision"
        mute = [name for name, decision in subject.decisions.items() if not decision.reason]
        return f"the decision on node '{mute[0]}' has no reason" if mute else None

    def run(self, subject: Draft) -> PassResult[Draft]:
        """Decide node by node, then widen what makes the probabilities of a loss, and keep sizes and angles."""
        matcher = RuleMatcher(subject.rules, subject.graph, subject.context, subject.ranges)
        flexible = subject.typing.flexible
        decisions: dict[str, Decision] = {}
        values, by_kind = subject.graph.values, matcher.by_kind_alone
        for name, node in subject.graph.nodes.items():
            decision = None if node.pin is not None or node.attrs else by_kind.get((node.op, node.part))
            if (
                decision is None
                or decision.math is not None
                or decision.refusal
                or not _is_open(values, flexible, node)
            ):
                decision = _decide(subject, flexible, matcher, node)
            decisions[name] = decision
        for name, loss in makers_of_probabilities(subject, decisions).items():
            reason = f"'{loss.name}' ({loss.op}) takes the logarithm of what it makes, so it runs in FP32"
            decisions[name] = _in_fp32(decisions[name], reason)
        for name in makers_of_outputs(subject, decisions):
            reason = "it makes an FP32 output of the model between fixed bounds, whose logarithm may be taken"
            decisions[name] = _in_fp32(decisions[name], reason)
        _keep_numbers(subject, decisions)
        between = settle_between(subject, decisions)
        for name, why in between.items():
            message, low = why or "between nodes that run low", Precision.FP32 if why else Precision.LOW
            decisions[name] = replace(decisions[name], precision=low, reason=f"{decisions[name].reason}; {message}")
        if subject.graph.lists:
            unify_lists(subject, decisions, between)
        return PassResult(replace(subject, decisions=decisions) if decisions else subject, bool(decisions))


def _decide(draft: Draft, flexible: frozenset[DType], matcher: RuleMatcher, node: Node) -> Decision:
    if node.pin is not None:
        return Decision(Precision.FP32 if node.pin.precision == "fp32" else Precision.KEEP, reason=node.pin.reason)
    stuck = _why_untouchable(draft.graph.values, flexible, node)
    if stuck is not None:
        return Decision(Precision.KEEP, reason=stuck)
    decision = matcher.decide(node)
    if decision is None:
        return Decision(Precision.KEEP, reason="no rule matches, so it stays as it was captured")
    if decision.refusal:
        what = f"'{node.name}' ({node.op}){f' at {node.source}' if node.source else ''} is refused: {decision.reason}"
        raise error_at(decision.rule, what, decision.refusal)
    if isinstance(decision.math, Fp8):
        decision = _in_fp8(draft, node, decision, decision.math)
    elif isinstance(decision.backward_math, Fp8):
        what = f"'backward.math: fp8' needs 'math: fp8' beside it, and '{node.name}' ({node.op}) has none"
        raise error_at(decision.rule, what, "write 'math: fp8' too")
    elif decision.math is not None:
        _check_math(draft, node, decision)
    if node.attrs and decision.precision in _GUARDED:
        lost = _too_large(draft.context.low, node)
        if lost is not None:
            name, number = lost
            message = f"{name}={number:g} would become an infinity in {draft.context.low.short}"
            return _in_fp32(decision, f"{message}, so it runs in FP32, backward too")
    return decision


def _keep_numbers(draft: Draft, decisions: dict[str, Decision]) -> None:
    """Keep sizes, indices and angles as captured where the rules would round them. Changes `decisions`.

    What the rules run in FP32, or in the widest type of its inputs, is that already.
    """
    numbers = find_numbers(draft.graph, draft.rules)

    def rounds(name: str) -> bool:
        info, precision = draft.rules.ops.info(draft.graph.nodes[name].op), decisions[name].precision
        return precision in (Precision.LOW, Precision.BETWEEN) or (precision is Precision.FOLLOW and not info.exact)

    for name in filter(rounds, numbers.kept):
        decisions[name] = Decision(Precision.KEEP, reason=f"{numbers.kept[name]}, so it stays as captured")
    for name in filter(rounds, numbers.widest):
        message = f"{numbers.widest[name]}, so it runs in the widest type of its inputs"
        decisions[name] = replace(decisions[name], precision=Precision.WIDEST, rule="", reason=message)


def _in_fp32(decision: Decision, reason: str) -> Decision:
    return replace(decision, precision=Precision.FP32, rule="", reason=reason, math=None, backward=None, math_rule="")


def _check_math(draft: Draft, node: Node, decision: Decision) -> None:
    """Refuse arithmetic that no kernel has, at the rule that asks for it."""
    math_type, low = decision.math, draft.context.low
    if math_type is None or math_type is DType.FLOAT32 or decision.precision is Precision.KEEP:
        return
    if decision.precision is Precision.FP32:
        why = f"'{node.name}' ({node.op}) runs in FP32, and {math_type.short} is narrower than its data"
    elif math_type is not low:
        why = f"the low type is {low.short}"
    else:
        why = f"kernels that read and write {low.short} compute in FP32 and round at the end"
    raise error_at(
        decision.math_rule,
        f"'math: {math_type.short}' cannot be carried out: {why}",
        "write 'math: fp32', or leave it out",
    )


def _in_fp8(draft: Draft, node: Node, decision: Decision, way: Fp8) -> Decision:
    """The decision, without FP8 and with the reason where the node has no such product."""
    why = _why_no_fp8(draft, node, decision, way)
    if not why:
        return decision
    if way.unfit == "refuse":
        raise error_at(
            decision.math_rule,
            f"'math: fp8' cannot be carried out on '{node.name}' ({node.op}): {why}",
            "except it by a later rule with a precision and no 'math', or write 'unfit: low'",
        )
    gradients = None if isinstance(decision.backward_math, Fp8) else decision.backward_math
    return replace(decision, math=None, backward_math=gradients, reason=f"{decision.reason}; not in FP8: {why}")


def _why_no_fp8(draft: Draft, node: Node, decision: Decision, way: Fp8) -> str:
    """Why a node is not computed of FP8 operands; empty where it is."""
    info, in_file = draft.rules.ops.info(node.op), draft.graph.execution.scales_stored
    form = info.fp8
    operands = [draft.graph.values[operand.value] for operand in node.inputs]
    operands = operands[info.sums == "inner_behind_summand" :][:2]
    matrices = [value.shape or () for value in operands if (value.rank or 0) > 1]
    if not form:
        return "the op table knows no FP8 product of it"
    if decision.precision is not Precision.LOW:
        return "it does not run low"
    if decision.backward is Precision.FP32:
        return "its gradients are FP32"
    if in_file and (why := _why_not_in_file(draft, operands, way)):
        return why
    if form == "convolution":
        spread = way.scaling in ("tensorwise", "delayed")
        return "" if in_file or spread else f"a convolution has no {way.scaling} scales"
    if len(matrices) < 2 or len(matrices[1]) != 2:
        return "its operands are no matrices"
    multiple = _FP8_BLOCK if way.scaling == "mx" else _FP8_ALIGNED
    odd = next((size for size in matrices[1] if isinstance(size, int) and size % multiple), None)
    return "" if odd is None else f"{odd} is no multiple of {multiple}"


def _why_not_in_file(draft: Draft, operands: list[Value], way: Fp8) -> str:
    """Why an ONNX file cannot hold FP8 operands: their scales stand in it, measured before."""
    if way.scaling == "mx":
        return "scales in an ONNX file are measured before, and those of blocks follow from what they are"
    graph = draft.graph
    stored = {value.name: _stored_behind(graph, value.name) for value in operands}
    if not any(stored.values()):
        return "it has no stored operand, and ONNX Runtime loads no FP8 product of two others"
    for value in operands:
        if value.shape is None:
            return f"the shape of '{value.name}' is not known"
        maker, largest = graph.producer(value.name), draft.ranges.get(value.name)
        if maker is not None and draft.rules.ops.info(maker.op).quantized:
            return f"'{value.name}' is quantised already"
        if stored[value.name]:
            numbers = graph.stored_numbers(stored[value.name])
            if numbers is None or numbers.infinite:
                return f"'{value.name}' holds numbers that are not finite"
        elif draft.ranges and (largest is None or not 0 < largest < math.inf):
            seen = "did not measure it" if largest is None else f"measured {largest:g}"
            return f"'{value.name}' has no scale: calibration {seen}"
    return ""


def _stored_behind(graph: PrecisionGraph, name: str) -> str:
    """The stored data that a value is, or a transpose of; empty where it is made of others."""
    while (maker := graph.producer(name)) is not None and maker.op in ("onnx.Transpose", "onnx.Identity"):
        name = maker.inputs[0].value
    return name if graph.is_folded(name) else ""


def _is_open(values: Mapping[str, Value], flexible: frozenset[DType], node: Node) -> bool:
    """True where a node reads nothing but what a plan may exchange, as most do: `_why_untouchable` has no reason."""
    for operand in node.inputs:
        if values[operand.value].dtype not in flexible:
            return False
    return bool(node.inputs)


def _why_untouchable(values: Mapping[str, Value], flexible: frozenset[DType], node: Node) -> str | None:
    """Why no plan may change the types of a node; `None` where one may."""
    touches = False
    for operand in node.inputs:
        dtype = values[operand.value].dtype
        if dtype in flexible:
            touches = True
        elif dtype in _UNTOUCHABLE:
            return f"its input '{operand.value}' is {dtype.value}, which is never exchanged for a 16-bit type"
    touches = touches or any(values[name].dtype in flexible for name in node.outputs)
    return None if touches else "no float32 data"


def _too_large(low: DType, node: Node) -> tuple[str, float] | None:
    """The first finite number among the arguments that the low type turns into an infinity."""
    largest = low.format.max
    for name, attr in node.attrs.items():
        for number in _numbers(name, attr):
            if math.isfinite(number) and abs(number) > largest:
                return name, number
    return None


def _numbers(name: str, attr: Attr) -> Iterator[float]:
    if isinstance(attr, tuple):
        for item in attr:
            yield from _numbers(name, item)
    elif isinstance(attr, float):
        yield attr
    elif isinstance(attr, int) and not isinstance(attr, bool) and name in _OPERANDS:
        # A whole number beyond every float, such as 10**400, is as good as any that does not fit.
        yield float(attr) if abs(attr) < 1 << 1000 else 1e300 * (1 if attr > 0 else -1)
