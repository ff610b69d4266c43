"""Planning an ONNX model: it is read, lowered, raised to a later opset where needed, and the rules decide."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from amp_compiler.ir.dtypes import DType, LowArgument, low_type
from amp_compiler.ir.graph_text import format_graph
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.later_opset import at_opset, raised_for, raised_for_fp8
from amp_compiler.onnx.lowering.compounds import mark_compounds
from amp_compiler.onnx.lowering.fuse import OPS, Fusion, fusion_messages
from amp_compiler.onnx.lowering.fuse import fuse as fuse_compounds
from amp_compiler.onnx.lowering.lower import lower
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.lowering.mask_bounds import FIRST_OPSET as BOUNDING_OPSET
from amp_compiler.onnx.lowering.mask_bounds import bound_masks
from amp_compiler.onnx.lowering.scale_products import FIRST_OPSET, fp8_nodes
from amp_compiler.onnx.model.edit import KeptTypes
from amp_compiler.onnx.model.infer import Sizes
from amp_compiler.onnx.model.model import OnnxFile, Source, open_model, read_model
from amp_compiler.onnx.model.retype import make_fp32, refuse_custom_ops, types_of
from amp_compiler.onnx.model.validate import raised_as_onnx
from amp_compiler.onnx.target import added_by_runtime, drop_useless_opsets, note_of, versions_of
from amp_compiler.passes.onnx_plan.find_masks import unbounded_inputs
from amp_compiler.passes.onnx_plan.mask_path import input_masks
from amp_compiler.passes.onnx_plan.pinning import Walker
from amp_compiler.passes.pipeline import ONNX_PLAN, Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Context, RuleSet
from amp_compiler.policy.targets import Providers, Target, load_target


def explain_onnx(
    source: Source,
    *,
    rules: Any = "default",
    dtype: LowArgument = "fp16",
    ranges: Mapping[str, float] | None = None,
    stages: Stages | None = None,
    check: bool = True,
    sizes: Sizes | None = None,
    as_fp32: Iterable[str] | str = (),
    opset: int | None = None,
    fuse: bool = False,
    target: Target | None = None,
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
        target: as for `convert_onnx`.

    Raises:
        AmpError: there is no such target, or it does not know the type.
        OnnxError: the model cannot be read, or its opset not be raised.
    """
    low = low_type(dtype)
    plan, _ = plan_onnx(
        open_model(source), load_rules(rules), low, ranges,
        stages=stages, check=check, opset=opset, sizes=sizes, as_fp32=as_fp32, fused=fuse,
        target=None if target is None else load_target(target, low),
    )  # fmt: skip
    return plan


def plan_onnx(
    opened: OnnxFile,
    rules: RuleSet,
    low: DType,
    ranges: Mapping[str, float] | None = None,
    *,
    keep_io_types: KeptTypes = True,
    raising: bool = True,
    stages: Stages | None = None,
    check: bool = True,
    opset: int | None = None,
    sizes: Sizes | None = None,
    as_fp32: Iterable[str] | str = (),
    fused: bool = False,
    target: Providers | None = None,
    calibrated: bool = True,
) -> tuple[PrecisionPlan, Lowered]:
    """The plan of a model, and the lowered model that `lowering.apply` carries it out on.

    Args:
        opened: the model, as `open_model` gives it.
        rules: the rules.
        low: the 16-bit type.
        ranges: calibrated largest magnitude by value name.
        keep_io_types: as `kept_types` gives it.
        raising: raise the opset where only a later one admits the low type, as far as the installed ONNX Runtime loads
            the model. Where ONNX's converter cannot do it, the ops that a rule merely lets be low stay FP32, and one
            that a rule asks to be low is an error.
        stages: as for `explain_onnx`.
        check: as for `explain_onnx`.
        opset: raise the model to this opset, and no further.
        sizes: as for `explain_onnx`.
        as_fp32: as for `explain_onnx`.
        fused: as `fuse` of `convert_onnx`.
        target: the execution provider that is to run the model; `None` where any may. TensorRT builds Q/DQ pairs and
            what stands beside them into kernels of its own, whatever the rules say of them.
        calibrated: whether there are data for the scales of FP8 operands.

    Raises:
        OnnxError: the model cannot be read, or its opset not be raised, or scales are wanted and there are no data.
    """
    if opset is not None:
        opened = at_opset(opened, opset, raising)
    wide = types_of(as_fp32)
    options: dict[str, Any] = {
        "named": names_ops(rules), "keep_io_types": keep_io_types,
        "keep_quantized": rules.keeps("quantized") or (target is not None and target.name == "tensorrt"),
    }  # fmt: skip

    def lowered_from(
        file: OnnxFile, checked: bool, bounds: Mapping[str, float] | None = None
    ) -> tuple[Lowered, Fusion | None]:
        model = read_model(file, check=checked, sizes=sizes)
        bound_masks(model, bounds or {}, keep_io_types)
        if wide:
            refuse_custom_ops(model, wide)
            make_fp32(model, wide, keep_io_types=keep_io_types)
        fusion = fuse_compounds(model) if fused else None
        result = lower(model, low, pins=file.pins, **options)
        result.graph.model = PurePath(opened.name).name
        result.held = frozenset(name for name, pin in file.pins.items() if pin.precision == "cast")
        if target is not None:
            drop_useless_opsets(result, target)
        return result, fusion

    with raised_as_onnx(opened.name, "it cannot be planned"):
        lowered, fusion = lowered_from(opened, check)
        reshaped = lowered.model.reshaped
        if reshaped:
            opened = replace(opened, proto=lowered.model.proto)
        raised = raised_for(opened, lowered, rules) if raising and opset is None and lowered.late else None
        if raised is not None:
            opened = raised
            lowered, fusion = lowered_from(raised, False)
        early = not calibrated or lowered.model.opset("") < FIRST_OPSET
        if early and rules.in_fp8:
            for planned, _ in fp8_nodes(_decide(lowered, fusion, rules, ranges, None, target))[:1]:
                opened = raised_for_fp8(opened, planned.name, raising=raising, opset=opset, calibrated=calibrated)
            lowered, fusion = lowered_from(opened, False)
        if lowered.model.opset("") >= BOUNDING_OPSET and input_masks(Walker(lowered.graph, low)):
            labels = _decide(lowered, fusion, rules, ranges, None, target).labels
            lowered, fusion = lowered_from(opened, False, unbounded_inputs(lowered.graph, labels, low))
        if reshaped:
            named = ", ".join(f"'{name}'" for name in reshaped[:5]) + ", …" * (len(reshaped) > 5)
            lowered.notes.append(f"inferred shapes replace declared ones that they contradict: {named}")
        return _decide(lowered, fusion, rules, ranges, stages, target), lowered


def _decide(
    lowered: Lowered,
    fusion: Fusion | None,
    rules: RuleSet,
    ranges: Mapping[str, float] | None,
    stages: Stages | None,
    target: Providers | None,
) -> PrecisionPlan:
    """Pin nodes by the pipeline ONNX_PLAN, then let the rules decide. Gives the lowered model the graph of the pins."""
    known = {name: largest for name, largest in (ranges or {}).items() if name in lowered.graph.values}
    mark_compounds(lowered)
    if fusion is not None:
        _mark_fused(lowered, fusion)
    if stages is not None:
        stages.note("capture", format_graph(lowered.graph))
    draft = Draft(lowered.graph, rules, Context(lowered.low, lowered.graph.device), ranges=known)

    def planned(options: dict[str, Any], stages: Stages | None) -> PrecisionPlan:
        lowered.graph = ONNX_PLAN.run(draft, options, stages).graph
        return make_plan(lowered.graph, rules, lowered.low, ranges=known, stages=stages)

    if target is None:
        plan = planned({}, stages)
    else:
        before = added_by_runtime(lowered, rules.ops, planned({}, None).labels, target)
        plan = planned({"target": target, "versions": versions_of(lowered)}, stages)
        after = added_by_runtime(lowered, rules.ops, plan.labels, target)
        lowered.notes.append(note_of(target, after, before))
    return plan if fusion is None else _with_fusion(plan, lowered, fusion)


def _mark_fused(lowered: Lowered, fusion: Fusion) -> None:
    """Say of each op that took the place of a norm or GELU what it stands for (`Node.part`). Changes the graph."""
    nodes, kinds = lowered.graph.nodes, {op: kind for kind, (op, _) in OPS.items()}
    for name, node in lowered.nodes.items() if fusion.fused_nodes else ():
        if node in fusion.fused_nodes:
            nodes[name] = replace(nodes[name], part=kinds[node.op_type])


def _with_fusion(plan: PrecisionPlan, lowered: Lowered, fusion: Fusion) -> PrecisionPlan:
    """The plan with what was fused, and what was not, in the reasons of its nodes. Fills `lowered`."""
    lowered.fused = fusion.fused.total()
    lowered.notes.extend(fusion_messages(fusion, lowered.model.opset("")))
    reasons = {**fusion.fused_nodes, **fusion.left}
    by_name = {name: reasons[node] for name, node in lowered.nodes.items() if node in reasons}
    nodes = (replace(node, reason=f"{node.reason}; {by_name[node.name]}") if node.name in by_name else node
             for node in plan.nodes)  # fmt: skip
    return replace(plan, nodes=tuple(nodes))


def names_ops(rules: RuleSet) -> Callable[[str, str], bool]:
    """Whether the op table names an op of a custom domain, or a rule the op or its node, by more than `*`."""
    globs = [glob for rule in rules.rules for glob in rule.match.get("op") if glob.strip("*")]
    patterns = [pattern for rule in rules.rules for pattern in rule.match.get("node")]

    def named(op: str, node: str) -> bool:
        if op in rules.ops.ops:
            return True
        return any(fnmatch.fnmatchcase(op, glob) for glob in globs) or any(pattern.search(node) for pattern in patterns)

    return named
