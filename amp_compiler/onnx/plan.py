"""Planning an ONNX model: it is read, lowered, raised to a later opset where needed, pinned, and the rules decide."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import onnx

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType, low_type
from amp_compiler.ir.graph import Node, Pin
from amp_compiler.ir.plan import PlannedCast, PrecisionPlan
from amp_compiler.onnx.check.loads import latest_opset, refusal_of
from amp_compiler.onnx.lowering.compounds import LAYER_NORM, RMS_NORM, mark_compounds
from amp_compiler.onnx.lowering.fuse import FIRST_OPSET, Fusion, told_fusion
from amp_compiler.onnx.lowering.fuse import fuse as fuse_compounds
from amp_compiler.onnx.lowering.lower import Lowered, lower
from amp_compiler.onnx.lowering.norms import find_norms, pin_norm
from amp_compiler.onnx.lowering.overflow import Overflows
from amp_compiler.onnx.lowering.parameters import pin_batch_norms, pin_scales
from amp_compiler.onnx.lowering.ranges import Ranges, pin_ranges
from amp_compiler.onnx.lowering.running_sums import pin_running_sums
from amp_compiler.onnx.model.infer import Sizes
from amp_compiler.onnx.model.model import OnnxFile, Source, open_model, read_model
from amp_compiler.onnx.model.opset import opset_of, raise_opset
from amp_compiler.onnx.model.retype import make_fp32, types_of
from amp_compiler.onnx.model.validate import told_as_onnx
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.planner.free_nodes import CAST_OVERHEAD
from amp_compiler.planner.numbers import find_numbers
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision, RuleSet

_NORMS = {LAYER_NORM: "onnx.LayerNormalization", RMS_NORM: "onnx.RMSNormalization"}  # by part, the op for it
_ASKED = (Precision.LOW, Precision.WIDEST, Precision.BETWEEN, Precision.FOLLOW)


def explain_onnx(
    source: Source,
    *,
    rules: Any = "default",
    dtype: str = "fp16",
    ranges: Mapping[str, float] | None = None,
    stages: Stages | None = None,
    check: bool = True,
    sizes: Sizes | None = None,
    as_fp32: Iterable[str] | str = (),
    opset: int | None = None,
    fuse: bool | None = None,
) -> PrecisionPlan:
    """The plan that `convert_onnx` would carry out.

    Args:
        source: path of a model, a `ModelProto`, or what `open_model` gave.
        rules: as for `convert_onnx`.
        dtype: as for `convert_onnx`.
        ranges: calibrated largest magnitude by value name.
        stages: takes the graph that is planned, as text, and what each pass decides on it.
        check: refuse what ONNX's full checker refuses.
        sizes: sizes of the dimensions that the model leaves open, by name, and by (input, axis) for those without one.
        as_fp32: types whose parts of the model are made FP32 first: `fp64`, `fp16`, `bf16`.
        opset: as for `convert_onnx`.
        fuse: as for `convert_onnx`.

    Raises:
        OnnxError: the model cannot be read, or its opset not be raised.
    """
    low = low_type(dtype)
    plan, _, _ = plan_onnx(
        open_model(source), load_rules(rules), low, ranges,
        stages=stages, check=check, opset=opset, sizes=sizes, as_fp32=as_fp32, fused=fuse,
    )  # fmt: skip
    return replace(plan)  # reads the verdicts, so that the plan does not hold on to the model


def plan_onnx(
    opened: OnnxFile,
    rules: RuleSet,
    low: DType,
    ranges: Mapping[str, float] | None = None,
    *,
    keep_io_types: bool = True,
    raising: bool = True,
    stages: Stages | None = None,
    check: bool = True,
    opset: int | None = None,
    sizes: Sizes | None = None,
    as_fp32: Iterable[str] | str = (),
    fused: bool | None = None,
) -> tuple[PrecisionPlan, Lowered, Ranges]:
    """The plan of a model, the lowered model that `lowering.apply` carries it out on, and what ranges demand.

    Args:
        opened: the model, as `open_model` gives it.
        rules: the rules.
        low: the 16-bit type.
        ranges: calibrated largest magnitude by value name.
        keep_io_types: as for `convert_onnx`.
        raising: raise the opset where only a later one admits the low type, as far as the installed ONNX Runtime loads
            the model. Where ONNX's converter cannot do it, the ops that a rule merely lets be low stay FP32, and one
            that a rule asks to be low is an error.
        stages: as for `explain_onnx`.
        check: as for `explain_onnx`.
        opset: raise the model to this opset, and no further.
        sizes: as for `explain_onnx`.
        as_fp32: as for `explain_onnx`.
        fused: as `fuse` of `convert_onnx`.

    Raises:
        OnnxError: the model cannot be read, or its opset not be raised.
    """
    named = names_ops(rules)
    if opset is not None:
        opened = _at_opset(opened, opset, raising)
    wide = types_of(as_fp32)

    def lowered_from(
        file: OnnxFile, checked: bool, only: frozenset[str] | None = None
    ) -> tuple[Lowered, Fusion | None]:
        fuses = bool(fused) or only is not None
        model = read_model(file, check=checked, sizes=sizes, plain=not wide and not fuses)
        if wide:
            make_fp32(model, wide, keep_io_types=keep_io_types)
        fusion = fuse_compounds(model, only) if fuses else None
        return lower(model, low, **options), fusion

    options: dict[str, Any] = {
        "named": named, "keep_io_types": keep_io_types, "keep_quantized": rules.keeps("quantized"),
    }  # fmt: skip
    with told_as_onnx(opened.name, "it cannot be planned"):
        lowered, fusion = lowered_from(opened, check)
        if raising and opset is None and lowered.late:
            raised = _raised(opened, lowered, rules)
            if raised is not None:
                opened = raised
                lowered, fusion = lowered_from(raised, False)
        compounds = mark_compounds(lowered)
        norms = _norms_in_parts(lowered, compounds) if fused is None else []
        plan, found = _decided(lowered, compounds, fusion, rules, ranges, None if norms else stages)
        torn = _torn(lowered, norms, plan, rules)
        if torn:
            whole, fusion = lowered_from(opened, False, torn)
            made, ranged = _decided(whole, mark_compounds(whole), fusion, rules, ranges, stages)
            if _cast_cost(made) < _cast_cost(plan):
                return made, whole, ranged
        if norms and stages is not None:
            plan, found = _decided(lowered, compounds, None, rules, ranges, stages)
        return plan, lowered, found


def _decided(
    lowered: Lowered,
    compounds: list[list[str]],
    fusion: Fusion | None,
    rules: RuleSet,
    ranges: Mapping[str, float] | None,
    stages: Stages | None,
) -> tuple[PrecisionPlan, Ranges]:
    """The plan of a lowered model, and what ranges demand. Fills in what the graph demands of its nodes."""
    low = lowered.low
    known = {name: largest for name, largest in (ranges or {}).items() if name in lowered.graph.values}
    if fusion is not None:
        known.update({name: known[source] for name, source in fusion.like.items() if source in known})
        _mark_fused(lowered, fusion)
    found = pin_ranges(lowered, known, powers=rules.keeps("powers"))
    pin_batch_norms(lowered)
    pin_scales(lowered)
    if rules.keeps("running_sums"):
        pin_running_sums(lowered)
    _unify_norms(lowered, compounds, rules, low, known)
    if low is DType.FLOAT16 and rules.keeps("powers"):
        _keep_means(lowered, rules, known)
    if stages is not None:
        stages.note("capture", lowered.graph.to_text())
    plan = make_plan(lowered.graph, rules, low, ranges=known, stages=stages, later=True)
    return plan if fusion is None else _with_fusion(plan, lowered, fusion), found


def _norms_in_parts(lowered: Lowered, compounds: list[list[str]]) -> list[list[str]]:
    """The norms among the compounds, where the opset has an op for them."""
    if lowered.model.opset("") < FIRST_OPSET:
        return []
    nodes = lowered.graph.nodes
    return [names for names in compounds if any(nodes[name].part in _NORMS for name in names)]


def _torn(lowered: Lowered, norms: list[list[str]], plan: PrecisionPlan, rules: RuleSet) -> frozenset[str]:
    """The results of the norms beside which a plan has casts, though the rules would have one op for them 16-bit.

    Args:
        lowered: the lowered model.
        norms: the nodes of each norm that stands in parts.
        plan: the plan of it.
        rules: the rules.
    """
    beside: set[str] = set()
    for cast in plan.casts if norms else ():
        if _moves(cast):
            maker = lowered.graph.producer(cast.value)
            beside.update([name for name, _ in cast.users], [maker.name] if maker is not None else ())
    norms = [names for names in norms if not beside.isdisjoint(names)]
    if not norms:
        return frozenset()
    matcher = RuleMatcher(rules, lowered.graph, Context(lowered.low, lowered.graph.device))
    numbers = find_numbers(lowered.graph, rules)

    def may_be_low(node: Node) -> bool:
        if node.name in numbers.kept or (node.pin is not None and node.pin.precision == Precision.KEEP.value):
            return False
        decision = matcher.decide(replace(node, op=_NORMS[node.part])) if node.part in _NORMS else None
        return decision is None or decision.precision in (Precision.LOW, Precision.FOLLOW)

    whole = [names for names in norms if all(may_be_low(lowered.graph.nodes[name]) for name in names)]
    return frozenset(lowered.nodes[names[-1]].outputs[0].name or "" for names in whole)


def _moves(cast: PlannedCast) -> bool:
    return cast.bytes > 0 and not cast.explicit


def _cast_cost(plan: PrecisionPlan) -> int:
    """What the casts of a plan cost, as the cut counts it."""
    return sum(cast.bytes + CAST_OVERHEAD for cast in plan.casts if _moves(cast))


def _mark_fused(lowered: Lowered, fusion: Fusion) -> None:
    """Say of each op that took the place of a norm or GELU what it stands for (`Node.part`). Changes the graph."""
    nodes = lowered.graph.nodes
    for name, node in lowered.nodes.items() if fusion.kinds else ():
        if node in fusion.kinds:
            nodes[name] = replace(nodes[name], part=fusion.kinds[node])


def _with_fusion(plan: PrecisionPlan, lowered: Lowered, fusion: Fusion) -> PrecisionPlan:
    """The plan with what was fused, and what was not, in the reasons of its nodes. Fills `lowered`."""
    lowered.fused = fusion.fused.total()
    lowered.notes.extend(told_fusion(fusion, lowered.model.opset("")))
    told = {**fusion.made, **fusion.left}
    by_name = {name: told[node] for name, node in lowered.nodes.items() if node in told}
    nodes = (replace(node, reason=f"{node.reason}; {by_name[node.name]}") if node.name in by_name else node
             for node in plan.nodes)  # fmt: skip
    return replace(plan, nodes=tuple(nodes))


def names_ops(rules: RuleSet) -> Callable[[str, str], bool]:
    """Whether some rule names an op, or a node, of a custom domain: by a glob that says more than `*`."""
    globs = [glob for rule in rules.rules for glob in rule.match.get("op") if glob.strip("*")]
    patterns = [pattern for rule in rules.rules for pattern in rule.match.get("node")]

    def named(op: str, node: str) -> bool:
        if op.startswith("onnx."):
            return False
        return any(fnmatch.fnmatchcase(op, glob) for glob in globs) or any(pattern.search(node) for pattern in patterns)

    return named


def _unify_norms(
    lowered: Lowered, compounds: list[list[str]], rules: RuleSet, low: DType, ranges: Mapping[str, float]
) -> None:
    """Keep a normalisation or GELU that is written out FP32 as a whole where a part of it is.

    ONNX Runtime fuses such parts to one op of one type, and refuses the model where their types differ. What stands
    between a sum of squares and its root would undo what the FP32 sum is for.
    """
    norms = [*compounds, *find_norms(lowered), *Overflows(lowered, {}).sums_of_squares()]
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


def _keep_means(lowered: Lowered, rules: RuleSet, ranges: Mapping[str, float]) -> None:
    """Pin to FP32 what makes a mean of a sum that is FP32, and may be beyond FP16. Changes `lowered.graph`."""
    matcher = RuleMatcher(rules, lowered.graph, Context(lowered.low, lowered.graph.device), ranges)
    for total, makers in list(Overflows(lowered, {}).means()):
        decision = matcher.decide(total) if total.pin is None and makers else None
        asked = total.pin.precision if total.pin is not None else decision and decision.precision.value
        for node in makers if asked == Precision.FP32.value else ():
            if node.pin is None:
                reason = f"it brings the sum '{total.name}' back into the range of fp16"
                lowered.graph.nodes[node.name] = replace(node, pin=Pin("fp32", reason))


def _at_opset(opened: OnnxFile, opset: int, raising: bool) -> OnnxFile:
    """The model in the opset that the user names."""
    present = opset_of(opened.proto)
    latest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or isinstance(opset, bool) or not 1 <= opset <= latest:
        raise OnnxError(f"{opset!r} is no opset", where="opset", mend=f"give a number up to {latest}, or leave it out")
    if opset < present:
        raise OnnxError(
            f"the model's opset is {present}, and opset {opset} would lower it",
            where="opset",
            mend=f"give {present} or more, or export the model with opset {opset}",
        )
    if opset > present and not raising:
        raise OnnxError(
            f"opset {opset} raises the model's, which is {present}, and raise_opset=False forbids it",
            where="opset",
            mend="leave one of the two out",
        )
    return raise_opset(opened, opset, f"opset {opset} is asked for") if opset > present else opened


def _raised(opened: OnnxFile, lowered: Lowered, rules: RuleSet) -> OnnxFile | None:
    """The model in the latest opset that its nodes ask for, its converter reaches and ONNX Runtime loads; `None`: none.

    Raises:
        OnnxError: the converter cannot do it, and a rule asks for the low type outright.
    """
    wanted = late_nodes(lowered, rules)
    limit = latest_opset()
    versions = sorted({lowered.late[node.name] for node, _ in wanted}, reverse=True)
    failed: OnnxError | None = None
    for version in versions:
        if limit is not None and version > limit:
            continue
        node = next(node for node, _ in wanted if lowered.late[node.name] == version)
        why = f"{node.op} takes {lowered.low.short} from opset {version} on (node '{node.name}')"
        try:
            raised = raise_opset(opened, version, why)
        except OnnxError as wrong:
            failed = failed or wrong
            continue
        if refusal_of(raised.proto, raised.folder, light=True) is None or (
            refusal_of(opened.proto, opened.folder, light=True) is not None
        ):
            return raised
    if failed is not None and any(needed for _, needed in wanted):
        raise failed
    return None


def late_nodes(lowered: Lowered, rules: RuleSet) -> list[tuple[Node, bool]]:
    """The nodes that stay FP32 for their opset alone, and whether a rule asks for the low type outright.

    Args:
        lowered: the lowered model.
        rules: the rules, which let these nodes be low.
    """
    if not lowered.late:
        return []
    matcher = RuleMatcher(rules, lowered.graph, Context(lowered.low, lowered.graph.device))
    kept = find_numbers(lowered.graph, rules).kept
    found = []
    for name in lowered.late:
        node = lowered.graph.nodes[name]
        decision = None if name in kept else matcher.decide(node)
        if decision is not None and decision.precision in _ASKED:
            found.append((node, decision.precision is Precision.LOW))
    return found


def told_late(lowered: Lowered, rules: RuleSet, *, raising: bool, opset: int | None) -> str:
    """What a later opset would change, in a sentence; empty where it would change nothing.

    Args:
        lowered: the lowered model, after its opset was raised.
        rules: the rules.
        raising: whether the opset might be raised.
        opset: the one that the user named.
    """
    late = [node for node, _ in late_nodes(lowered, rules)]
    if not late:
        return ""
    by_op = Counter((node.op, lowered.late[node.name]) for node in late)
    listed = ", ".join(
        f"{count} {op.removeprefix('onnx.')} (opset {version})" for (op, version), count in sorted(by_op.items())
    )
    nodes = "1 node stays" if len(late) == 1 else f"{len(late)} nodes stay"
    latest = latest_opset()
    if not raising:
        mend = "allow the opset to be raised"
    elif opset is not None:
        mend = "name a later opset, or none"
    elif latest is not None:
        mend = f"the onnxruntime loads opsets up to {latest}, and not every op in all of them; opset= names another"
    else:
        mend = "export the model with a later opset"
    present, short = lowered.model.opset(""), lowered.low.short
    return f"{nodes} FP32 because the opset is {present}: {short} comes later for {listed}; {mend}"
