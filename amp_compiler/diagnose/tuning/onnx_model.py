"""An ONNX model under many rules: converted for each, and run with true rounding after every node.

The profiled run is one of the module that `amp.onnx_to_fx` makes of it: only there are gradients. Where that cannot be
made, the magnitudes of the values say what becomes infinite, and nothing else is known.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from amp_compiler.diagnose.tuning.deviation import Measured
from amp_compiler.diagnose.tuning.sensitivity import Estimate, ProfiledRun
from amp_compiler.diagnose.tuning.subject import NOT_FINITE, SEED, Subject
from amp_compiler.errors import BUG, AmpError, OnnxError, first_line
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.ir.dtypes import DType, short_name
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.check.batches import iterate_batches, required_inputs
from amp_compiler.onnx.check.calibrate import calibrate
from amp_compiler.onnx.check.emulate import has_low_types
from amp_compiler.onnx.check.run import open_to_run
from amp_compiler.onnx.check.verify import Expected
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.importing.api import onnx_to_fx
from amp_compiler.onnx.importing.scope import onnx_values
from amp_compiler.onnx.model.external import external_files
from amp_compiler.onnx.plan import explain_onnx
from amp_compiler.policy.rules import RuleSet

logger = logging.getLogger("amp_compiler")


class OnnxSubject(Subject):
    """An ONNX model with its batches.

    Args:
        source: an FP32 model: a path or a `ModelProto`.
        batches: dicts from input name to array, an npz file, or a folder of npz files.
        low: the 16-bit type.

    Raises:
        OnnxError: the model or a batch cannot be read, or it has 16-bit parts already.
    """

    def __init__(self, source: Any, batches: Any, low: DType) -> None:
        super().__init__()
        self._opened, self.low = open_to_run(source), low
        if has_low_types(self._opened):
            raise OnnxError(
                "it has 16-bit parts already, so that nothing says what FP32 gives",
                where=self._opened.name,
                hint="tune the FP32 model that it was made of",
            )
        self._batches = list(iterate_batches(batches, self._opened))
        self.batches = len(self._batches)
        self._expected: Expected | None = None

    def plan(self, rules: RuleSet) -> PrecisionPlan:
        """The plan that a conversion carries out."""
        return explain_onnx(self._opened, rules=rules, dtype=short_name(self.low), check=False)

    def digest(self) -> str:
        """Of the message, the data files and the batches."""
        digest = hashlib.blake2b(self._opened.proto.SerializeToString(deterministic=True), digest_size=16)
        for file in external_files(self._opened.proto, self._opened.folder or Path()):
            with file.open("rb") as data:
                digest.update(hashlib.file_digest(data, "blake2b").digest())
        for batch in self._batches:
            for name, one in sorted(batch.items()):
                array = np.asarray(one)
                digest.update(f"{name} {array.dtype} {array.shape} ".encode())
                digest.update(repr(array.tolist()).encode() if array.dtype.kind in "OUS" else array.tobytes())
        digest.update(str(self.low).encode())
        return digest.hexdigest()

    # ---- FP32

    def profile(self, plan: PrecisionPlan, names: frozenset[str]) -> dict[str, Estimate]:
        """The reference, and a run as a module with the rounding of some nodes measured beside it."""
        self.runs += 2
        self._expected = Expected(self._opened, self._batches)
        if bad := self._expected.nonfinite():
            raise OnnxError(f"in FP32 the output {bad[0]} is not finite", where=self._opened.name, hint=NOT_FINITE)
        makers = {value: node.name for node in plan.nodes if node.name in names for value, _ in node.outputs}
        try:
            module = onnx_to_fx(self._opened, check=False)
        except AmpError as cause:
            return self._by_range(makers, cause)
        estimates: dict[str, Estimate] = {}
        device = torch.device("cpu")
        watched, inputs = _watched(module, makers), list(required_inputs(self._opened.proto))
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            try:
                for number, batch in enumerate(self._batches):
                    torch.manual_seed(SEED + number)
                    run = ProfiledRun(module, watched, torch_dtype(self.low), estimates, backward=False, device=device)
                    results = run.run(*(torch.from_numpy(np.array(batch[name])) for name in inputs))
                    flat = results if isinstance(results, (list, tuple)) else [results]
                    run.spread_to([one for one in flat if isinstance(one, Tensor)])
            except (RuntimeError, TypeError, ValueError, IndexError) as cause:  # what onnxruntime runs, and torch not
                return self._by_range(makers, cause)
        for one in estimates.values():
            one.batches = self.batches
        return estimates

    def _by_range(self, makers: Mapping[str, str], cause: Exception) -> dict[str, Estimate]:
        """What magnitudes alone say: what is infinite in the low type."""
        message = "amp.tune knows no gradients of %s, and goes by the ranges of its values: %s"
        logger.warning(message, self._opened.name, first_line(cause))
        ranges = calibrate(self._opened, self._batches)
        info = torch.finfo(torch_dtype(self.low))
        estimates: dict[str, Estimate] = {}
        for value, largest in ranges.items():
            if value in makers:
                error = math.inf if largest > info.max else info.eps * largest / info.max
                known = estimates.get(makers[value])
                if known is None or error > known.error:
                    estimates[makers[value]] = Estimate(
                        makers[value], error**2, math.isinf(error), least=None, greatest=largest
                    )
        return estimates

    # ---- 16 bits

    def measure(self, rules: RuleSet) -> Measured:
        """All batches through a conversion under some rules, against FP32."""
        self.runs += 1
        if self._expected is None:
            raise AmpError("there is nothing to compare with", hint="call profile() first")
        data = self._batches if rules.in_fp8 else None  # for the scales
        done = convert_onnx(self._opened, rules=rules, dtype=short_name(self.low), calibration=data, check=False)
        if done.model is None:
            raise OnnxError("the conversion gave no model", where=self._opened.name, hint=BUG)
        errors = self._expected.errors(replace(self._opened, proto=done.model))
        worst = max(errors, key=lambda one: one.relative, default=None)
        if worst is None or not worst.relative:
            return Measured(0.0)
        return Measured(worst.relative, f"the output {worst.name}")


def _watched(module: fx.GraphModule, makers: Mapping[str, str]) -> dict[fx.Node, str]:
    """The nodes of the module's graph that compute what nodes of the plan do, by the value that they make."""
    watched: dict[fx.Node, str] = {}
    taken: set[str] = set()
    for node in module.graph.nodes:
        value = next(iter(onnx_values(node)), "")
        if value not in makers or value in taken or node.op != "call_function":
            continue
        taken.add(value)
        is_part = getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[0], fx.Node)
        watched[node.args[0] if is_part else node] = makers[value]
    return watched
