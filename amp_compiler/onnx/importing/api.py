"""An ONNX model as a trainable `torch.fx.GraphModule`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.errors import AmpError, OnnxCaptureError, OnnxError
from amp_compiler.onnx import needs_onnx


@needs_onnx()
def onnx_to_fx(
    model: Any, *, trainable: Callable[[str, torch.Tensor], bool] | None = None, check: bool = True
) -> fx.GraphModule:
    """Make a trainable module of an ONNX model.

    The module takes the model's inputs in their order (or by name) and returns its output, or a tuple of them. Its
    floating-point initializers are `nn.Parameter`s, the others buffers; names keep their dots, so that a model that
    `torch.onnx.export` wrote has the torch model's parameter names (export with `optimize=False` for that: the
    exporter's optimizer transposes weights and merges equal ones). Batch normalisation and dropout do what the file
    says, whether the module is in train or eval mode.

    Args:
        model: a path, an `onnx.ModelProto` or an `onnx_ir.Model`, of any opset from 9 on.
        trainable: `trainable(name, tensor)` says which floating-point initializers are parameters. Without it all are,
            except for buffers by the metadata of torch's exporter, single numbers, masks with values beyond 1e30, and
            what is used only as statistics, bounds, scales or shapes.
        check: refuse what ONNX's full checker refuses.

    Returns:
        The module. `meta["onnx_names"]` maps each parameter and buffer to its ONNX name.

    Raises:
        CaptureError: for operators that have no conversion: all of them, with their nodes and how to add them.
        OnnxError: where the file cannot be read, or is no model. (An error for operators is one of these too.)

    Example:
        >>> import amp_compiler as amp, torch                                       # doctest: +SKIP
        >>> module = amp.onnx_to_fx("m.onnx")                                       # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(module.parameters(), 1e-4)                # doctest: +SKIP
        >>> step = amp.training_step(module, loss_fn, optimizer, dtype="bf16")      # doctest: +SKIP
    """
    # ONNX is imported here, so that a user without ONNX models does not wait for it.
    import onnx_ir as ir

    from amp_compiler.onnx.importing.build import build_module
    from amp_compiler.onnx.model.model import check_model, open_model, to_ir
    from amp_compiler.onnx.model.validate import raised_as_onnx

    if trainable is not None and not callable(trainable):
        raise AmpError(
            f"trainable= is a {type(trainable).__name__}, not a function",
            hint="give one of (name, tensor), or leave it out",
        )
    if isinstance(model, ir.Model):
        with raised_as_onnx(model.graph.name or "the model", "it cannot be read"):
            return build_module(model, trainable)
    opened = open_model(model)
    refused: OnnxError | None = None
    if check:
        try:
            check_model(opened)
        except OnnxError as wrong:
            refused = wrong  # what cannot be converted is told in terms of the conversion
    raised: list[Exception] = []

    def requested(name: str, tensor: torch.Tensor) -> bool:
        try:
            return trainable is not None and trainable(name, tensor)
        except Exception as error:
            raised.append(error)
            raise

    try:
        with raised_as_onnx(opened.name, "it cannot be read"):
            module = build_module(to_ir(opened), None if trainable is None else requested)
    except OnnxError as wrong:
        if raised:
            raise raised[0] from None  # the caller's own error, and no fault of the model
        if refused is not None and not isinstance(wrong, OnnxCaptureError):
            raise refused from wrong  # the checker knows the node
        raise
    if refused is not None:
        raise refused
    return module


def module_of(model: Any) -> Any:
    """The module of an ONNX model, alone or in a dict, list or tuple of models; anything else as it is."""
    if isinstance(model, dict):
        return {key: module_of(one) for key, one in model.items()}
    if type(model) in (list, tuple):
        return type(model)(module_of(one) for one in model)
    return onnx_to_fx(model) if _is_onnx(model) else model


def trained_module(model: Any, optimizer: Any) -> tuple[Any, Any]:
    """The model and the optimizer of a training step, with ONNX models made modules and a factory called.

    Args:
        model: what `amp.training_step` is given.
        optimizer: optimizers, or a function that makes one from a list of parameters.

    Raises:
        AmpError: where an ONNX model comes with an optimizer that owns none of its parameters, or the function is of
            another kind.
    """
    result = module_of(model)
    modules = [one for one in pytree.tree_leaves(result) if isinstance(one, nn.Module)]
    parameters = list({id(one): one for module in modules for one in module.parameters()}.values())
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        try:
            return result, optimizer(parameters)
        except TypeError as cause:
            name = getattr(optimizer, "__qualname__", str(optimizer))
            raise AmpError(
                f"{name} makes no optimizer of a list of parameters: {cause}",
                hint="pass model, loss_fn and optimizer in this order",
            ) from cause
    if result is model or not any(map(_is_onnx, pytree.tree_leaves(model))):
        return model, optimizer
    optimizers = optimizer.values() if isinstance(optimizer, dict) else [optimizer]
    groups = [group for one in optimizers for group in getattr(one, "param_groups", [])]
    if {id(one) for group in groups for one in group["params"]}.isdisjoint(map(id, parameters)):
        raise AmpError(
            "the optimizer owns no parameter of the ONNX model",
            where=str(model) if isinstance(model, str) or hasattr(model, "__fspath__") else "",
            hint="pass a function such as `lambda parameters: torch.optim.AdamW(parameters)`, or "
            "`module = amp.onnx_to_fx(path)` with an optimizer over module.parameters()",
        )
    return result, optimizer


def _is_onnx(model: Any) -> bool:
    """A path, a `ModelProto` or an `onnx_ir.Model`, told without importing ONNX."""
    named = hasattr(model, "__fspath__") or (isinstance(model, str) and model.endswith(".onnx"))
    return named or type(model).__module__.partition(".")[0] in ("onnx", "onnx_ir")
