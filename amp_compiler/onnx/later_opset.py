"""Raising the opset of a model: to the one that the user names, or to one that admits the low type for more nodes."""

from __future__ import annotations

from collections import Counter

import onnx

from amp_compiler.errors import OnnxError
from amp_compiler.ir.graph import Node
from amp_compiler.onnx.check.loads import latest_opset, refusal_of
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.lowering.scale_products import FIRST_OPSET
from amp_compiler.onnx.model.model import OnnxFile
from amp_compiler.onnx.model.opset import raise_opset
from amp_compiler.onnx.model.walk import opset_of
from amp_compiler.planner.numbers import find_numbers
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision, RuleSet

_ASKED = (Precision.LOW, Precision.WIDEST, Precision.BETWEEN, Precision.FOLLOW)


def checked_opset(opset: object) -> int:
    """An opset that a user names.

    Raises:
        OnnxError: the installed onnx knows no such.
    """
    latest = onnx.defs.onnx_opset_version()
    if not isinstance(opset, int) or isinstance(opset, bool) or not 1 <= opset <= latest:
        raise OnnxError(f"{opset!r} is no opset", where="opset", hint=f"give a number up to {latest}, or leave it out")
    return opset


def at_opset(opened: OnnxFile, opset: int, raising: bool) -> OnnxFile:
    """The model in the opset that the user names."""
    present = opset_of(opened.proto)
    if checked_opset(opset) < present:
        raise OnnxError(
            f"the model's opset is {present}, and opset {opset} would lower it",
            where="opset",
            hint=f"give {present} or more, or export the model with opset {opset}",
        )
    if opset > present and not raising:
        raise OnnxError(
            f"opset {opset} raises the model's, which is {present}, and raise_opset=False forbids it",
            where="opset",
            hint="leave one of the two out",
        )
    return raise_opset(opened, opset, f"opset {opset} is asked for") if opset > present else opened


def raised_for(opened: OnnxFile, lowered: Lowered, rules: RuleSet) -> OnnxFile | None:
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


def raised_for_fp8(opened: OnnxFile, name: str, *, raising: bool, opset: int | None, calibrated: bool) -> OnnxFile:
    """The model in an opset in which FP8 may go anywhere.

    Args:
        opened: the model, of any opset.
        name: a node whose operands are to be FP8.
        raising: whether the opset may be raised.
        opset: the one that the user names.
        calibrated: whether there are data for the scales.

    Raises:
        OnnxError: there are none, the opset may not be raised, or the converter cannot do it.
    """
    rather = "or take rules without 'math: fp8'"
    if not calibrated:
        raise OnnxError(
            f"'math: fp8' takes the scales of operands from data, as those of node '{name}', and there are none",
            where="calibration",
            hint=f"give batches of inputs, calibration= (--calibrate), {rather}",
        )
    if opset_of(opened.proto) >= FIRST_OPSET:
        return opened
    why = f"FP8 operands take opset {FIRST_OPSET} (node '{name}'), and the model's is {opset_of(opened.proto)}"
    if opset is not None or not raising:
        hint = f"name opset={FIRST_OPSET} or later" if raising else "allow the opset to be raised"
        raise OnnxError(why, where="opset", hint=f"{hint}, {rather}")
    try:
        return raise_opset(opened, FIRST_OPSET, why)
    except OnnxError as wrong:
        hint = f"export the model with opset {FIRST_OPSET} or later, {rather}"
        raise OnnxError(wrong.what, where=wrong.where, hint=hint) from wrong


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
    late = []
    for name in lowered.late:
        node = lowered.graph.nodes[name]
        decision = None if name in kept else matcher.decide(node)
        if decision is not None and decision.precision in _ASKED:
            late.append((node, decision.precision is Precision.LOW))
    return late


def late_message(lowered: Lowered, rules: RuleSet, *, raising: bool, opset: int | None) -> str:
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
        hint = "allow the opset to be raised"
    elif opset is not None:
        hint = "name a later opset, or none"
    elif latest is not None:
        hint = f"the onnxruntime loads opsets up to {latest}, and not every op in all of them; opset= names another"
    else:
        hint = "export the model with a later opset"
    present, short = lowered.model.opset(""), lowered.low.short
    return f"{nodes} FP32 because the opset is {present}: {short} comes later for {listed}; {hint}"
