"""`amp.compile` and `amp.explain`: an `nn.Module` in, a drop-in `nn.Module` or a plan out."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, overload

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.backends import BackendArgument
from amp_compiler.backends.backend import Mode
from amp_compiler.errors import AmpError
from amp_compiler.forward.autocast import autocast_totals
from amp_compiler.forward.capture import capture_model
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.functions import compiled_function, is_function
from amp_compiler.forward.kinds import refuse_lightning
from amp_compiler.forward.program import plan_captured
from amp_compiler.forward.settings import AUTO, Settings, WeightsArgument, device_of, make_settings
from amp_compiler.forward.subgraphs import build_subgraph
from amp_compiler.forward.unwrap import unwrapped_model
from amp_compiler.fx.capture.autocast_state import refuse_other_autocast
from amp_compiler.fx.capture.export import captured_from_program, export_module
from amp_compiler.fx.capture.frontend import as_backend
from amp_compiler.fx.captured import captured_from_graph_module
from amp_compiler.fx.examples import split_example
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.sign_of_life import sign_of_life
from amp_compiler.fx.torch_private.runtime import has_native_bf16
from amp_compiler.ir.dtypes import DType, DTypeArgument, low_name, low_type, short_name
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx import needs_onnx
from amp_compiler.onnx.importing.api import module_of
from amp_compiler.passes.pipeline import CAPTURE, FORWARD, INFERENCE, PLAN, SUBGRAPH
from amp_compiler.policy.targets import Target

logger = logging.getLogger("amp_compiler")
DEVICES = ("cpu", "cuda")  # that can be planned for without being there
PARALLEL = (
    "compile the model inside and put it around the result, as in DistributedDataParallel(amp.compile(model.module))"
)
# What `amp.compile` runs.
RUN = (CAPTURE, PLAN, FORWARD, INFERENCE, SUBGRAPH)
_Called = TypeVar("_Called", bound=Callable[..., Any])  # a function, a method or a class of modules


class _ModelProto(Protocol):
    @property
    def opset_import(self) -> Any: ...


class _Options(TypedDict, total=False):
    rules: Any
    dtype: DTypeArgument
    dynamic_shapes: Any
    backend: BackendArgument
    passes: Any
    mode: Mode
    enabled: bool
    fullgraph: bool
    weights: WeightsArgument


@overload
def compile(model: nn.Module | str | Path | _ModelProto, **options: Unpack[_Options]) -> CompiledModule: ...
@overload
def compile(model: _Called, **options: Unpack[_Options]) -> _Called: ...
@overload
def compile(model: None = None, **options: Unpack[_Options]) -> Callable[[_Called], _Called]: ...
def compile(
    model: Any = None,
    *,
    rules: Any = "default",
    dtype: DTypeArgument = "auto",
    dynamic_shapes: Any = "auto",
    backend: BackendArgument = "inductor",
    passes: Any = None,
    mode: Mode = "default",
    enabled: bool = True,
    fullgraph: bool = False,
    weights: WeightsArgument = "fp32",
) -> Any:
    """Compile a module, or a function, for mixed precision.

    Args:
        model: any `nn.Module`, or an ONNX model (a path or a `ModelProto`, see `amp.onnx_to_fx`); it is captured at
            the first call for each input signature. Or a function, a method or a class of modules, whose `forward` is
            meant: `@amp.compile` stands before them, or `@amp.compile(dtype="bf16")`.
        rules: a preset name, a path, a dict or a `RuleSet`.
        dtype: `"fp16"`, `"bf16"`, a `torch.dtype` or its name, or `"auto"` (BF16 where the device computes it natively,
            else FP16).
        dynamic_shapes: `"auto"`: the first shape is captured as it is, and where a second one differs from it, what
            differs becomes dynamic. `None`: every new input shape is a recompilation. Or as for `torch.export.export`.
        backend: `"inductor"`, or `"eager"` (node by node: the oracle). A call that is differentiated twice (a gradient
            penalty, a Hessian product) runs once more node by node with either, said once; with dropout in it, it needs
            `"eager"`.
        passes: pipelines with passes of your own put in, such as
            `amp.pipelines.FORWARD.insert_after("legalize", MyPass())`; one or several.
        mode: `"default"`, or `"max-autotune"`: Inductor times several kernels for a product and several sizes of blocks
            for a loop, as under torch.compile's mode of that name, and the first call takes longer by that.
        enabled: mixed precision; without it the model runs as it is written, in its own types, not compiled.
        fullgraph: a graph break, and what else no graph can be made of, is an error; else subgraphs run, or
            `torch.autocast`, and `execution` says why.
        weights: `"fp32"`, or `"low"` for inference in little memory: the first call converts the parameters of `model`
            itself to 16 bits, but for those that a rule has read in FP32, and keeps no others. `state_dict()` gives
            them as they are then, and training is refused.

    Returns:
        A module with the same parameters (the same objects), the same `state_dict` keys and the same call signature.
        For a function or a method, one whose attribute `compiled` has the plan; for a class, the class; without a
        model, what compiles one with these options.

    Raises:
        AmpError: a wrong option. At the first call: `CaptureError`, `LoweringError`; `PassError` of a pass in `passes`.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = amp.compile(torch.nn.Linear(8, 4), dtype="bf16", backend="eager")
        >>> model(torch.ones(2, 8)).dtype
        torch.float32
    """
    settings = make_settings(rules, dtype, backend, dynamic_shapes, passes, RUN, mode, fullgraph, weights, enabled)
    return functools.partial(_compiled, settings) if model is None else _compiled(settings, model)


def _compiled(settings: Settings, model: Any) -> Any:
    if isinstance(model, type) and issubclass(model, nn.Module):
        model.forward = compiled_function(model.forward, settings)  # type: ignore[method-assign]
        return model
    if is_function(model):
        return compiled_function(model, settings)
    model = unwrapped_model(module_of(model), PARALLEL)
    if not isinstance(model, nn.Module):
        raise AmpError(
            f"amp.compile takes an nn.Module or a function, not a {type(model).__name__}",
            hint="compile the module or the function that computes with tensors",
        )
    refuse_lightning(model)
    return CompiledModule(model, settings)


def _build(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    keywords = dict(options or {})
    unknown = sorted(set(keywords) - {"rules", "dtype", "backend", "mode"})
    if unknown:
        raise AmpError(
            f"unknown option {unknown[0]!r} of backend 'amp_compiler'", hint="use 'rules', 'dtype', 'backend', 'mode'"
        )
    if mode is not None:
        keywords["mode"] = mode
    settings = make_settings(**keywords)
    low = settings.low(device_of(inputs))
    refuse_other_autocast(torch_dtype(low))
    return build_subgraph(graph_module, inputs, settings, low)


dynamo_backend = as_backend(_build)
dynamo_backend.__doc__ = """The entry point behind `torch.compile(model, backend="amp_compiler")`.

Args:
    graph_module: Dynamo's graph.
    inputs: its example inputs.
    options: `rules`, `dtype`, `backend` and `mode`, as for `amp.compile`.
    mode: the same as in the options.

Raises:
    AmpError: an unknown option, or an autocast context in another type around the call.
"""


@sign_of_life("amp.explain")
def explain(
    model: Any,
    example_args: Any = None,
    *,
    rules: Any = "default",
    dtype: DTypeArgument = "auto",
    dynamic_shapes: Any = None,
    device: str | None = None,
    fuse: bool = False,
    opset: int | None = None,
    target: Target | None = None,
) -> PrecisionPlan:
    """Plan the precision of a model without compiling or running it.

    Args:
        model: an `nn.Module`, an FX `GraphModule` in ATen IR as `torch.export` gives, or an ONNX path or `ModelProto`.
        example_args: a tuple of positional arguments, a dict of keyword arguments, a pair of both, or one tensor. An
            ONNX model needs none; with them its open dimensions have their sizes, and the plan has the totals of
            `torch.autocast` over what `onnx_to_fx` makes of it.
        rules: as for `compile`.
        dtype: as for `compile`; `"auto"` is FP16 for an ONNX model, whose device is not known.
        dynamic_shapes: as for `torch.export.export`.
        device: `"cuda"` or `"cpu"`: plan for this one, whether it is there or not, wherever the tensors are (on the
            meta device, for one). `"auto"` is BF16 for a GPU that is not there: all have it since capability 8.0.
        fuse: of an ONNX model: the plan that `convert_onnx` has with this.
        opset: the same.
        target: the same.

    Returns:
        The plan; `print(plan)` shows every node and cast.

    Raises:
        AmpError: there is no such device; or an option is given that is not for such a model.
        CaptureError: the model cannot be captured.
        OnnxError: the ONNX model cannot be read, or its opset not be raised.
        RuleError: the rules cannot be loaded.

    Example:
        >>> import torch, amp_compiler as amp
        >>> plan = amp.explain(torch.nn.Linear(8, 4), (torch.ones(2, 8),), dtype="bf16")
        >>> [(node.op, node.precision) for node in plan.nodes]
        [('aten.linear', 'low')]
    """
    dtype = low_name(dtype)
    if device is not None:
        if device not in DEVICES:
            raise AmpError(f"device={device!r}", hint=f"pass one of {', '.join(DEVICES)}, or None for where it is")
        if dtype == AUTO:
            there = device == "cpu" or torch.cuda.is_available()
            dtype = "bf16" if not there or has_native_bf16(torch.device(device)) else "fp16"
    if (fuse or opset is not None or target is not None) and not is_onnx(model):
        option = "fuse=True" if fuse else f"opset={opset!r}" if opset is not None else f"target={target!r}"
        raise AmpError(f"{option} for a {type(model).__name__}", hint="leave it out: only ONNX models take it")
    settings = make_settings(rules, dtype, "eager", dynamic_shapes)
    model = unwrapped_model(model, PARALLEL)
    if isinstance(model, fx.GraphModule) and example_args is None:
        captured = captured_from_graph_module(copy.deepcopy(model))
        tensors = [node.meta.get("val") for node in captured.graph_module.graph.nodes]
        low = settings.low(device_of(tensors))
        return plan_captured(captured, settings, low, device=device or "", name=type(model).__name__)
    if is_onnx(model):
        if device is not None:
            raise AmpError(f"device={device!r} for an ONNX model", hint="leave it out: a file is not of one device")
        low = low_type("fp16" if dtype == AUTO else dtype)
        return _explain_onnx(model, example_args, settings, low, fuse=fuse, opset=opset, target=target)
    if not isinstance(model, nn.Module):
        raise AmpError(
            f"amp.explain cannot read a {type(model).__name__}",
            hint="pass an nn.Module, an FX GraphModule, or an ONNX path or ModelProto",
        )
    args, kwargs = split_example(example_args)
    low = settings.low(device_of([*pytree.tree_leaves((args, kwargs)), *model.parameters()]))
    captured, _ = capture_model(model, args, kwargs, torch_dtype(low), dynamic_shapes is not None)
    plan = plan_captured(captured, settings, low, device=device or "", name=type(model).__name__)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return replace(plan, autocast=autocast_totals(captured, low, plan.device, frozen))


@needs_onnx()
def _explain_onnx(model: Any, example_args: Any, settings: Settings, low: DType, **options: Any) -> PrecisionPlan:
    from amp_compiler.onnx.check.batches import sizes_of  # here, so that nobody else waits for ONNX
    from amp_compiler.onnx.model.model import open_model
    from amp_compiler.onnx.plan import explain_onnx

    if example_args is None:
        return explain_onnx(model, rules=settings.rules, dtype=short_name(low), **options)
    opened = open_model(model)
    example = split_example(example_args)
    sizes = sizes_of(opened, *example)
    plan = explain_onnx(opened, rules=settings.rules, dtype=short_name(low), sizes=sizes, **options)
    try:
        args, kwargs = pytree.tree_map_only(np.ndarray, torch.from_numpy, example)
        captured = captured_from_program(export_module(module_of(model), args, kwargs))
        plan_captured(captured, settings, low)  # by which it is in normal form
    except (AmpError, TypeError, ValueError) as cause:  # of texts, the import or its own plan: the file's plan stands
        logger.warning("what torch.autocast casts is not counted: %s", cause)
        return plan
    return replace(plan, autocast=autocast_totals(captured, low, "cpu"))


def is_onnx(model: object) -> bool:
    """Whether it is an ONNX model, a path or a `ModelProto`; told without importing ONNX."""
    return isinstance(model, (str, Path)) or type(model).__module__.partition(".")[0] == "onnx"
