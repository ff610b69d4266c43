"""`amp.training_step`: forward, backward, check, clipping, update and 16-bit weights as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.compiled_module import CompiledModule
from amp_compiler.errors import AmpError
from amp_compiler.frontends.fx_capture import autocast_off
from amp_compiler.optimizers import check_optimizers
from amp_compiler.plan import PrecisionPlan
from amp_compiler.program import UPDATES
from amp_compiler.runtime.loss_scale import LossScale, LossScaleState, NoLossScale, make_loss_scale
from amp_compiler.settings import device_of, make_settings
from amp_compiler.signature import leaves_key, module_key
from amp_compiler.step_build import StepOptions, StepState, build_step
from amp_compiler.step_program import LossModule, StepOutput, StepProgram
from amp_compiler.step_report import NonfiniteReport, report_nonfinite
from amp_compiler.step_state import GradientSums, LowWeights

MOST_SIGNATURES = 64


def training_step(
    model: Any,
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    rules: Any = "default",
    dtype: str = "auto",
    loss_scale: Any = "rules",
    clip_norm: float | None = None,
    accumulate: int = 1,
    dynamic_shapes: Any = None,
    backend: str = "inductor",
    enabled: bool = True,
) -> TrainingStep:
    """Make a training step: one compiled graph that runs forward, backward and update.

    Args:
        model: an `nn.Module`, or a dict, list or tuple of them.
        loss_fn: `loss_fn(model, *batch)` returns the loss (one floating-point number), or `(loss, aux)`.
        optimizer: a `torch.optim` optimizer (AdamW, Adam, SGD), or a dict of them. Its state and `param_groups` stay
            the single truth: schedulers, `state_dict()` and checkpoints work as always.
        rules: a preset name, a path, a dict or a `RuleSet`.
        dtype: `"fp16"`, `"bf16"` or `"auto"`.
        loss_scale: `"dynamic"`, a number, `None`, or a `LossScale`. By default none in BF16; in FP16 what the
            `loss_scale` section of the rules says, or dynamic.
        clip_norm: largest global L2 norm of the unscaled gradients.
        accumulate: number of calls whose gradients are averaged, in FP32, before the weights are updated.
        dynamic_shapes: as for `torch.export.export`, for `*batch`.
        backend: `"inductor"` or `"eager"`.
        enabled: mixed precision; without it the same step in plain FP32.

    Returns:
        A callable: `loss = step(*batch)`, detached, without a device sync.

    Raises:
        AmpError: a wrong option. At the first call: `CaptureError`, `LoweringError`.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x, y: (m(x) - y).square().mean(),
        ...                          torch.optim.SGD(model.parameters(), 0.1), dtype="bf16", backend="eager")
        >>> losses = [float(step(torch.ones(2, 4), torch.zeros(2, 1))) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True
    """
    return TrainingStep(
        model,
        loss_fn,
        optimizer,
        rules=rules,
        dtype=dtype,
        loss_scale=loss_scale,
        clip_norm=clip_norm,
        accumulate=accumulate,
        dynamic_shapes=dynamic_shapes,
        backend=backend,
        enabled=enabled,
    )


class TrainingStep:
    """What `amp.training_step` returns. Call it with a batch."""

    def __init__(
        self,
        model: Any,
        loss_fn: Callable[..., Any],
        optimizer: Any,
        *,
        rules: Any,
        dtype: str,
        loss_scale: Any,
        clip_norm: float | None,
        accumulate: int,
        dynamic_shapes: Any,
        backend: str,
        enabled: bool,
    ) -> None:
        if isinstance(model, CompiledModule):
            model = model.original
        if clip_norm is not None and not clip_norm > 0:
            raise AmpError(f"clip_norm={clip_norm!r}", mend="pass a positive number, or None for no clipping")
        if not isinstance(accumulate, int) or accumulate < 1:
            raise AmpError(f"accumulate={accumulate!r}", mend="pass a whole number from 1 on")
        self._accumulate, self._gathered = accumulate, 0
        self._settings = make_settings(rules, dtype, backend, dynamic_shapes)
        self._module = LossModule(model, loss_fn)
        self._optimizers = check_optimizers(optimizer)
        self._clip_norm, self._enabled = clip_norm, enabled
        self._device = device_of(self._module.parameters())
        self._scale_config = self._choose_scale(loss_scale)
        self._scale = self._scale_config.init(self._device)
        self._lows = LowWeights()
        self._state = StepState(lambda: self._scale, self._lows, GradientSums())
        self._programs: dict[Any, StepProgram] = {}
        self._last: tuple[StepProgram, StepOutput, Tensor] | None = None
        self._leaves: list[Any] = []

    def _choose_scale(self, loss_scale: Any) -> LossScale:
        low = self._settings.low(self._device).short
        if not self._enabled:
            return NoLossScale(check_finite=False)
        if loss_scale != "rules":
            return make_loss_scale(loss_scale)
        if low != "fp16":  # BF16 has FP32's range
            return make_loss_scale(None)
        return make_loss_scale(self._settings.rules.loss_scale or "dynamic")

    def __call__(self, *batch: Any) -> Any:
        """Train on one batch.

        Args:
            batch: what stands behind `model` in `loss_fn`.

        Returns:
            The detached loss, or `(loss, aux)`.

        Raises:
            CaptureError: the loss cannot be captured as one graph.
            LoweringError: the graph cannot be compiled.
        """
        leaves, spec = pytree.tree_flatten((batch, {}))
        with autocast_off():
            program = self._program(batch, leaves, spec)
            scale = self._scale.scale.clone()
            self._last = None  # last step's gradients must not live through this one
            output = program(leaves)
        self._gathered = (self._gathered + 1) % self._accumulate
        UPDATES.note()
        self._lows.settle([parameter for group in program.groups for parameter in group.parameters])
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether a step came before theirs
        self._last, self._leaves = (program, output, scale), leaves
        return output.loss if output.aux is None else (output.loss, output.aux)

    def _program(self, batch: tuple[Any, ...], leaves: list[Any], spec: Any) -> StepProgram:
        owners = tuple(
            tuple(map(id, group["params"])) for optimizer in self._optimizers for group in optimizer.param_groups
        )
        gather = "" if self._accumulate == 1 else "use" if self._gathered == self._accumulate - 1 else "add"
        key = (spec, module_key(self._module), owners, gather, leaves_key(leaves))
        program = self._programs.get(key)
        if program is not None and not any(group.flags_changed() for group in program.groups):
            return program
        if len(self._programs) >= MOST_SIGNATURES:
            raise AmpError(
                f"the step was captured for {MOST_SIGNATURES} batch shapes",
                mend="pass dynamic_shapes=, or pad the batches",
            )
        options = StepOptions(
            self._settings,
            self._optimizers,
            self._scale_config,
            self._clip_norm,
            self._enabled,
            self._accumulate,
            gather,
        )
        program = build_step(self._module, batch, options, self._state)
        self._programs[key] = program
        return program

    def _seen(self) -> tuple[StepProgram, StepOutput, Tensor]:
        if self._last is None:
            raise AmpError("the step has not been called yet", mend="call it with a batch first")
        return self._last

    @property
    def loss_scale(self) -> Tensor:
        """FP32 scalar on the device: what the next loss is multiplied by."""
        return self._scale.scale.clone()

    @property
    def skipped_steps(self) -> Tensor:
        """INT64 scalar on the device: how many steps were skipped."""
        return self._scale.skipped_steps.clone()

    @property
    def grad_norm(self) -> Tensor:
        """FP32 scalar on the device: L2 norm of the last step's unscaled gradients, before clipping."""
        return self._seen()[1].norm

    @property
    def plan(self) -> PrecisionPlan:
        """The plan of the last step's forward.

        Raises:
            AmpError: before the first call, and where mixed precision is off.
        """
        plan = self._seen()[0].plan
        if plan is None:
            raise AmpError("there is no plan with enabled=False", mend="leave enabled at True")
        return plan

    @property
    def graph_module(self) -> fx.GraphModule:
        """The last step's whole graph: forward, backward and update, with `meta["amp_phase"]` on every node."""
        return self._seen()[0].graph_module

    def gradients(self) -> dict[str, Tensor]:
        """The last step's unscaled FP32 gradients by parameter name, before clipping; for logging.

        While batches are gathered, their sum so far divided by `accumulate`.
        """
        program, output, scale = self._seen()
        return {
            name: gradient.float() / (scale * self._accumulate)
            for name, gradient in zip(program.updated, output.gradients, strict=True)
        }

    def nonfinite_report(self) -> NonfiniteReport:
        """Which gradients of the last step were not finite, and the first nodes that made such values.

        Until it is asked for, only flags are kept, on the device. This reads them, and where the step was skipped it
        runs its forward and backward once more, node by node, on the last batch.
        """
        program, output, scale = self._seen()
        leaves = self._leaves if self._scale_config.checks_finite else None
        return report_nonfinite(program, output.flags.tolist(), leaves, scale)

    def check(self) -> None:
        """Raise where the scale is at its floor and gradients stay non-finite. This reads from the device.

        Raises:
            LossScaleError: names the first parameters with non-finite gradients and the nodes that made them.
        """
        report = self.nonfinite_report()
        self._scale_config.check(self._scale, parameters=report.parameters, nodes=map(str, report.nodes))

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, with the keys of `torch.amp.GradScaler.state_dict()`."""
        return self._scale_config.state_dict(self._scale)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the loss scale of another step or of a `torch.amp.GradScaler`.

        Raises:
            AmpError: keys are missing or do not fit the kind of loss scale.
        """
        config = self._scale_config.matching(state)
        if config != self._scale_config:
            self._programs.clear()
            self._scale_config = config
        self._scale = LossScaleState(*config.load_state_dict(state, self._device))
