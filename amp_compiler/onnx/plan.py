"""Planning an ONNX model: it is read, lowered, raised to a later opset where needed, pinned, and the rules decide."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType, low_type
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.lower import Lowered, lower
from amp_compiler.onnx.lowering.norms import find_norms, pin_norm
from amp_compiler.onnx.lowering.overflow import Overflows
from amp_compiler.onnx.lowering.ranges import Ranges, pin_ranges
from amp_compiler.onnx.lowering.running_sums import pin_running_sums
from amp_compiler.onnx.model.model import Source, open_model, read_model
from amp_compiler.onnx.model.opset import raise_opset
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.planner.numbers import find_numbers
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision, RuleSet

_ASKED = (Precision.LOW, Precision.WIDEST, Precision.FOLLOW)


def explain_onnx(
    source: Source,
    *,
    rules: Any = "default",
    dtype: str = "fp16",
    ranges: Mapping[str, float] | None = None,
    stages: Stages | None = None,
) -> PrecisionPlan:
    """The plan that `convert_onnx` would carry out.

    Args:
        source: path of a model, a `ModelProto`, or what `open_model` gave.
        rules: as for `convert_onnx`.
        dtype: as for `convert_onnx`.
        ranges: calibrated largest magnitude by value name.
        stages: takes the graph that is planned, as text, and what each pass decides on it.

    Raises:
        OnnxError: the model cannot be read.
    """
    return plan_onnx(source, load_rules(rules), low_type(dtype), ranges, stages=stages)[0]


def plan_onnx(
    source: Source,
    rules: RuleSet,
    low: DType,
    ranges: Mapping[str, float] | None = None,
    *,
    keep_io_types: bool = True,
    raising: bool = True,
    stages: Stages | None = None,
) -> tuple[PrecisionPlan, Lowered, Ranges]:
    """The plan of a model, the lowered model that `lowering.apply` carries it out on, and what ranges demand.

    Args:
        source: path of a model, a `ModelProto`, or what `open_model` gave.
        rules: the rules.
        low: the 16-bit type.
        ranges: calibrated largest magnitude by value name.
        keep_io_types: as for `convert_onnx`.
        raising: raise the opset where only a later one admits the low type. Where ONNX's converter cannot do it, the
            ops that a rule merely lets be low stay FP32, and one that a rule asks to be low is an error.
        stages: as for `explain_onnx`.

    Raises:
        OnnxError: the model cannot be read, or its opset not be raised.
    """
    opened = open_model(source)
    named = names_ops(rules)
    lowered = lower(read_model(opened), low, named=named, keep_io_types=keep_io_types)
    if raising and lowered.late:
        later = _later_opset(lowered, rules, low)
        if later is not None:
            version, why, needed = later
            try:
                raised = raise_opset(opened, version, why)
                lowered = lower(read_model(raised), low, named=named, keep_io_types=keep_io_types)
            except OnnxError:
                if needed:
                    raise
    found = pin_ranges(lowered, ranges)
    if rules.keeps("running_sums"):
        pin_running_sums(lowered)
    known = {name: largest for name, largest in (ranges or {}).items() if name in lowered.graph.values}
    _unify_norms(lowered, rules, low, known)
    if stages is not None:
        stages.note("capture", lowered.graph.to_text())
    return make_plan(lowered.graph, rules, low, ranges=known, stages=stages), lowered, found


def names_ops(rules: RuleSet) -> Callable[[str, str], bool]:
    """Whether some rule names an op, or a node, of a custom domain: by a glob that says more than `*`."""
    globs = [glob for rule in rules.rules for glob in rule.match.get("op") if glob.strip("*")]
    patterns = [pattern for rule in rules.rules for pattern in rule.match.get("node")]

    def named(op: str, node: str) -> bool:
        if op.startswith("onnx."):
            return False
        return any(fnmatch.fnmatchcase(op, glob) for glob in globs) or any(pattern.search(node) for pattern in patterns)

    return named


def _unify_norms(lowered: Lowered, rules: RuleSet, low: DType, ranges: Mapping[str, float]) -> None:
    """Keep a normalisation that is written out FP32 as a whole where a part of it is.

    ONNX Runtime fuses such parts to one op of one type, and refuses the model where their types differ. What stands
    between a sum of squares and its root would undo what the FP32 sum is for.
    """
    norms = [*find_norms(lowered), *Overflows(lowered, {}).sums_of_squares()]
    if not norms:
        return
    matcher = RuleMatcher(rules, lowered.graph, Context(low, lowered.graph.device), ranges)
    for norm in norms:
        for name in norm:
            node = lowered.graph.nodes[name]
            decision = matcher.decide(node)
            asked = node.pin.precision if node.pin is not None else decision and decision.precision.value
            if asked == Precision.FP32.value:
                pin_norm(lowered, norm, name)
                break


def _later_opset(lowered: Lowered, rules: RuleSet, low: DType) -> tuple[int, str, bool] | None:
    """The opset that the nodes need whose rules ask for the low type, why, and whether a rule asks for it outright."""
    matcher = RuleMatcher(rules, lowered.graph, Context(low, lowered.graph.device))
    wanted: tuple[int, str] | None = None
    needed = False
    kept = find_numbers(lowered.graph, rules).kept
    for name, version in lowered.late.items():
        if name in kept:
            continue
        node = lowered.graph.nodes[name]
        decision = matcher.decide(node)
        if decision is None or decision.precision not in _ASKED:
            continue
        needed = needed or decision.precision is Precision.LOW
        if wanted is None or version > wanted[0]:
            wanted = version, f"{node.op} takes {low.short} from opset {version} on (node '{name}')"
    return None if wanted is None else (*wanted, needed)
