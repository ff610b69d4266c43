"""Taps: nodes that read a value where it is made and give its largest magnitude as one number.

A tap stands right behind the value's producer, and the runner keeps the file's order, so a value is freed as if no tap
read it: one run measures all values in the memory of a plain run and two copies of the largest value.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Magnitudes
from amp_compiler.onnx.check.run import FREE_INITIALIZERS
from amp_compiler.onnx.model.walk import DEFAULT

MEASURED = frozenset({DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16})
OLDEST = 7  # opset; older ones broadcast in another way
_FIRST_WHERE = 9  # opset
OWN = 17  # opset that a model without the default domain is given for its taps


@dataclass(frozen=True)
class Tap:
    """Where a value's numbers come out.

    Args:
        value: what is measured.
        largest: the output that holds its largest magnitude, where all is finite.
        check: the output that is 0 where every element is finite and NaN otherwise.
        least: the output that holds its least magnitude but zero; empty where it is not asked for.
    """

    value: str
    largest: str
    check: str
    least: str = ""

    def absmax(self, outputs: dict[str, Any]) -> float:
        """The largest magnitude in one run's outputs; infinite where an element is not finite."""
        return float("inf") if np.isnan(outputs[self.check]) else float(outputs[self.largest])

    def magnitudes(self, outputs: dict[str, Any]) -> Magnitudes:
        """The largest and the least magnitude."""
        return Magnitudes(self.absmax(outputs), float(outputs[self.least]) if self.least else math.inf)


def add_taps(
    model: onnx.ModelProto,
    values: Iterable[str],
    types: Mapping[str, DType],
    least: Collection[str] = (),
    more: Mapping[str, Iterable[onnx.NodeProto]] = MappingProxyType({}),
) -> tuple[onnx.ModelProto, list[Tap]]:
    """A copy of the model that gives, behind its own outputs, two numbers per value, or three.

    Args:
        model: the model; its weights are shared by neither copy where they are external.
        values: float values of the main graph, in no certain order.
        types: element type of each.
        least: of which the least magnitude is given too, from opset 9 on.
        more: nodes that stand behind a value, and whose results are among the values.

    Raises:
        OnnxError: the model's opset is older than 7.
    """
    known = next((entry.version for entry in model.opset_import if entry.domain in DEFAULT), None)
    version = OWN if known is None else known
    if version < OLDEST:
        raise OnnxError(
            f"the model's opset is {version}", hint=f"raise it with onnx.version_converter to {OLDEST} or later"
        )
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    tapped.ir_version = max(tapped.ir_version, FREE_INITIALIZERS)
    if known is None:
        tapped.opset_import.append(helper.make_opsetid("", version))
    prefix = _free_prefix(tapped.graph)
    wanted = set(values)
    taps: list[Tap] = []
    nodes: list[onnx.NodeProto] = []

    def tap(name: str) -> None:
        if name in wanted:
            wanted.remove(name)
            title = f"{prefix}_{len(taps)}"
            smallest = f"{title}_least" if name in least and version >= _FIRST_WHERE else ""
            taps.append(Tap(name, f"{title}_largest", f"{title}_check", smallest))
            nodes.extend(_tap(taps[-1], types, prefix))
            for node in more.get(name, ()):
                nodes.append(node)
                tap(node.output[0])

    for source in (*tapped.graph.input, *tapped.graph.initializer):
        tap(source.name)
    for node in tapped.graph.node:
        nodes.append(node)
        for name in node.output:
            tap(name)
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del tapped.graph.node[:]
    tapped.graph.node.extend(copies)
    tapped.graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), f"{prefix}_flat"))
    for wide, dtype in ((TensorProto.FLOAT, np.float32), (TensorProto.DOUBLE, np.float64)):
        for number, title in ((0, "zero"), (np.inf, "infinite")):
            data = np.full(1, number, dtype)
            tapped.graph.initializer.append(numpy_helper.from_array(data, f"{prefix}_{title}_{wide}"))
    for value_tap in taps:
        kind = _wide(types[value_tap.value])
        for name in filter(None, (value_tap.largest, value_tap.check, value_tap.least)):
            tapped.graph.output.append(helper.make_tensor_value_info(name, kind, []))
    return tapped, taps


def _free_prefix(graph: onnx.GraphProto) -> str:
    """What no value of the graph's name begins with."""
    prefix = "amp_tap"
    names = {name for node in graph.node for name in (*node.input, *node.output)}
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return prefix


def _wide(kind: DType) -> int:
    return TensorProto.DOUBLE if kind is DType.FLOAT64 else TensorProto.FLOAT


def _tap(tap: Tap, types: Mapping[str, DType], prefix: str) -> list[onnx.NodeProto]:
    """The nodes of one tap; a zero is put behind the elements, so that an empty tensor has a largest one."""
    name, source, nodes = tap.largest.removesuffix("_largest"), tap.value, []
    wide = _wide(types[tap.value])
    if types[tap.value] not in (DType.FLOAT32, DType.FLOAT64):
        source = f"{name}_wide"
        nodes.append(helper.make_node("Cast", [tap.value], [source], to=wide))
    zero = f"{prefix}_zero_{wide}"
    smallest = [
        helper.make_node("Greater", [f"{name}_abs", zero], [f"{name}_some"]),
        helper.make_node("Where", [f"{name}_some", f"{name}_abs", f"{prefix}_infinite_{wide}"], [f"{name}_but_zero"]),
        helper.make_node("ReduceMin", [f"{name}_but_zero"], [tap.least], keepdims=0),
    ]
    return [
        *nodes,
        helper.make_node("Reshape", [source, f"{prefix}_flat"], [f"{name}_flat"]),
        helper.make_node("Concat", [f"{name}_flat", zero], [f"{name}_all"], axis=0),
        helper.make_node("Abs", [f"{name}_all"], [f"{name}_abs"]),
        helper.make_node("ReduceMax", [f"{name}_abs"], [tap.largest], keepdims=0),
        helper.make_node("Mul", [f"{name}_all", zero], [f"{name}_nan"]),  # inf * 0 and NaN * 0 are NaN
        helper.make_node("ReduceSum", [f"{name}_nan"], [tap.check], keepdims=0),
        *(smallest if tap.least else ()),
    ]
