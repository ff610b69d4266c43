"""Automatic mixed precision as a compiler pass over traced graphs.

Example:
    >>> import torch, amp_compiler as amp
    >>> model = amp.compile(torch.nn.Linear(8, 4), dtype="bf16", backend="eager")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from amp_compiler.errors import (
    AmpError,
    CaptureError,
    GraphError,
    LossScaleError,
    LoweringError,
    OnnxError,
    PassError,
    RuleError,
)
from amp_compiler.forward.api import compile, explain
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.importing.api import onnx_to_fx
from amp_compiler.ops.loss_scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    NormAdaptiveLossScale,
    StaticLossScale,
)
from amp_compiler.passes import pipeline as pipelines
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.step import TrainingStep, training_step

if TYPE_CHECKING:
    from amp_compiler.onnx.convert import Conversion, convert_onnx
    from amp_compiler.onnx.export import Export, export_onnx

# Imported when first asked for, so that a user without ONNX models does not wait for ONNX.
_LATER = {
    "Conversion": "onnx.convert",
    "convert_onnx": "onnx.convert",
    "Export": "onnx.export",
    "export_onnx": "onnx.export",
}

__all__ = [
    "AmpError",
    "CaptureError",
    "CompiledModule",
    "Conversion",
    "DynamicLossScale",
    "Export",
    "GraphError",
    "LossScale",
    "LossScaleError",
    "LoweringError",
    "NoLossScale",
    "NormAdaptiveLossScale",
    "OnnxError",
    "PassError",
    "PrecisionPlan",
    "RuleError",
    "RuleSet",
    "StaticLossScale",
    "TrainingStep",
    "compile",
    "convert_onnx",
    "explain",
    "export_onnx",
    "load_rules",
    "onnx_to_fx",
    "pipelines",
    "training_step",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'amp_compiler' has no attribute '{name}'")
    found = getattr(import_module(f"amp_compiler.{_LATER[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
