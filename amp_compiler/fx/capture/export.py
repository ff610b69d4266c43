"""Capture by `torch.export`, for what is exported: a flat FX graph in ATen training IR."""

import contextlib
import copy
import sys
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.fx.capture.errors import capture_error
from amp_compiler.fx.capture.generators import seeds_refused
from amp_compiler.fx.capture.spread import refuse_spread
from amp_compiler.fx.capture.tracing import quiet, tracing_context
from amp_compiler.fx.captured import Captured, Input, Source
from amp_compiler.fx.graph import user_source
from amp_compiler.fx.torch_private.tracing import exporting, forget_real_tensors, new_graph_module, transform_of


def export_module(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, dynamic_shapes: Any = None
) -> torch.export.ExportedProgram:
    """Export a module's forward with `torch.export`, in its present train or eval mode.

    What the forward writes to attributes is lost: it is not among the results, and is undone.

    Args:
        model: the module; its parameters are named, not copied.
        args: example positional arguments.
        kwargs: example keyword arguments.
        dynamic_shapes: as for `torch.export.export`.

    Raises:
        CaptureError: where the model cannot be taken as one graph; names the line of the model.
    """
    refuse_spread(model)  # before anything looks into it: FSDP has tensors whose memory is given back
    return _export(twin(model), args, kwargs, dynamic_shapes)


def twin(model: nn.Module) -> nn.Module:
    """A copy of a module that has its very parameters and buffers: what its code writes to objects is the copy's.

    Where it cannot be copied, it is the module itself.
    """
    memo: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except Exception:  # noqa: BLE001  # a lock, a generator or a file in it; a copy is a courtesy
        return model


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, dynamic_shapes: Any
) -> torch.export.ExportedProgram:
    _refuse_scripted(model)
    try:
        _register_caches()
        with (
            exporting(),
            tracing_context(),
            seeds_refused(),
            quiet("torch.fx.experimental.symbolic_shapes"),
            quiet("torch._subclasses.fake_tensor"),
        ):
            program = torch.export.export(model, args, kwargs or {}, dynamic_shapes=dynamic_shapes, strict=False)
    except AmpError:
        raise  # said by our own code behind the model, such as a wrong loss
    except Exception as cause:  # torch.export raises whatever the model's own code or a guard raised
        raise capture_error(cause, model) from cause
    _refuse_transforms(program.graph)
    forget_real_tensors(program.graph)
    return program


def _refuse_scripted(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            called = f"module '{name}'" if name else "the model"
            raise CaptureError(
                f"{called} is scripted (torch.jit), which a graph cannot look into",
                hint="put the module that it was made of in its place",
            )


def _refuse_transforms(graph: fx.Graph) -> None:
    """Refuse a graph in which forward differentiates."""
    for node in graph.nodes:
        if transform := transform_of(node):
            raise CaptureError(
                "forward differentiates with torch.func or torch.autograd.forward_ad, which a captured graph cannot"
                f" hold ({transform})",
                where=user_source(node.meta.get("stack_trace")),
                hint="do it outside of the model, or in a part that is not captured",
            )


def _register_caches() -> None:
    """Let key-value caches of `transformers` be taken apart as outputs; whoever returns one has loaded their module."""
    if "transformers.cache_utils" in sys.modules:
        with contextlib.suppress(ImportError, ValueError):  # there is none to do so, or it was done
            from transformers.integrations.executorch import register_dynamic_cache_export_support

            register_dynamic_cache_export_support()


def captured_from_program(program: torch.export.ExportedProgram) -> Captured:
    """The captured form of a `torch.export` program."""
    kinds = {
        InputKind.PARAMETER: Source.PARAMETER,
        InputKind.BUFFER: Source.BUFFER,
        InputKind.CONSTANT_TENSOR: Source.CONSTANT,
        InputKind.USER_INPUT: Source.USER,
    }
    for node in program.graph_module.graph.find_nodes(op="placeholder"):
        if getattr(node.meta.get("val"), "constant", None) is not None:
            node.meta["val"].constant = None  # else whoever runs the graph on its stand-ins writes to the real tensor
    inputs: list[Input] = []
    constants: dict[str, torch.Tensor] = {}
    users = 0
    for spec in program.graph_signature.input_specs:
        if spec.kind not in kinds:
            raise CaptureError(
                f"the model has an input of kind {spec.kind.name}", where=str(spec.arg.name), hint="pass tensors only"
            )
        source, target = kinds[spec.kind], spec.target or ""
        if source is Source.USER:
            inputs.append(Input(spec.arg.name, source, index=users))
            users += 1
            continue
        if source is Source.CONSTANT or (source is Source.BUFFER and target in program.constants):
            constants[target] = program.constants[target]
        inputs.append(Input(spec.arg.name, source, target))
    return Captured(new_graph_module(program.graph_module, program.graph), tuple(inputs), constants)
