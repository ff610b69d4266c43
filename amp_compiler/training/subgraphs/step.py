"""A training step in subgraphs: forward and backward in the graphs that Dynamo makes, the update as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from amp_compiler.errors import AmpError, CaptureError, DoubleBackwardError, first_line, with_causes
from amp_compiler.forward.subgraphs import Subgraph, Subgraphs, plan_of, stages_of
from amp_compiler.fx.capture.errors import RETURN_THE_LOSS, name_of, user_frame
from amp_compiler.fx.capture.generators import random_state, set_random_state
from amp_compiler.fx.capture.retrace import placeholder_name
from amp_compiler.fx.captured import Source
from amp_compiler.fx.torch_private.breaks import needs_double_backward
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.layout import as_real, empty_laid_out_like, is_laid_out_like
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.step.reduce_gradients import SharedGradient
from amp_compiler.training.build import StepOptions, finish
from amp_compiler.training.inputs import depends_on_nothing
from amp_compiler.training.loss_module import ROOT, LossModule
from amp_compiler.training.program import StepOutput, StepProgram
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.step_hooks import step_hooks, with_hooks
from amp_compiler.training.subgraphs.buffers import WrittenBuffers
from amp_compiler.training.subgraphs.update import Made, update_graph
from amp_compiler.training.weights import is_stored_low, widened

Decide = Callable[[tuple[SharedGradient, ...], tuple[str, ...]], tuple[SharedGradient, ...]]


class SubgraphStep:
    """Runs a loss that is not one graph; behind a call, it tells of it what a `StepProgram` tells of itself.

    Forward and backward run in the subgraphs that Dynamo gives, each planned and rewritten, with autograd between them.
    Then one graph checks the gradients and updates the weights, as in a step that is one graph.

    Args:
        setup: what the step was asked for, and holds; without mixed precision the loss runs as it is written.
        cause: why it could not be taken as one graph.

    Attributes:
        update: the program of the last call's update.
    """

    update: StepProgram

    def __init__(self, setup: StepSetup, cause: AmpError) -> None:
        self.model, self.state, self.cause = setup.module, setup.state, cause
        for one in with_causes(cause):
            one.__traceback__ = None  # its frames hold the first batch and its gradients
            vars(one).pop("_torch_dynamo_tracer_output", None)  # refers to parameters: none is swapped
        self._settings, self._device = setup.settings, setup.device
        self.subgraphs = self._new_subgraphs() if setup.enabled else None
        self._updates: dict[Any, StepProgram] = {}
        self._buffers = WrittenBuffers(self.model)

    def _new_subgraphs(self) -> Subgraphs:
        return Subgraphs(self.model, self._settings, name_of(self.model), root=ROOT)

    def prepare(self, batch: tuple[Any, ...], options: StepOptions, owners: Any, decide: Decide | None = None) -> Made:
        """Run forward and backward, and have the update's program ready.

        Args:
            batch: arguments of the loss function behind the model.
            options: what to build an update for.
            owners: which parameters stand in which group of which optimizer.
            decide: gives what all ranks have a gradient of, see `shared`; `None` for one process.

        Raises:
            CaptureError: Dynamo can take none of it, or the loss depends on no parameter of the optimizers.
            LoweringError: a subgraph, or the update, cannot be compiled.
        """
        computed = self.hooked(self.forward_and_backward(batch, options.setup.optimizers), options)
        computed = self.completed(computed, options.gather)
        if decide is not None:
            computed = self.shared(computed, decide, options.gather)
        with building():
            self.update = self.update_for(computed, options, owners)
        return computed

    def finish(self, computed: Made) -> StepOutput:
        """Run the update.

        Args:
            computed: what `prepare` gave.
        """
        output = self.update(computed.leaves())
        return replace(output, loss=computed.loss, aux=computed.aux)

    @property
    def plan(self) -> PrecisionPlan | None:
        """The plans of all subgraphs of the last call together; `None` where there is none."""
        subgraphs = self._ran()
        return replace(plan_of(subgraphs), notes=self.update.report.notes) if subgraphs else None

    def _ran(self) -> tuple[Subgraph, ...]:
        """The subgraphs of the last call."""
        return () if self.subgraphs is None or self.subgraphs.without else self.subgraphs.last

    @property
    def stages(self) -> Stages:
        """The text of every subgraph, and of the update, behind each pass."""
        stages = Stages()
        for stage in [*stages_of(self._ran()), *self.update.stages]:
            stages.note(stage.name, stage.text)
        return stages

    @property
    def execution(self) -> str:
        """How the last call ran and why, in words."""
        subgraphs, cause = self.subgraphs, self.cause
        if subgraphs is None:
            how = "as they are written, in FP32"
        else:
            how = subgraphs.without or f"in {len(subgraphs.last)} subgraph{'s' * (len(subgraphs.last) > 1)}"
        where = f" ({cause.where})" if cause.where else ""
        kept = self.state.storage.low and any(one.dtype is torch.float32 for one in self.model.parameters())
        weights = ", with FP32 weights, as master: low is for one graph" if kept else ""
        return f"forward and backward {how}, the update as one graph{weights}, because: {cause.what}{where}"

    def forward_and_backward(self, batch: tuple[Any, ...], optimizers: Sequence[torch.optim.Optimizer]) -> Made:
        """Run them; parameters and buffers are as they were before.

        Raises:
            AmpError: what the model's own code raised, or Dynamo, or a backend.
        """
        drawn = random_state(self._device)
        try:
            return self._run(batch, optimizers)
        except Exception as error:  # the model's own code may raise anything
            if self.cause.hint == RETURN_THE_LOSS:
                raise self.cause from error
            twice = isinstance(error, DoubleBackwardError) or needs_double_backward(error)
            if twice and self._settings.runs_on.compiled:
                self._settings = replace(self._settings, backend="eager")  # which autograd goes through itself
                self.subgraphs = self._new_subgraphs()
                set_random_state(self._device, drawn)
                return self.forward_and_backward(batch, optimizers)
            if isinstance(error, AmpError):
                raise
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> AmpError:
        return CaptureError(
            f"the step failed in subgraphs: {type(error).__name__}: {first_line(error)}; and as one graph: "
            f"{self.cause.what}",
            where=user_frame(error),
            hint="see the error that this one comes from"
            + ("; loss_fn is called as loss_fn(model, *batch)" if isinstance(error, TypeError) else ""),
        )

    def _run(self, batch: tuple[Any, ...], optimizers: Sequence[torch.optim.Optimizer]) -> Made:
        samples, scale = self.state.samples, self.state.scale.state.scale
        scale = scale if samples is None else scale * samples.weight
        with (
            torch.enable_grad(),
            torch.autograd.set_detect_anomaly(False),  # a step that is not finite is skipped, as that of one graph is
            self._buffers.watched() as take_written,
            _without_gradients(self.model),
            widened(self.model.parameters()),
        ):
            with _without_steps(optimizers):
                loss, aux = self.model(*batch) if self.subgraphs is None else self.subgraphs(batch, {})
            if any(parameter.grad is not None for parameter in self.model.parameters()):
                raise _updates_itself("runs a backward itself")
            if not loss.requires_grad:
                raise depends_on_nothing()
            loss.backward(scale.to(loss.dtype).expand(loss.shape))
            trained = _trained(self.model, optimizers)
            gradients = {name: _fitted(p.grad, p) for name, p in trained.items() if p.grad is not None}
            if not gradients:
                raise depends_on_nothing()
            written = take_written()
        aux = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, aux)
        return Made(loss.detach(), aux, gradients, written)

    def hooked(self, computed: Made, options: StepOptions) -> Made:
        """As the hooks before the update leave it; of a step that is skipped, they are not run.

        Args:
            computed: of this batch.
            options: what the update is built for.
        """
        hooks = step_hooks(options.setup.optimizers, "pre")
        if not hooks:
            return computed
        parameters, scale = dict(self.model.named_parameters()), self.state.scale.state.scale
        finite = (torch.isfinite(one).all() for one in computed.gradients.values())
        if options.scale.checks_finite and not all(map(bool, finite)):
            return computed
        with torch.no_grad():
            unscaled = {
                name: _like_parameter(one.to(torch.promote_types(one.dtype, torch.float32)) / scale, parameters[name])
                for name, one in computed.gradients.items()
            }
            left = with_hooks(hooks, parameters, unscaled)
            return replace(computed, gradients={name: as_real(one) * scale for name, one in left.items()})

    def completed(self, computed: Made, gather: str) -> Made:
        """With zeros for the parameters that only batches before this one have a gradient of, where these are used up.

        Args:
            computed: of this batch.
            gather: as for `FuseUpdate`.
        """
        if gather != "use":
            return computed
        gathered = self.state.sums.gathered
        types = {
            name: torch.float32 if is_stored_low(parameter) else as_real(parameter.detach()).dtype
            for name, parameter in self.model.named_parameters()
            if name in computed.gradients or id(parameter) in gathered
        }
        return self._with_zeros(computed, types)

    def shared(self, computed: Made, decide: Decide, gather: str) -> Made:
        """With zeros for what other ranks have a gradient of, and this one does not.

        Args:
            computed: of this rank.
            decide: gives what all ranks have, by what this one has and the buffers that it writes.
            gather: as for `GatherGradients`.
        """
        named = {placeholder_name(Source.PARAMETER, name): name for name, _ in self.model.named_parameters()}
        own = [
            SharedGradient(placeholder_name(Source.PARAMETER, name), one.dtype, tuple(range(one.dim())))
            for name, one in computed.gradients.items()
        ]
        agreed = decide(tuple(own), tuple(computed.buffers))
        if gather == "add":
            return computed
        return self._with_zeros(computed, {named[one.name]: one.dtype for one in agreed})

    def _with_zeros(self, computed: Made, types: Mapping[str, torch.dtype]) -> Made:
        """With a gradient for each of these parameters, in this order."""
        parameters, known = dict(self.model.named_parameters()), computed.gradients
        missing = {
            name: torch.zeros_like(as_real(parameters[name].detach()), dtype=dtype)
            for name, dtype in types.items()
            if name not in known
        }
        return replace(computed, gradients={name: known[name] if name in known else missing[name] for name in types})

    def update_for(self, computed: Made, options: StepOptions, owners: Any) -> StepProgram:
        """The program of the update: one for each set of parameters with a gradient."""
        types = tuple((name, gradient.dtype) for name, gradient in computed.gradients.items())
        key = (owners, options.gather, options.divisor, options.scale, types, tuple(computed.buffers))
        program = self._updates.get(key)
        if program is None or program.flags_changed:
            begun = update_graph(self.model, computed)
            program = self._updates[key] = finish(begun, options)
        return program


def _like_parameter(gradient: Tensor, parameter: Tensor) -> Tensor:
    return torch.view_as_complex(gradient) if parameter.is_complex() else gradient.to(parameter.dtype)


def _trained(model: LossModule, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Tensor]:
    owned = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) in owned}


@contextmanager
def _without_gradients(model: torch.nn.Module) -> Iterator[None]:
    """Within it no parameter has a gradient; behind it each has the one that the user left there."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextmanager
def _without_steps(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """Within it a step of one of these optimizers is refused before it changes anything."""

    def refuse(*_: Any) -> None:
        raise _updates_itself("calls the step() of its optimizer")

    handles = [optimizer.register_step_pre_hook(refuse) for optimizer in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _updates_itself(what: str) -> CaptureError:
    return CaptureError(f"the loss function {what}", hint=RETURN_THE_LOSS)


def _fitted(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient as an update reads it: dense and real, in the layout of its parameter."""
    gradient, parameter = gradient.detach(), as_real(parameter.detach())
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    gradient = as_real(gradient)
    if is_laid_out_like(gradient, parameter):
        return gradient
    return empty_laid_out_like(parameter, gradient.dtype).copy_(gradient)
