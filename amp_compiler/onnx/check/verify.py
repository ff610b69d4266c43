"""Verification by execution: a converted ONNX model against its FP32 original, with true rounding after every node."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import TensorProto

from amp_compiler.errors import OnnxError
from amp_compiler.ir.plan import many
from amp_compiler.onnx.check.batches import Batches, iterate_batches
from amp_compiler.onnx.check.emulate import emulate, has_low_types
from amp_compiler.onnx.check.memory import LimitError, Limits
from amp_compiler.onnx.check.probes import Probes
from amp_compiler.onnx.check.report import OutputError, WorstBatch, first_bad
from amp_compiler.onnx.check.report import VerifyReport as VerifyReport
from amp_compiler.onnx.check.run import Engine, Runner, open_to_run
from amp_compiler.onnx.check.taps import MEASURED, Tap, add_taps
from amp_compiler.onnx.model.model import OnnxFile, Source, value_types

TOLERANCES = {"fp16": 1e-2, "bf16": 8e-2, "fp8": 1e-1}
_CHUNK = 1 << 20  # numbers that are compared in one go
_COMPARE = "compare a model with its own conversion"


def verify(
    original: Source,
    converted: Source,
    batches: Batches,
    *,
    trace: bool = True,
    on_batch: Callable[[int], object] | None = None,
    engine: Engine | None = None,
) -> VerifyReport:
    """Run both models on all batches and compare.

    The original runs in FP32 in ONNX Runtime. The converted model runs as its FP32 twin (`emulate`), which rounds to
    FP16 or bfloat16 after every node; so does an original that has 16-bit parts of its own. Nodes with random results
    differ by nature.

    Args:
        original: the FP32 model, its path, or what `open_model` gave.
        converted: the converted one, likewise. A 16-bit input takes the batch's FP32 values, rounded.
        batches: inputs of the original: dicts by input name, an npz file, a folder of npz files, or `Probes` that draw
            them.
        trace: also look for the first node that is not finite; values within control-flow bodies are not looked at.
        on_batch: called with the number of batches done, after each.
        engine: execution providers and libraries of ops; the CPU alone by default.

    Raises:
        OnnxError: a model or a batch cannot be read, the original not be run, or the two models' inputs or outputs have
            different names. A converted model that does not run, or gives other shapes, has an infinite error.
    """
    before, after = open_to_run(original), open_to_run(converted)
    _same_interface(before, after)
    probes = batches if isinstance(batches, Probes) else None
    limits = None if probes is None else probes.limits
    first = Side(before, trace, engine, as_twin=has_low_types(before), limits=limits)
    second = Side(after, trace, engine, as_twin=True, limits=limits)
    names = [output.name for output in after.proto.graph.output]
    findings = _Findings(names)
    spoilt: list[tuple[dict[str, float], dict[str, float]]] = []  # the ranges of batches with infinite values
    for batch in iterate_batches(batches, before) if probes is None else probes:
        label, expected = probes.label if probes is not None else "", None
        try:
            expected = first.run(batch)
            built = second.run(batch)
        except OnnxError as failed:
            if expected is None or isinstance(failed, LimitError):
                if probes is None:
                    raise
                probes.refuse(failed)
                continue
            findings.fail(batch, label, f"the converted model does not run, and the original does: {failed.what}")
        else:
            findings.add(batch, label, expected, built)
            ranges = second.ranges(built)
            if math.inf in ranges.values():
                spoilt.append((first.ranges(expected), ranges))
        if on_batch is not None:
            on_batch(findings.count)
    worst = findings.worst
    if worst is not None and math.inf > worst.relative > min(TOLERANCES.values()):
        alone, (inputs, expected) = _Findings(names), findings.compared
        alone.add(inputs, "", expected, Side(after, False, engine, as_twin=True, rounds=False).run(inputs))
        worst = replace(worst, stored=max(error.relative for error in alone.errors()))
    engines = first.engine if first.engine == second.engine else f"{first.engine}, {second.engine}"
    untried = tuple(probes.untried()) if probes is not None else ()
    return VerifyReport(findings.errors(), findings.count, *first_bad(after.proto, spoilt), engines, worst, untried)


class Expected:
    """What a model gives in FP32, kept for comparing several conversions with it.

    Args:
        original: the model.
        batches: as for `verify`, without `Probes`.

    Raises:
        OnnxError: the model or a batch cannot be read, or the model not be run.
    """

    def __init__(self, original: OnnxFile, batches: Batches) -> None:
        side = Side(original, False, None, as_twin=has_low_types(original))
        self._original = original
        self.names = tuple(output.name for output in original.proto.graph.output)
        self.batches = [(batch, side.run(batch)) for batch in iterate_batches(batches, original)]

    def nonfinite(self) -> tuple[str, ...]:
        """The outputs that are infinite or NaN somewhere."""
        return tuple(name for name in self.names if any(_is_spoilt(outputs[name]) for _, outputs in self.batches))

    def errors(self, converted: OnnxFile) -> tuple[OutputError, ...]:
        """How far the outputs of a conversion are off; all infinitely where it does not run.

        Raises:
            OnnxError: its inputs or outputs have other names.
        """
        _same_interface(self._original, converted)
        findings, side = _Findings(list(self.names)), None
        for batch, expected in self.batches:
            try:
                side = side or Side(converted, False, None, as_twin=True)
                findings.add(batch, "", expected, side.run(batch))
            except OnnxError as failed:
                findings.fail(batch, "", failed.what)
        return findings.errors()


def _is_spoilt(value: Any) -> bool:
    """Whether a tensor, or one of a sequence, holds an infinity or NaN."""
    if isinstance(value, list | tuple):
        return any(_is_spoilt(one) for one in value)
    array = np.asarray(value)
    return bool(array.dtype.kind in "fc" and not np.isfinite(array).all())


class _Findings:
    """Errors of the outputs over the batches, and the worst batch."""

    def __init__(self, names: list[str]) -> None:
        self.sums = {name: _Sum() for name in names}
        self.count = 0
        self.worst: WorstBatch | None = None
        self.compared: tuple[dict[str, Any], dict[str, Any]] = ({}, {})  # the worst batch, and what it is to give

    def errors(self) -> tuple[OutputError, ...]:
        """Those of the outputs, in their order."""
        return tuple(total.result(name) for name, total in self.sums.items())

    def add(self, batch: Mapping[str, Any], label: str, expected: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Add what the two models gave for one batch."""
        for name, total in self.sums.items():
            alone = _Sum()
            alone.add(expected[name], result[name], name)
            total.join(alone)
            if self._judge(batch, label, name, alone.result(name).relative, alone.problem):
                self.compared = dict(batch), {one: expected[one] for one in self.sums}
        self.count += 1

    def fail(self, batch: Mapping[str, Any], label: str, problem: str) -> None:
        """Add a batch on which the converted model does not run."""
        for name, total in self.sums.items():
            total.bad = True
            self._judge(batch, label, name, math.inf, problem)
        self.count += 1

    def _judge(self, batch: Mapping[str, Any], label: str, output: str, relative: float, problem: str) -> bool:
        """Whether no error so far was as large; it is the worst then."""
        if relative <= (0.0 if self.worst is None else self.worst.relative):
            return False
        inputs = tuple(f"{name}: {_described(value)}" for name, value in batch.items())
        self.worst = WorstBatch(self.count, label, inputs, output, relative, problem)
        return True


def _described(value: Any) -> str:
    """Type, shape and range of an input."""
    if not isinstance(value, np.ndarray | np.generic):
        return type(value).__name__
    text = f"{value.dtype}{list(value.shape)}"
    numbers = value.dtype.kind in "iuf" and value.size > 0
    return f"{text} from {value.min():.4g} to {value.max():.4g}" if numbers else text


def _same_interface(before: OnnxFile, after: OnnxFile) -> None:
    for what in ("input", "output"):
        one, two = ([value.name for value in getattr(side.proto.graph, what)] for side in (before, after))
        if one != two:
            raise OnnxError(
                f"the {what}s are {', '.join(two)}, and the original's are {', '.join(one)}",
                where=after.name,
                hint=_COMPARE,
            )


class Side:
    """One of the two models, ready to run.

    Args:
        model: the model.
        trace: measure the values between, too.
        engine: execution providers and libraries of ops.
        as_twin: run its twin with true rounding.
        limits: as for `Runner`.
        rounds: as for `emulate`.
    """

    def __init__(
        self,
        model: OnnxFile,
        trace: bool,
        engine: Engine | None,
        *,
        as_twin: bool,
        limits: Limits | None = None,
        rounds: bool = True,
    ) -> None:
        self._twin = emulate(model, rounds=rounds) if as_twin else None
        proto = model.proto if self._twin is None else self._twin.proto
        self.taps: list[Tap] = []
        if trace:
            types = value_types(replace(model, proto=proto))
            # The casts within the twin (to a 16-bit type) are not values of the model.
            names = {name for node in model.proto.graph.node for name in node.output}
            names.update(value.name for value in model.proto.graph.input)
            proto, self.taps = add_taps(proto, {name for name in names if types.get(name) in MEASURED}, types)
        self._floats = {value.name: value.type.tensor_type.elem_type for value in model.proto.graph.input}
        self._runner = Runner(proto, model.folder, model.name, engine, limits=limits)
        self.engine = self._runner.engine

    def run(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Outputs by name, those of the taps among them."""
        feeds = {name: self._fitted(name, value) for name, value in batch.items()}
        return self._runner.run(feeds if self._twin is None else self._twin.feeds(feeds))

    def _fitted(self, name: str, value: Any) -> Any:
        """An FP64 input of the original, where the conversion takes FP32."""
        narrow = self._floats.get(name) == TensorProto.FLOAT and getattr(value, "dtype", None) == np.float64
        return value.astype(np.float32) if narrow else value

    def ranges(self, outputs: dict[str, Any]) -> dict[str, float]:
        """Largest magnitude by value of one run."""
        return {tap.value: tap.absmax(outputs) for tap in self.taps}


class _Sum:
    """Running sums of one output over the batches."""

    def __init__(self) -> None:
        self.difference = self.norm = self.largest = 0.0
        self.elements = self.differing = 0
        self.floats, self.bad = True, False
        self.problem = ""

    def join(self, other: _Sum) -> None:
        """Add what another one has summed."""
        self.difference += other.difference
        self.norm += other.norm
        self.largest = max(self.largest, other.largest)
        self.elements += other.elements
        self.differing += other.differing
        self.floats &= other.floats
        self.bad |= other.bad

    def _differ(self, what: str) -> None:
        self.bad, self.problem = True, what

    def add(self, expected: Any, result: Any, name: str) -> None:
        """Add one batch: tensors, or sequences or optionals of them."""
        if isinstance(expected, list | tuple):
            if len(expected) != len(result):
                return self._differ(f"the sequence '{name}' has {many(len(result), 'element')}, not {len(expected)}")
            for one, two in zip(expected, result, strict=True):
                self.add(one, two, name)
            return
        if expected is None and result is None:
            return
        one, two = np.asarray(expected), np.asarray(result)
        if one.shape != two.shape:
            return self._differ(f"the output '{name}' has the shape {list(two.shape)}, not {list(one.shape)}")
        self.elements += one.size
        if one.dtype.kind not in "fVc":  # V: bfloat16
            self.floats = False
            self.differing += int(np.sum(one != two))
            return
        flat, flat_result = one.reshape(-1), two.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            self._add_chunk(flat[start : start + _CHUNK], flat_result[start : start + _CHUNK])

    def _add_chunk(self, one: np.ndarray, two: np.ndarray) -> None:
        wide = np.complex128 if one.dtype.kind == "c" else np.float64
        a, b = one.astype(wide), two.astype(wide)
        good = np.isfinite(a)
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        self.bad |= bool(np.any(~(np.isfinite(b) | same)) or np.any(~good & ~same))
        good &= np.isfinite(b)
        difference = np.abs(np.where(good, a, 0) - np.where(good, b, 0))
        self.difference += float(np.sum(difference**2))
        self.norm += float(np.sum(np.abs(a[good]) ** 2))
        self.largest = max(self.largest, float(difference.max(initial=0.0)))

    def result(self, name: str) -> OutputError:
        """The errors over all that was added."""
        if self.bad:
            return OutputError(name, math.inf, math.inf, self.elements)
        if not self.floats:
            return OutputError(name, self.differing / max(self.elements, 1), float(self.differing > 0), self.elements)
        if self.norm == 0.0:
            return OutputError(name, math.inf if self.difference else 0.0, self.largest, self.elements)
        return OutputError(name, math.sqrt(self.difference / self.norm), self.largest, self.elements)
