"""Automatic mixed precision as a compiler pass over traced graphs.

Example:
    >>> import torch, amp_compiler as amp
    >>> model = amp.compile(torch.nn.Linear(8, 4), dtype="bf16", backend="eager")
"""

from amp_compiler.compile import compile, explain
from amp_compiler.compiled_module import CompiledModule
from amp_compiler.errors import (
    AmpError,
    CaptureError,
    GraphError,
    LoweringError,
    OnnxError,
    PassError,
    RuleError,
)
from amp_compiler.frontends.onnx_to_fx import onnx_to_fx
from amp_compiler.onnx_convert import Conversion, convert_onnx
from amp_compiler.plan import PrecisionPlan
from amp_compiler.policy import RuleSet
from amp_compiler.rulefile import load_rules
from amp_compiler.training import TrainingStep, training_step

__all__ = [
    "AmpError",
    "CaptureError",
    "CompiledModule",
    "Conversion",
    "GraphError",
    "LoweringError",
    "OnnxError",
    "PassError",
    "PrecisionPlan",
    "RuleError",
    "RuleSet",
    "TrainingStep",
    "compile",
    "convert_onnx",
    "explain",
    "load_rules",
    "onnx_to_fx",
    "training_step",
]
