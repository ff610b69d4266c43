"""`amp.find_nonfinite`: which node made the first inf or NaN of a batch, and which rule fixes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from amp_compiler.diagnose.losses import LossFunction, arguments, check_given, loss_step, own_loss, positional
from amp_compiler.diagnose.model_trials import ModelTrials, StepSubgraphTrials
from amp_compiler.errors import AmpError, CaptureError, HookError, OptimizerError
from amp_compiler.forward.api import is_onnx
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.program import EAGER
from amp_compiler.forward.settings import AUTO, make_settings
from amp_compiler.fx.capture.export import twin
from amp_compiler.ir.dtypes import DTypeArgument, low_name, low_type
from amp_compiler.ir.nonfinite import NonfiniteReport
from amp_compiler.onnx import needs_onnx
from amp_compiler.policy.loader import load_rules
from amp_compiler.training.step import TrainingStep


@needs_onnx()
def find_nonfinite(
    subject: Any,
    batch: Any,
    *,
    rules: Any = "default",
    dtype: DTypeArgument = "auto",
    backward: bool = False,
    loss_fn: LossFunction | None = None,
    loss_scale: float = 1.0,
) -> NonfiniteReport:
    """Run a batch node by node, and name the first nodes that made an inf or a NaN, with a rule that fixes it.

    The rule is proved: the batch runs again with the node in FP32, with its neighbours where that is not enough, until
    loss and gradients, or the outputs, are finite. Nothing is changed: no weight, buffer, optimizer or random number,
    but for what a model with graph breaks draws between its graphs from a generator of its own.

    Args:
        subject: a training step; a module, of `amp.compile` or plain; or an ONNX model, a path or a `ModelProto`, which
            is converted and run as 16-bit hardware would round it.
        batch: a tuple of arguments, or a single one, as for `step(*batch)` or `model(*batch)`; a dict of arguments by
            name, for a model.
        rules: of a module that is not compiled yet, and of an ONNX model.
        dtype: as for `amp.compile`, for the same; `auto` is FP16 for an ONNX model.
        backward: of a module, run the backward too, for a training loop of your own. It starts from what the module
            returns, or its `loss`.
        loss_fn: `loss_fn(model, *batch)`, as for `amp.training_step`; loss and backward run then, as
            those of a step under the same rules.
        loss_scale: what that loss is multiplied by: `scaler.get_scale()`. A step has its own.

    Returns:
        A report that is false where all is finite; print it. Of a step it also names parameters whose gradient
        becomes zero in 16 bits alone, with what loses it, and FP8 operands that saturate.

    Raises:
        AmpError: `subject` is none of these, or its batch does not fit.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> _ = torch.nn.init.constant_(model.weight, 3e4)
        >>> report = amp.find_nonfinite(model, torch.ones(2, 4), dtype="fp16")
        >>> report.nodes[0].planned, report.results
        ('linear', ('the output',))
        >>> print(report.rule, end="")
        version: 1
        extends: default
        rules:
          - match: {node: "^linear$"}
            precision: fp32
            why: "not finite: given fp32 1.2e+05 to 1.2e+05, made fp16 2 infinite"
    """
    dtype = low_name(dtype)
    check_given(subject, loss_fn, loss_scale, dtype, rules=rules != "default", backward=backward)
    if isinstance(subject, TrainingStep):
        return _of_step(subject, positional(batch))
    if isinstance(subject, nn.Module):
        if isinstance(subject, CompiledModule):
            model, settings = subject._amp_original, subject._amp_settings
        else:
            model, settings = subject, make_settings(rules, dtype, EAGER)
        args, named = arguments(batch)
        if backward or loss_fn is not None:
            step = loss_step(twin(model), settings, loss_fn or own_loss, loss_scale, by_name=bool(named))
            return _of_step(step, (named,) if named else args)
        return ModelTrials(model, args, named, settings).report()
    if not is_onnx(subject):
        raise AmpError(
            f"amp.find_nonfinite cannot look into a {type(subject).__name__}",
            hint="pass what amp.training_step gave, a module or an ONNX model",
        )
    if backward or loss_fn is not None:
        raise AmpError("an ONNX model has no backward", hint="train it with amp.training_step, and pass the step")
    if not isinstance(batch, Mapping):
        raise AmpError(f"the batch of an ONNX model is a {type(batch).__name__}", hint="pass a dict: {input: array}")
    from amp_compiler.onnx.check.nonfinite import OnnxTrials  # here, so that nobody else waits for ONNX

    low = low_type("fp16" if dtype == AUTO else dtype)
    return OnnxTrials(subject, batch, low).report(load_rules(rules))


def _of_step(step: TrainingStep, batch: tuple[Any, ...]) -> NonfiniteReport:
    step._look()  # or it would run with 16-bit copies of weights that were written since
    try:
        return step._trials(batch).report(step.loss_scale)
    except (HookError, OptimizerError):
        raise
    except CaptureError:
        if not step._setup.enabled:
            raise
    with step._in_fp32() as module:
        report = StepSubgraphTrials(module, batch, step._settings, float(step.loss_scale)).report()
    return replace(report, parameters=tuple(name.partition(".")[2] for name in report.parameters))
