"""The options that `compile`, `explain` and `training_step` share, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from amp_compiler.backends import BackendArgument, find_backend
from amp_compiler.backends.backend import DEFAULT, Backend, Builder, Mode
from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.torch_private.runtime import has_bf16_kernels, has_native_bf16
from amp_compiler.ir.dtypes import DType, DTypeArgument, low_name, low_type
from amp_compiler.passes.pipeline import PIPELINES, Pipeline, pipelines_with
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import OpTable, RuleSet

AUTO: Literal["auto"] = "auto"
WeightsArgument = Literal["fp32", "low"]
_FORMS = (Mapping, tuple, list, torch.export.ShapesCollection, torch.export.AdditionalInputs)  # of torch.export


@dataclass(frozen=True)
class Settings:
    """Checked options.

    Args:
        rules: the rules, loaded.
        dtype: `fp16`, `bf16` or `auto`.
        backend: a backend, or the name of one.
        dynamic_shapes: as for `torch.export.export`; `None` captures every input signature anew, `auto` makes sizes
            dynamic that turn out to change.
        pipelines: the passes, by name of their list.
        mode: one of the backend's.
        enabled: whether there is a plan at all.
        fullgraph: whether a graph break is an error.
        weights: `fp32`, or `low`: those of `amp.compile` are stored in 16 bits alone.
    """

    rules: RuleSet
    dtype: str = AUTO
    backend: BackendArgument = "inductor"
    dynamic_shapes: Any = None
    pipelines: Mapping[str, Pipeline] = field(default_factory=lambda: pipelines_with(None, PIPELINES))
    mode: str = DEFAULT
    enabled: bool = True
    fullgraph: bool = False
    weights: str = "fp32"

    @property
    def runs_on(self) -> Backend:
        """The backend."""
        return find_backend(self.backend)

    @property
    def builder(self) -> Builder:
        """What builds a graph on that backend in that mode."""
        return self.runs_on.builder(self.mode)

    @property
    def ops(self) -> OpTable:
        """The op table as it holds on this machine."""
        return self.rules.ops if has_bf16_kernels() else self.rules.ops.for_plain_cpu()

    @property
    def dynamic(self) -> bool | None:
        """As `torch.compile` takes it: whether all sizes are dynamic, none is, or those that turn out to change."""
        if self.dynamic_shapes is None:
            return False
        return None if isinstance(self.dynamic_shapes, str) else True

    def low(self, device: torch.device) -> DType:
        """The 16-bit type for a device: `auto` is BF16 where the device computes it natively, else FP16."""
        if self.dtype != AUTO:
            return low_type(self.dtype)
        return DType.BFLOAT16 if has_native_bf16(device) else DType.FLOAT16

    def autocast(self, device: torch.device) -> torch.autocast:
        """What a model runs under where no plan can be kept of it: torch's mixed precision, which knows no rules."""
        return torch.autocast(device.type, dtype=torch_dtype(self.low(device)))


def make_settings(
    rules: Any = "default",
    dtype: DTypeArgument = AUTO,
    backend: BackendArgument = "inductor",
    dynamic_shapes: Any = None,
    passes: Any = None,
    allowed: Sequence[Pipeline] = PIPELINES,
    mode: Mode = DEFAULT,
    fullgraph: bool = False,
    weights: WeightsArgument = "fp32",
    enabled: bool = True,
) -> Settings:
    """Check the options of a public call.

    Raises:
        AmpError: an unknown dtype, backend, mode or storage of weights, `enabled` of another type, or `dynamic_shapes`
            of no form that torch.export takes.
        RuleError: the rules cannot be loaded.
        PassError: a pipeline is given that the call does not run, or that lacks a pass.
    """
    if type(enabled) is not bool:
        raise AmpError(f"enabled={enabled!r}", hint="pass True or False")
    low = low_name(dtype)
    known_form = dynamic_shapes is None or isinstance(dynamic_shapes, _FORMS)
    if not known_form and not (isinstance(dynamic_shapes, str) and dynamic_shapes == AUTO):
        raise AmpError(
            f"dynamic_shapes={dynamic_shapes!r} is not known",
            hint=f"use {AUTO!r} (what differs from call to call becomes dynamic), None (every shape by itself) or, as"
            " for torch.export.export, one entry for each argument: ({0: torch.export.Dim.AUTO}, None)",
        )
    find_backend(backend).builder(mode)
    if weights not in get_args(WeightsArgument):
        raise AmpError(f"weights={weights!r}", hint="use 'fp32', or 'low' for inference on 16-bit weights alone")
    pipelines = pipelines_with(passes, allowed)
    return Settings(load_rules(rules), low, backend, dynamic_shapes, pipelines, mode, enabled, bool(fullgraph), weights)


def device_of(tensors: Any) -> torch.device:
    """The device that a set of tensors lives on: the first accelerator among them, else the CPU."""
    devices = {tensor.device for tensor in tensors if isinstance(tensor, torch.Tensor)}
    accelerators = sorted((d for d in devices if d.type not in ("cpu", "meta")), key=str)
    return accelerators[0] if accelerators else torch.device("cpu")
