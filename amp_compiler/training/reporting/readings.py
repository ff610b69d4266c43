"""What can be read off a training step after a call, and what is built of it to be looked at, not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from amp_compiler.errors import AmpError, LossScaleError, first_line
from amp_compiler.forward.autocast import autocast_totals
from amp_compiler.forward.counting import CountingProgram
from amp_compiler.forward.program import normalize
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.step_graph import step_graph_of
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.nonfinite import LOSS, NonfiniteReport
from amp_compiler.ir.plan import AutocastTotals, PrecisionPlan
from amp_compiler.ops.loss_scale import LossScale, LossScaleState
from amp_compiler.passes.pipeline import Stages
from amp_compiler.ranks.parts import UNSPLIT
from amp_compiler.ranks.traffic import Traffic, traffic_of
from amp_compiler.training.build import begin_gradients
from amp_compiler.training.capture import capture_once
from amp_compiler.training.loss_module import ROOT, LossModule
from amp_compiler.training.program import StepOutput, StepProgram
from amp_compiler.training.program_choice import ProgramChoice
from amp_compiler.training.reporting.counting import build_counting
from amp_compiler.training.reporting.events import NonfiniteEvent
from amp_compiler.training.reporting.scale_watch import StuckWatch
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.subgraphs.step import SubgraphStep
from amp_compiler.training.trial import StepTrials
from amp_compiler.training.weights import widened

_GATHERED = (
    "a batch that was gathered before the last one made it, or the last one with other random numbers:"
    " amp.find_nonfinite(step, batch) tells of each"
)
_IN_SUBGRAPHS = "the step ran in subgraphs: amp.find_nonfinite(step, batch) runs them again, and names the node"
_TRAINED = (
    "its gradients are finite, so no update is skipped for it; amp.find_nonfinite(step, batch) tells of any batch what"
    " made it"
)
_AGAIN = "run again it is finite: it draws random numbers, or its batch was overwritten"
_ELSEWHERE = "run again on this rank alone it is finite: ask the other ranks, by whose batches it was made"


@dataclass(frozen=True)
class DryStep:
    """A step that was built as far as its graph.

    Args:
        graph_module: the whole step, as all passes of STEP leave it.
        traffic: what a rank sends and holds; `None` for one process.
    """

    graph_module: fx.GraphModule
    traffic: Traffic | None


class StepReadings:
    """The part of `TrainingStep` that reads: properties are tensors on the device or graphs, and never wait for it.

    It also builds what `amp.find_nonfinite`, `amp.profile` and `amp.tune` run.
    """

    def __init__(self, setup: StepSetup, choice: ProgramChoice) -> None:
        self._setup, self._state, self._optimizers, self._choice = setup, setup.state, setup.optimizers, choice
        self._watch, self._gathered = StuckWatch(setup.device), 0
        self._without_batch = False  # whether the last call ran no batch
        self._last: tuple[StepProgram | SubgraphStep, StepOutput, float | None] | None = None
        self._leaves: list[Any] = []
        self._spec: Any = None

    def _seen(self) -> tuple[StepProgram | SubgraphStep, StepOutput, Tensor]:
        if self._last is None:
            raise AmpError("there is no finished call of the step to read from", hint="call it with a batch first")
        program, output, constant = self._last
        state = self._scale.scale
        if output.scale is not None:
            return program, output, output.scale
        return program, output, state.clone() if constant is None else torch.full_like(state, constant)

    def _divisor(self, program: StepProgram | SubgraphStep) -> float:
        """What its gradients are the sum of, in batches or their weights."""
        samples = self._state.samples
        return program.update.report.divisor if samples is None or self._gathered else samples.divisor

    @property
    def _scale_config(self) -> LossScale:
        return self._state.scale.config

    @property
    def _scale(self) -> LossScaleState:
        return self._state.scale.state

    @property
    def loss_scale(self) -> Tensor:
        """FP32 scalar on the device: what the next loss is multiplied by.

        A number that is assigned to it is the next scale, as in `GradScaler.update(new_scale)`. A dynamic scale goes on
        from there; a static one has that number from then on, for which the step is recompiled.

        Raises:
            AmpError: on assignment, where this loss scale cannot have that number.
        """
        return self._scale.scale.clone()

    @loss_scale.setter
    def loss_scale(self, scale: Any) -> None:
        self._state.scale.set(scale)
        self._watch.forget()

    @property
    def skipped_steps(self) -> Tensor:
        """INT64 scalar on the device: how many steps were skipped."""
        return self._scale.skipped_steps.clone()

    @property
    def grad_norm(self) -> Tensor:
        """FP32 scalar on the device: L2 norm of the last step's unscaled gradients, before clipping.

        Where the step itself looks at no gradient before the update, it is computed when it is asked for: with a loss
        scale that does not check (`check_finite: false`), without clipping.
        """
        program, output, scale = self._seen()
        if output.checked:
            return output.norm.clone()  # the next step may overwrite it
        with torch.no_grad():
            # Squares added up in FP32 are off in the fifth digit where there are a few hundred thousand.
            norms = [torch.linalg.vector_norm(one.float(), dtype=torch.float64) for one in output.gradients]
            norm: Tensor = torch.linalg.vector_norm(torch.stack(norms)) / (scale * self._divisor(program))
            return norm.float()

    @property
    def plan(self) -> PrecisionPlan:
        """The plan of the last step's forward.

        Raises:
            AmpError: before the first call, and where mixed precision is off.
        """
        plan = self._seen()[0].plan
        if plan is None and self._setup.enabled:
            raise AmpError(
                f"the last step has no plan: it ran {self.execution}", hint="call it where torch.compile is on"
            )
        if plan is None:
            raise AmpError("there is no plan with enabled=False", hint="leave enabled at True")
        return plan

    @property
    def graph_module(self) -> fx.GraphModule:
        """The last step's whole graph: forward, backward and update, with `meta["amp_phase"]` on every node.

        Of a step in subgraphs, the graph of its update.
        """
        return self._seen()[0].update.report.graph_module

    def to_html(
        self,
        path: str | Path,
        *,
        profile: Any = None,
        other: PrecisionPlan | None = None,
        names: tuple[str, str] = ("this", "other"),
    ) -> None:
        """Write the last step as one HTML page: its forward as planned, and the whole step as it runs.

        Beside the plan's casts stand those of `torch.autocast` in the same forward, captured once more for it.

        Args:
            path: the file.
            profile: what `amp.profile` found of this step.
            other: a plan that the forward's is compared with.
            names: what the two are called.

        Raises:
            AmpError: before the first call, of a step in subgraphs, with `enabled=False`, or where the file cannot be
                written.

        Example:
            >>> import torch, amp_compiler as amp
            >>> model = torch.nn.Linear(4, 1)
            >>> step = amp.training_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), 0.1),
            ...                          dtype="bf16", backend="eager")
            >>> step.to_html("step.html", profile=amp.profile(step, [(torch.ones(2, 4),)]))
        """
        if not isinstance(self._seen()[0], StepProgram):
            raise AmpError(
                "a step in subgraphs is not one graph to draw", hint="write its plan: step.plan.to_html(path)"
            )
        batch = pytree.tree_unflatten(self._leaves, self._spec)[0]
        plan = replace(self.plan, autocast=self._autocast(batch))
        plan.to_html(path, profile=profile, other=other, names=names, step=step_graph_of(self.graph_module))

    @property
    def stages(self) -> Stages:
        """The text of the last step's graph behind each pass: `step.stages["fold_loss_scale"].text`, or print them."""
        return self._seen()[0].stages

    @property
    def execution(self) -> str:
        """How the last step ran, in words: as one CUDA graph, or without one and why; in subgraphs, and why."""
        return self._seen()[0].execution

    def gradients(self) -> dict[str, Tensor]:
        """The last step's unscaled FP32 gradients by parameter name, before clipping; for logging.

        While batches are gathered, their sum so far divided by `accumulate`. Of several ranks it is their mean, but
        while batches are gathered.

        Raises:
            AmpError: before the first call, and where the update is split over ranks, none of which has a whole one.
        """
        program, output, scale = self._seen()
        if program.update.report.parts:
            raise AmpError("each rank has a part of the gradients only, as the update is split", hint=UNSPLIT)
        return {
            name: gradient.float() / (scale * self._divisor(program))
            for name, gradient in zip(program.update.report.updated, output.gradients, strict=True)
        }

    def nonfinite_report(self, *, cure: bool = True) -> NonfiniteReport:
        """Which gradients of the last step were not finite, the first nodes that made such values, and what fixes it.

        Until it is asked for, only flags are kept, on the device. This reads them, and where the step was skipped the
        loss is captured once more, and its forward and backward run node by node on the last batch; of a step in
        subgraphs, `amp.find_nonfinite` does so. Then they run with those nodes in FP32, with their neighbours where
        that is not enough, until all is finite. Nothing is changed.

        Args:
            cure: look for rules that cure it, for which the loss is captured a few times more.
        """
        program, output, scale = self._seen()
        flagged = zip(program.update.report.updated, _flags(output), strict=True)
        report = NonfiniteReport(tuple(name for name, flag in flagged if flag))
        skips = self._scale_config.checks_finite
        if report and not isinstance(program, StepProgram):
            report = replace(report, cure=_IN_SUBGRAPHS)
        elif report and skips and not self._without_batch:
            batch = pytree.tree_unflatten(self._leaves, self._spec)[0]
            try:
                again = self._trials(batch).report(scale, looks=False, cure=cure)
                why = "" if again else _AGAIN if self._setup.coordinator is None else _ELSEWHERE
                report = replace(again, parameters=report.parameters, results=(), cure=again.cure or why)
            except (AmpError, RuntimeError) as error:  # memory may not do; the parameters are known
                report = replace(report, cure=f"it was not run again: {first_line(error)}")
        if report and not report.nodes and (self._without_batch or skips) and self._setup.accumulate > 1:
            report = replace(report, cure=_GATHERED)
        if bool(output.loss.isfinite()):
            return report
        return replace(report, results=(LOSS,), cure=report.cure if report.parameters else _TRAINED)

    def nonfinite_events(self) -> tuple[NonfiniteEvent, ...]:
        """The last 16 steps that were skipped, the oldest first: number of the update, loss scale and parameters.

        They are kept on the device; only this reads them.
        """
        return self._state.events.read()

    def check(self) -> None:
        """Raise where the scale is at its floor and gradients stay non-finite. This reads from the device.

        Raises:
            LossScaleError: its `report` says what `nonfinite_report()` does, and so does its text.
        """
        if not bool(self._scale_config.stuck(self._scale)):
            return
        report = self.nonfinite_report()
        titles = [node.title for node in report.nodes]
        try:
            self._scale_config.check(self._scale, parameters=report.parameters, nodes=titles)
        except LossScaleError as error:
            error.add_report(report)
            raise

    def graph_for(self, *batch: Any) -> DryStep:
        """The graph of a step for a batch, which is neither compiled nor run; for reading, of any size.

        Model and batch may lie on torch's meta device. Weights are converted as the first call does it. Of several
        ranks nothing is sent, so that the others may be those of a fake process group.

        Args:
            batch: what stands behind `model` in `loss_fn`.

        Raises:
            CaptureError: the loss cannot be captured as one graph.

        Example:
            >>> import torch, amp_compiler as amp
            >>> model = torch.nn.Linear(4096, 4096, device="meta")
            >>> step = amp.training_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), 0.1),
            ...                          dtype="bf16")
            >>> graph = step.graph_for(torch.empty(8, 4096, device="meta")).graph_module.graph
            >>> sum(node.target is torch.ops.amp_compiler.sgd_update.default for node in graph.nodes)
            1
        """
        options, reduction = self._choice.options(""), self._setup.reduction
        if reduction is not None:  # all ranks are taken to have gradients of the same weights
            options = replace(options, reduction=reduction, divisor=self._setup.accumulate * reduction.ranks)
        with autocast_off(), building():
            step, weights, _ = begin_gradients(batch, options, Stages(), whole=True)
        traffic = None if reduction is None else traffic_of(step.graph, reduction.ranks, weights.updated)
        return DryStep(step, traffic)

    def _counting(self, batch: tuple[Any, ...], *, with_weights: bool = False) -> CountingProgram:
        """What counts exponents for batches like this one, see `diagnose.run` and `training.reporting.counting`."""
        with autocast_off(), building():
            return build_counting(batch, self._choice.options(""), with_weights=with_weights)

    def _trials(self, batch: tuple[Any, ...]) -> StepTrials:
        return StepTrials(batch, self._choice.options(""))

    def _autocast(self, batch: tuple[Any, ...]) -> AutocastTotals | None:
        """What `torch.autocast` would cast in the forward: the loss is captured once more, and nothing is changed."""
        setup = self._setup
        with autocast_off(), building(), generators_kept():
            captured = capture_once(setup.module, batch, torch_dtype(setup.low)).captured
            normalize(captured.graph_module, setup.settings, None, ROOT, setup.low)
        frozen = {name for name, parameter in setup.module.named_parameters() if not parameter.requires_grad}
        return autocast_totals(captured, setup.low, setup.device.type, frozen)

    @contextmanager
    def _in_fp32(self) -> Iterator[LossModule]:
        """Within it the loss as a module, all of its parameters in FP32, as it is captured."""
        module = self._setup.module
        module.adopt(self._setup.optimizers)
        with widened(module.parameters()):
            yield module


def _flags(output: StepOutput) -> list[int]:
    """Which gradients were not finite, in the order of the parameters."""
    if output.checked:
        return output.flags.tolist()
    return [int(not torch.isfinite(gradient.float()).all()) for gradient in output.gradients]
