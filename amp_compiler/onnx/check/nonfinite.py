"""An ONNX model converted under its rules or others, and run with true rounding after every node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper

from amp_compiler.errors import BUG, OnnxError
from amp_compiler.fx.finiteness import range_of
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.dtypes import DType, short_name
from amp_compiler.ir.nonfinite import INPUT, SHOWN, NonfiniteNode, NonfiniteReport, ValueRange
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.onnx.check.batches import iterate_batches
from amp_compiler.onnx.check.emulate import emulate, has_low_types
from amp_compiler.onnx.check.run import Runner, open_to_run
from amp_compiler.onnx.check.taps import MEASURED
from amp_compiler.onnx.check.verify import Side
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model.model import OnnxFile, Source, value_types
from amp_compiler.planner.cures import Cure, Trial, extended, find_cure
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import RuleSet

_MADE_UP = frozenset({"Constant", "ConstantOfShape"})  # infinities in them were put in on purpose
_CASTS = frozenset({"Cast", "Identity"})  # the latter where an output has the type that it is cast to


@dataclass(frozen=True)
class _Seen(Trial):
    """What a run showed; its nodes are those that outputs that are not finite go back to, all where there are none.

    Args:
        outputs: those that are not finite.
    """

    outputs: tuple[str, ...]


class OnnxTrials:
    """Runs one batch again and again, through several conversions of a model.

    Args:
        source: the model, FP32 or with 16-bit parts already.
        batch: arrays by input name.
        low: the 16-bit type.

    Raises:
        OnnxError: the model cannot be read, or the batch does not fit it.
    """

    def __init__(self, source: Source, batch: Mapping[str, Any], low: DType) -> None:
        self._opened = open_to_run(source)
        self._is_low = has_low_types(self._opened)
        self._low = low
        (self._batch,) = iterate_batches([batch], self._opened)
        original = self._opened
        if self._is_low:  # what it would be without rounding
            original = self._convert(extended(load_rules("default"), [{"match": {}, "precision": "fp32"}]))[0]
        side = Side(original, True, None, as_twin=self._is_low)
        self._before = side.ranges(side.run(self._batch))

    def report(self, rules: RuleSet) -> NonfiniteReport:
        """What is not finite, and what fixes it.

        Args:
            rules: that the model is converted with.
        """
        seen = converted = self._converted(rules)
        if self._is_low:
            seen = self._seen(self._opened, converted.plan)
        if not seen.nodes:
            return NonfiniteReport()
        results = tuple(f"the output {name}" for name in seen.outputs)
        spoilt = self._spoilt_inputs()
        cure = self._cure(converted, rules, spoilt)
        if not results and not cure.rule:
            return NonfiniteReport()  # FP32 has it too, and nothing comes of it
        sources = tuple(NonfiniteNode(name, INPUT, "", "forward", output=held) for name, held in spoilt.items())
        others = tuple(one for one in seen.nodes if spoilt.keys().isdisjoint(name for name, _ in one.inputs))
        return NonfiniteReport((), (*sources, *others)[:SHOWN], results, cure.rule, cure.message)

    def _spoilt_inputs(self) -> dict[str, ValueRange]:
        """The inputs that are not finite themselves."""
        held = {name: range_of(torch.from_numpy(one)) for name, one in self._batch.items() if one.dtype.kind == "f"}
        return {name: one for name, one in held.items() if one.spoilt}

    def _cure(self, seen: _Seen, rules: RuleSet, spoilt: Mapping[str, ValueRange]) -> Cure:
        if spoilt:
            bad = [f"the batch itself (input {name}) holds {one.spoilt}" for name, one in spoilt.items()]
            return Cure(message=f"{'; '.join(bad)}: no precision fixes that")
        if not seen.nodes:
            return Cure(message="the file has 16-bit parts already: converted with these rules it is finite")
        cure = find_cure(rules, seen, lambda others: self._trial(others, bool(seen.outputs)))
        if cure.rule and self._is_low:
            return replace(cure, message=f"{cure.message}; the file has 16-bit parts already: convert it with them")
        return cure

    def _trial(self, rules: RuleSet, outputs: bool) -> Trial:
        """What a conversion breaks; of a search for outputs that are not finite nothing where these are."""
        seen = self._converted(rules)
        return Trial(seen.plan, () if outputs and not seen.outputs else seen.nodes)

    def _converted(self, rules: RuleSet) -> _Seen:
        return self._seen(*self._convert(rules))

    def _convert(self, rules: RuleSet) -> tuple[OnnxFile, PrecisionPlan]:
        # FP8 saturates: what is infinite is so in front of it, and calibration on this batch would hide it.
        plain = tuple(replace(one, math=None) if isinstance(one.math, Fp8) else one for one in rules.rules)
        rules = replace(rules, rules=plain)
        done = convert_onnx(self._opened, rules=rules, dtype=short_name(self._low), check=False)
        if done.model is None:
            raise OnnxError("the conversion gave no model", where=self._opened.name, hint=BUG)
        return replace(self._opened, proto=done.model), done.plan

    def _seen(self, model: OnnxFile, plan: PrecisionPlan) -> _Seen:
        side = Side(model, True, None, as_twin=True)
        after = side.ranges(side.run(self._batch))
        in_fp32 = any(math.isinf(self._before.get(one.name, 0.0)) for one in model.proto.graph.output)
        # What the original has too was put there on purpose, as long as it gives something finite.
        bad = {
            name
            for name, largest in after.items()
            if math.isinf(largest) and (in_fp32 or not math.isinf(self._before.get(name, 0.0)))
        }
        outputs = tuple(one.name for one in model.proto.graph.output if one.name in bad)
        masks = {name for name, largest in after.items() if math.isinf(largest)} - bad
        origins = _origins(model.proto, bad, masks, outputs or tuple(sorted(bad)))
        values = {name for node in origins for name in (*node.input, *node.output) if name in after}
        ranges = self._ranges(model, values)
        return _Seen(plan, tuple(_described(node, model.proto, plan, ranges) for node in origins), outputs)

    def _ranges(self, model: OnnxFile, names: set[str]) -> dict[str, ValueRange]:
        """The ranges of some values, for which the model runs once more."""
        if not names:
            return {}
        twin = emulate(model)
        types = value_types(model)
        shown = {output.name for output in twin.proto.graph.output}
        inputs = {one.name for one in twin.proto.graph.input}
        for name in sorted(names - shown - inputs):
            kind = onnx.TensorProto.DOUBLE if types[name] is DType.FLOAT64 else onnx.TensorProto.FLOAT
            twin.proto.graph.output.append(helper.make_tensor_value_info(name, kind, None))
        feeds = twin.feeds(self._batch)
        results = {**feeds, **Runner(twin.proto, model.folder, model.name).run(feeds)}
        return {
            name: replace(range_of(torch.from_numpy(np.asarray(results[name]))), dtype=types[name].short)
            for name in names
            if name in results and types.get(name) in MEASURED
        }


def _origins(proto: onnx.ModelProto, bad: set[str], masks: set[str], outputs: tuple[str, ...]) -> list[onnx.NodeProto]:
    """The nodes that made something bad of finite values and that bad outputs go back to, in the file's order."""
    makers = {name: node for node in proto.graph.node for name in node.output}
    origins: list[onnx.NodeProto] = []
    seen: set[str] = set()
    pending = list(outputs)
    while pending:
        node = makers.get(pending.pop())
        if node is None or node.output[0] in seen:
            continue
        seen.add(node.output[0])
        causes = _causes(node, bad, masks, makers)
        pending += causes
        if not causes:
            origins.append(node)
    order = {node.output[0]: place for place, node in enumerate(proto.graph.node)}
    return sorted(origins, key=lambda node: order[node.output[0]])


def _causes(node: onnx.NodeProto, bad: set[str], masks: set[str], makers: Mapping[str, onnx.NodeProto]) -> list[str]:
    """The bad values that a node reads, itself or by way of masks: an infinity beside a mask's is not seen there."""
    causes: list[str] = []
    pending, seen = list(node.input), set()
    while pending:
        name = pending.pop()
        if name in seen or name not in makers or makers[name].op_type in _MADE_UP:
            continue
        seen.add(name)
        if name in bad:
            causes.append(name)
        elif name in masks:
            pending += makers[name].input
    return causes


def _described(
    node: onnx.NodeProto, proto: onnx.ModelProto, plan: PrecisionPlan, ranges: Mapping[str, ValueRange]
) -> NonfiniteNode:
    planned = _planned(node, proto, plan)
    output = next((ranges[name] for name in node.output if name in ranges), None)
    source = next((ranges[name] for name in node.input if name in ranges), None)
    narrows = node.op_type == "Cast" and output is not None and source is not None and output.dtype != source.dtype
    return NonfiniteNode(
        node.name or node.output[0],
        f"onnx.{node.op_type}" if not node.domain else f"{node.domain}.{node.op_type}",
        "" if planned is None else planned.module,
        "forward",
        planned=_rounded_input(node, proto) if planned is None else planned.name,
        decision="" if planned is None else planned.decision,
        inputs=tuple((name, ranges[name]) for name in node.input if name in ranges),
        output=output,
        rounding=narrows,
    )


def _planned(node: onnx.NodeProto, proto: onnx.ModelProto, plan: PrecisionPlan) -> PlannedNode | None:
    """The node of the plan that a node is; that whose value it casts, for a cast that was put in."""
    named, known = {one.name: one for one in plan.nodes}, {value: one for one in plan.nodes for value, _ in one.outputs}
    makers = {name: one for one in proto.graph.node for name in one.output}
    casts = {one.input[0]: one.output[0] for one in proto.graph.node if one.op_type in _CASTS}
    current: onnx.NodeProto | None = node
    while current is not None:
        output = current.output[0]  # of another name where a cast behind it makes what had this one
        planned = named.get(current.name) or known.get(output) or known.get(casts.get(output, ""))
        if planned is not None or current.op_type not in _CASTS:
            return planned
        current = makers.get(current.input[0])
    return None


def _rounded_input(node: onnx.NodeProto, proto: onnx.ModelProto) -> str:
    """The input or stored data that a cast at the top of the graph rounds; empty for another node."""
    produced = {name for one in proto.graph.node for name in one.output}
    return node.input[0] if node.op_type == "Cast" and node.input[0] not in produced else ""
