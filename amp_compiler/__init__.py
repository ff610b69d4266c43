"""Automatic mixed precision as a compiler pass over traced graphs.

Example:
    >>> import torch, amp_compiler as amp
    >>> model = amp.compile(torch.nn.Linear(8, 4), dtype="bf16", backend="eager")
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amp_compiler.diagnose import callbacks as callbacks
    from amp_compiler.diagnose.find import find_nonfinite
    from amp_compiler.diagnose.profile import Profile
    from amp_compiler.diagnose.run import profile
    from amp_compiler.diagnose.tuning.api import tune
    from amp_compiler.diagnose.tuning.result import TunedNode, TuneResult
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
    from amp_compiler.forward.export import export
    from amp_compiler.fx.cache_file import load_cache, save_cache
    from amp_compiler.ir.nonfinite import NonfiniteNode, NonfiniteReport
    from amp_compiler.ir.plan import PrecisionPlan
    from amp_compiler.onnx.convert import Conversion, convert_onnx
    from amp_compiler.onnx.export import export_onnx
    from amp_compiler.onnx.importing.api import onnx_to_fx
    from amp_compiler.ops.loss_scale import (
        DynamicLossScale,
        LossScale,
        NoLossScale,
        NormAdaptiveLossScale,
        NvcaffeLossScale,
        StaticLossScale,
    )
    from amp_compiler.passes import pipeline as pipelines
    from amp_compiler.policy.loader import load_rules
    from amp_compiler.policy.rules import RuleSet
    from amp_compiler.report import to_html, to_svg
    from amp_compiler.training.api import training_step
    from amp_compiler.training.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
    from amp_compiler.training.step import TrainingStep

    __version__: str

__all__ = [
    "AmpError",
    "CaptureError",
    "Checkpoint",
    "CompiledModule",
    "Conversion",
    "DynamicLossScale",
    "GraphError",
    "LossScale",
    "LossScaleError",
    "LoweringError",
    "NoLossScale",
    "NonfiniteNode",
    "NonfiniteReport",
    "NormAdaptiveLossScale",
    "NvcaffeLossScale",
    "OnnxError",
    "PassError",
    "PrecisionPlan",
    "Profile",
    "RuleError",
    "RuleSet",
    "StaticLossScale",
    "TrainingStep",
    "TuneResult",
    "TunedNode",
    "callbacks",
    "compile",
    "convert_onnx",
    "explain",
    "export",
    "export_onnx",
    "find_nonfinite",
    "load_cache",
    "load_checkpoint",
    "load_rules",
    "onnx_to_fx",
    "pipelines",
    "profile",
    "save_cache",
    "save_checkpoint",
    "to_html",
    "to_svg",
    "training_step",
    "tune",
]

# Where each name is made; with a colon, the module that is known by this name. Nothing is imported before it is asked
# for: a shell that wants help does not wait for torch, a user without ONNX models not for ONNX, and importing this
# package costs next to nothing.
_HOMES = {
    "AmpError": "errors",
    "CaptureError": "errors",
    "Checkpoint": "training.checkpoint",
    "CompiledModule": "forward.compiled_module",
    "Conversion": "onnx.convert",
    "DynamicLossScale": "ops.loss_scale",
    "GraphError": "errors",
    "LossScale": "ops.loss_scale",
    "LossScaleError": "errors",
    "LoweringError": "errors",
    "NoLossScale": "ops.loss_scale",
    "NonfiniteNode": "ir.nonfinite",
    "NonfiniteReport": "ir.nonfinite",
    "NormAdaptiveLossScale": "ops.loss_scale",
    "NvcaffeLossScale": "ops.loss_scale",
    "OnnxError": "errors",
    "PassError": "errors",
    "PrecisionPlan": "ir.plan",
    "Profile": "diagnose.profile",
    "RuleError": "errors",
    "RuleSet": "policy.rules",
    "StaticLossScale": "ops.loss_scale",
    "TrainingStep": "training.step",
    "callbacks": "diagnose.callbacks:",
    "TuneResult": "diagnose.tuning.result",
    "TunedNode": "diagnose.tuning.result",
    "compile": "forward.api",
    "convert_onnx": "onnx.convert",
    "explain": "forward.api",
    "export": "forward.export",
    "export_onnx": "onnx.export",
    "find_nonfinite": "diagnose.find",
    "load_cache": "fx.cache_file",
    "load_checkpoint": "training.checkpoint",
    "load_rules": "policy.loader",
    "onnx_to_fx": "onnx.importing.api",
    "pipelines": "passes.pipeline:",
    "profile": "diagnose.run",
    "save_cache": "fx.cache_file",
    "save_checkpoint": "training.checkpoint",
    "to_html": "report",
    "to_svg": "report",
    "training_step": "training.api",
    "tune": "diagnose.tuning.api",
}


if not TYPE_CHECKING:  # a type checker knows the names above, and finds any other one wrong

    def __getattr__(name: str) -> Any:
        """A name of the API, a room of the package (`amp.passes`) or the version, when it is first asked for."""
        if name in _HOMES:
            home, itself, _ = _HOMES[name].partition(":")
            try:
                module = import_module(f"{__name__}.{home}")
            except ModuleNotFoundError:
                if not home.startswith("onnx."):
                    raise
                return partial(_without_onnx, home)  # a star imports all names
            value = module if itself else getattr(module, name)
        elif name == "__version__":
            from importlib.metadata import version

            value = version(__name__)  # pyproject.toml says it, and the installation has written it down
        elif not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
        globals()[name] = value
        return value


def _without_onnx(home: str, *args: Any, **kwargs: Any) -> None:
    with import_module(f"{__name__}.onnx").needs_onnx():
        import_module(f"{__name__}.{home}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


import_module(f"{__name__}.report")  # which gives plans their methods that draw
