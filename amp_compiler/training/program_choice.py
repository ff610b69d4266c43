"""`ProgramChoice`: what runs a batch: a program of the graph that Dynamo finds or makes of it, or subgraphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from amp_compiler.errors import BUG, AmpError, CaptureError, HookError, LoweringError, OptimizerError
from amp_compiler.forward.module_hooks import ModuleHooks
from amp_compiler.forward.notices import telling, warn_of_static
from amp_compiler.fx.capture.frontend import Frontend
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.synchronized_norms import joins_ranks
from amp_compiler.fx.torch_private.breaks import is_failed_assertion
from amp_compiler.fx.torch_private.dynamo import why_not_captured
from amp_compiler.fx.torch_private.runtime import saved_tensor_hooks
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.step.reduce_gradients import SharedGradient
from amp_compiler.ranks.coordinator import RankState, batch_form, settings_of
from amp_compiler.ranks.parts import UNSPLIT
from amp_compiler.ranks.reduction import Reduction
from amp_compiler.training.build import StepOptions, begin, build_step, converted_inputs
from amp_compiler.training.capture import NAME, CapturedLoss, around_capture, loss_frontend
from amp_compiler.training.change_detector import ChangeDetector
from amp_compiler.training.program import StepOutput, StepProgram
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.step_hooks import step_hooks
from amp_compiler.training.subgraphs.step import SubgraphStep
from amp_compiler.training.subgraphs.update import Made


class ProgramChoice:
    """Runs a batch: by a program of the graph that Dynamo finds or makes of it, or in subgraphs.

    Args:
        setup: what the step was asked for.
        detector: what has changed since the last call.

    Attributes:
        programs: what was built so far.
        subgraph_step: runs the step from now on, where a loss that is not one graph has run in subgraphs.
    """

    def __init__(self, setup: StepSetup, detector: ChangeDetector) -> None:
        self._setup, self._detector = setup, detector
        self._hooks, self._frontends = ModuleHooks(setup.module), dict[object, Frontend]()
        self.programs: dict[tuple[Any, ...], StepProgram] = {}  # by graph, and what they depend on beside it
        self._seconds = 0.0  # that captures took of which no build has told yet
        self._gather, self._leaves = "", list[Any]()
        self._ran: tuple[StepProgram, StepOutput] | None = None
        self._told: set[SubgraphStep] = set()
        self._apart: dict[str, SubgraphStep] = {}  # runs calls with something around them, by what that is
        self._flushing: SubgraphStep | None = None  # makes updates of what was gathered
        self.subgraph_step: SubgraphStep | None = None

    def run(
        self, batch: tuple[Any, ...], leaves: list[Any], gather: str
    ) -> tuple[StepProgram | SubgraphStep, StepOutput]:
        """Train on a batch.

        Args:
            batch: arguments of the loss function behind the model.
            leaves: the batch, flat.
            gather: as for `GatherGradients`.

        Raises:
            CaptureError: the loss cannot be captured, neither as one graph nor in subgraphs.
            LoweringError: the graph cannot be compiled.
            RankError: the ranks differ, or one failed.
        """
        self._gather, self._leaves, self._ran = gather, leaves, None
        step = self.subgraph_step or self._step_apart()
        if step is None:
            try:
                with torch.enable_grad():
                    loss, aux = self._frontend()(*batch)
            except (CaptureError, LoweringError) as error:
                agreed = self._setup.coordinator is not None and self._setup.coordinator.has_agreed
                if isinstance(error, (HookError, OptimizerError)) or agreed:
                    raise
                step = self._subgraph_step(error)
            except RuntimeError as error:
                if not is_failed_assertion(error) or self._setup.coordinator is not None:
                    raise
                step = self._subgraph_step(CaptureError(f"a size or number is another than captured: {error}"))
            else:
                return self._result(loss, aux)
        computed = self._computed(step, batch)
        return step, self._guarded(lambda: step.finish(computed))

    def flush(
        self, count: int, last: tuple[StepProgram | SubgraphStep, StepOutput] | None
    ) -> tuple[StepProgram, StepOutput] | None:
        """Update the weights by the gradients that were gathered, which are zero behind it.

        Args:
            count: of how many batches they are.
            last: what ran last and what it gave, whose loss and plan are told on.

        Returns:
            What has run, and what it gave; `None` where nothing was gathered.

        Raises:
            AmpError: a weight of which there are gradients is trained no more.
            RankError: the ranks differ, or one failed.
        """
        setup, sums = self._setup, self._setup.state.sums
        self._gather, self._leaves = f"step.flush() of {count}", []
        weights = self._gathered()
        self._flushing = self._flushing or SubgraphStep(setup, CaptureError("gathered gradients are used up"))
        gathered = {name: sums.get(one).clone() for name, one in weights.items()}  # which can be read behind it
        computed = Made(torch.zeros(()) if last is None else last[1].loss, None, gathered, {})
        options = self.options("", [])
        options = replace(options, divisor=options.divisor // setup.accumulate * count)
        if setup.coordinator is not None and options.reduction is not None:
            options = replace(options, reduction=replace(options.reduction, agree=Reduction.agree))
            computed = self._flushing.shared(computed, self._decide, "")
        if not count:
            return None
        with building():
            program = self._flushing.update_for(computed, options, self._detector.owners)
        plan, execution = (None, "") if last is None else (last[0].plan, last[0].execution)
        program.report = replace(program.report, plan=plan, execution=execution)
        output = self._guarded(lambda: program(computed.leaves()))
        sums.clear()
        return program, output

    def _gathered(self) -> dict[str, Tensor]:
        """The parameters that gradients of batches before were gathered of, by name.

        Raises:
            AmpError: one of them was frozen since.
        """
        gathered = self._setup.state.sums.gathered
        weights: dict[str, Tensor] = {
            name: one for name, one in self._setup.module.named_parameters() if id(one) in gathered
        }
        if frozen := next((name for name, one in weights.items() if not one.requires_grad), ""):
            raise AmpError(
                f"'{frozen.partition('.')[2]}' was frozen while batches with gradients of it were gathered"
                " (accumulate=)",
                hint="freeze it behind the last of the calls that are gathered, or behind step.flush()",
            )
        return weights

    def _decide(self, gradients: tuple[SharedGradient, ...], buffers: tuple[str, ...]) -> tuple[SharedGradient, ...]:
        """As for `SubgraphStep.shared`."""
        coordinator = self._setup.coordinator
        return gradients if coordinator is None else coordinator.decide(self._rank_state(gradients, buffers))

    def _step_apart(self) -> SubgraphStep | None:
        """What runs a call with something around it that one graph would lose; `None` where there is nothing."""
        cause = _why_apart(bool(step_hooks(self._setup.optimizers, "pre")))
        if cause is None:
            return None
        if cause.what not in self._apart:
            self._setup.module.adopt(self._setup.optimizers)
            self._apart[cause.what] = self._subgraph_step(cause)
        return self._apart[cause.what]

    def note(self, step: SubgraphStep) -> bool:
        """A call has run in subgraphs: those of a loss that is not one graph run the step from now on.

        Returns:
            Whether it is the first such call, of which people are told.
        """
        if step not in self._apart.values():
            self.subgraph_step = step
        known, self._told = self._told, {*self._told, step}
        return step not in known

    def _result(self, loss: Any, aux: Any) -> tuple[StepProgram, StepOutput]:
        if self._ran is None:
            why = why_not_captured(left_alone=True)
            hint = "call the step outside of it" if why else BUG
            raise CaptureError(f"the step ran no graph of the loss{why and f': {why}'}", hint=hint)
        (program, output), self._ran = self._ran, None
        aux = pytree.tree_map_only(Tensor, lambda one: one.detach() if one.requires_grad else one, aux)
        return program, replace(output, loss=loss, aux=aux)

    def _frontend(self) -> Frontend:
        hooks = self._hooks.key()
        known = self._frontends.get(hooks)
        if known is None:
            setup = self._setup
            self._setup.module.adopt(self._setup.optimizers)
            low = torch_dtype(setup.low) if setup.enabled else None
            known = loss_frontend(setup.module, self._made, low, setup.settings.dynamic, self._capturing)
            self._frontends[hooks] = known
        return known

    @contextmanager
    def _capturing(self) -> Iterator[None]:
        with around_capture(self._setup.module), telling(NAME) as course:
            yield
        self._seconds += course.seconds()

    def _made(self, loss: CapturedLoss) -> Callable[..., Any]:
        """What Dynamo calls in the place of a graph."""
        if self._setup.settings.dynamic and not loss.is_dynamic and self._setup.speaks:
            warn_of_static(NAME)
        graph = replace(loss, inputs=())  # which are a batch of the user's
        self._convert_weights(loss)
        if loss.is_dynamic and self._setup.coordinator is None:
            self._program(graph, loss.inputs)  # Dynamo guards a size that only one value of fits, while it captures
        return lambda *inputs: self._run_graph(graph, inputs)

    def _convert_weights(self, loss: CapturedLoss) -> None:
        """Convert the weights while Dynamo captures, which then guards them as they are from now on."""
        setup, coordinator = self._setup, self._setup.coordinator
        options = self.options(self._gather, self._leaves)
        splits = options.reduction is not None and options.reduction.shards
        if splits and coordinator is not None:
            coordinator.builds()
        if splits or setup.state.storage.low:
            begun, options = begin(loss, options, Stages())
            converted_inputs(begun, options)

    def _run_graph(self, graph: CapturedLoss, inputs: Sequence[Any]) -> list[Any]:
        if not graph.takes(inputs):
            self._detector.another()
        program = self._program(graph, inputs)
        output = self._guarded(lambda: program(inputs, self._detector))
        self._ran = program, output
        return graph.returned(output.results)

    def _guarded(self, run: Callable[[], StepOutput]) -> StepOutput:
        coordinator = self._setup.coordinator
        return run() if coordinator is None else coordinator.ranks.guarded(run)

    def _program(self, graph: CapturedLoss, inputs: Sequence[Any]) -> StepProgram:
        """The program of a graph for this call; a new one where there is none that all ranks have."""
        detector, gather, coordinator = self._detector, self._gather, self._setup.coordinator
        beside = (gather, self._setup.state.scale.config, self._gathered_before(gather))
        key = (graph, graph.trained, detector.owners, detector.hooked, *beside)
        program = self.programs.get(key)
        if program is None or program.flags_changed or not self._may_run(program):
            program = self.programs[key] = self._built(graph, inputs)
        if coordinator is not None:
            coordinator.settle(self._state_with(program), program.agreement.shared)
        return program

    def _built(self, graph: CapturedLoss, inputs: Sequence[Any]) -> StepProgram:
        stages, options = Stages(), self.options(self._gather, self._leaves)
        if self._setup.coordinator is not None:
            self._setup.coordinator.builds()
        with building(), telling(NAME, self._seconds) as course:
            self._seconds = 0.0
            course.stages, loss = stages, replace(graph, inputs=tuple(inputs))
            program = build_step(loss, options, stages)
            course.plan = program.plan
        stages.texts.clear()  # it would keep every graph that was made on the way
        self._detector.settle()
        return program

    def _gathered_before(self, gather: str) -> frozenset[int]:
        """Of which parameters the update that is built finds gradients of batches before its own."""
        return self._setup.state.sums.gathered if gather == "use" else frozenset()

    def _may_run(self, program: StepProgram) -> bool:
        """Whether the other ranks have what goes with a program."""
        coordinator = self._setup.coordinator
        return coordinator is None or coordinator.keeps(self._state_with(program), program.agreement.shared)

    def _state_with(self, program: StepProgram) -> RankState:
        agreement = program.agreement
        return self._rank_state(agreement.offered, agreement.written, agreement.norms)

    def _rank_state(
        self, gradients: tuple[SharedGradient, ...], buffers: tuple[str, ...], norms: tuple[str, ...] = ()
    ) -> RankState:
        """What this rank has at this call."""
        coordinator, reduction, state = self._setup.coordinator, self._setup.reduction, self._setup.state
        shown = buffers if reduction is not None and reduction.broadcast_buffers else ()
        settings = settings_of(self._setup.optimizers)
        held = () if coordinator is None else coordinator.values.parameters
        batch = batch_form(self._leaves, state.samples is not None)
        return RankState(gradients, shown, batch, self._gather, settings, state.parts.names, norms, held)

    def _computed(self, step: SubgraphStep, batch: tuple[Any, ...]) -> Made:
        """What forward and backward give in subgraphs; with several ranks, of all that any of them has."""
        options = self.options(self._gather, self._leaves)
        if options.reduction is None:
            return step.prepare(batch, options, self._detector.owners)
        if norms := joins_ranks(self._setup.module):
            raise CaptureError(
                f"a step in subgraphs cannot take the statistics of the SyncBatchNorm '{norms[0].partition('.')[2]}'"
                f" over the ranks, and this one is not one graph: {step.cause}",
                hint="do what that says, or use BatchNorm with broadcast_buffers=",
            ) from step.cause

        reduction = replace(options.reduction, agree=Reduction.agree)  # of the update: all is there then
        options = replace(options, reduction=reduction)
        return step.prepare(batch, options, self._detector.owners, self._decide)

    def _subgraph_step(self, cause: AmpError) -> SubgraphStep:
        setup = self._setup
        if setup.reduction is not None and setup.reduction.shards:
            raise CaptureError(
                f"a step in subgraphs cannot split its update over the ranks, and this one is not one graph: {cause}",
                hint=UNSPLIT,
            ) from cause
        return SubgraphStep(setup, cause)

    def options(self, gather: str, leaves: list[Any] | None = None) -> StepOptions:
        """What a program is built for.

        Args:
            gather: as for `GatherGradients`.
            leaves: a batch for which the ranks sum their gradients; without one, this process is by itself.
        """
        setup = self._setup
        if gather == "use":
            self._gathered()
        options = StepOptions(
            setup,
            setup.state.scale.config,
            setup.accumulate,
            gather,
            gathered=self._gathered_before(gather),
            weighs=leaves is not None and setup.state.samples is not None,
        )
        coordinator, reduction = setup.coordinator, setup.reduction
        if coordinator is None or reduction is None or leaves is None:
            return options

        def agree(gradients: Any, norms: tuple[str, ...], buffers: tuple[str, ...]) -> tuple[SharedGradient, ...]:
            return coordinator.agree(self._rank_state(gradients, buffers, norms))

        reduction = replace(reduction, agree=agree, agree_on_parts=coordinator.agree_on_parts)
        ranks = 1 if gather == "add" else reduction.ranks
        return replace(options, divisor=setup.accumulate * ranks, reduction=reduction)


def _why_apart(hooked: bool) -> CaptureError | None:
    """What around the step one graph would lose; `None` where there is nothing."""
    reason = why_not_captured()
    if reason:
        return CaptureError(f"{reason}, under which Dynamo captures nothing", hint="call the step without it")
    if saved_tensor_hooks() is not None:
        return CaptureError(
            "hooks for saved tensors stand around the step (saved_tensors_hooks, save_on_cpu), which the backward"
            " of one graph would lose",
            hint="leave them out: a step keeps no more than it needs",
        )
    if hooked:
        return CaptureError(
            "an optimizer has hooks that run before its steps, for which gradients have to stand in `.grad`",
            hint="write what they do to the loss, clip by clip_norm=, and read step.gradients()",
        )
    return None
