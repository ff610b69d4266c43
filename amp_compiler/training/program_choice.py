"""`ProgramChoice`: what runs a batch: the last program, one of a batch like this one, a new one, or pieces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from amp_compiler.errors import AmpError, CaptureError, HookError, LoweringError, OptimizerError, UnknownFormError
from amp_compiler.forward.captures import Captures
from amp_compiler.forward.settings import AUTO
from amp_compiler.forward.signature import leaves_key
from amp_compiler.fx.capture_errors import shapes_do_not_fit
from amp_compiler.fx.synchronized_norms import joins_ranks
from amp_compiler.fx.torch_private import TENSORS, building, saved_tensor_hooks
from amp_compiler.passes.step.reduce_gradients import SharedGradient
from amp_compiler.ranks.coordinator import RankState, batch_form, settings_of
from amp_compiler.ranks.parts import UNSPLIT
from amp_compiler.ranks.reduction import Reduction
from amp_compiler.training.build import StepOptions, build_step, is_one_graph
from amp_compiler.training.change_detector import ChangeDetector
from amp_compiler.training.piece_program import PieceProgram
from amp_compiler.training.pieces import PieceStep
from amp_compiler.training.program import StepProgram
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.step_programs import StepPrograms

MOST_SIGNATURES = 64


class ProgramChoice:
    """Finds or builds the program of a batch, in agreement with the other ranks where there are any.

    Args:
        setup: what the step was asked for.
        detector: what has changed since the last call.

    Attributes:
        programs: what was built so far.
        pieces: runs the step from now on, where one call has run in pieces.
    """

    def __init__(self, setup: StepSetup, detector: ChangeDetector) -> None:
        self._setup, self._detector = setup, detector
        self._captures = Captures("the training step", setup.settings, "batch")
        self.programs = StepPrograms(setup.settings.dynamic_shapes is not None)
        self.pieces: PieceStep | None = None

    def program(
        self, batch: tuple[Any, ...], leaves: list[Any], spec: Any, gather: str, hooked: bool
    ) -> StepProgram | PieceProgram:
        """What runs a batch.

        Args:
            batch: arguments of the loss function behind the model.
            leaves: the batch, flat.
            spec: its tree.
            gather: as for `GatherGradients`.
            hooked: whether an optimizer has hooks that run before its steps.

        Raises:
            CaptureError: the loss cannot be captured, neither as one graph nor in pieces.
            LoweringError: the graph cannot be compiled.
            RankError: the ranks differ, or one failed.
        """
        around = _why_in_pieces(hooked) if self.pieces is None else None
        if around is not None:
            return self._piece_program(self._in_pieces(around), spec, gather, leaves)
        if self.pieces is not None:
            return self._piece_program(self.pieces, spec, gather, leaves)
        detector, built_for = self._detector, (self._setup.scale.config, self._gathered_before(gather))
        mark = (detector.generation, gather, *built_for, spec)
        again = self.programs.again(mark, leaves)
        if again is not None and again.flags_changed(detector):
            again = None
        if again is not None and self._may_run(again, leaves, gather):
            return again
        try:
            with TENSORS:
                form = leaves_key(leaves)
        except UnknownFormError as cause:  # of a dataclass, an array: Dynamo looks into them
            return self._piece_program(self._in_pieces(cause), spec, gather, leaves)
        key = (spec, detector.module, detector.owners, gather, built_for, form)
        program = self.programs.find(key, leaves)
        whole = program is not None and not program.flags_changed(detector)
        # The other ranks are asked once: what was found again is the one that is found here.
        if program is not None and whole and again is None and self._may_run(program, leaves, gather):
            self.programs.remember(mark, leaves, program)
            return program
        return self._captured(batch, leaves, key, program)

    def _captured(
        self, batch: tuple[Any, ...], leaves: list[Any], key: tuple[Any, ...], stale: StepProgram | None
    ) -> StepProgram | PieceProgram:
        """A new program, or pieces where no graph takes the step.

        Args:
            batch: what is captured.
            leaves: of it.
            key: what the program is found by, as `program` makes it.
            stale: the one that was found by it and is to be replaced.
        """
        setup, coordinator = self._setup, self._setup.coordinator
        spec, gather = key[0], key[3]
        if stale is None and len(self.programs) >= MOST_SIGNATURES:
            many = CaptureError(
                f"the step was captured for {MOST_SIGNATURES} signatures (shapes and types of the batch, model modes, "
                "Python values that loss and model read)",
                hint="pad the batches to fewer shapes, and pass numbers that change as tensors",
            )
            if coordinator is not None:
                raise many
            return self._piece_program(self._in_pieces(many), spec, gather, leaves)
        options = self.options(gather, leaves)
        if coordinator is not None:
            coordinator.builds()
        try:
            with building():
                program = self._captures.make(
                    key[:-1],
                    (batch, {}),
                    leaves,
                    lambda settings, stages, changing: build_step(
                        setup.module, batch, replace(options, settings=settings, changing=changing), setup.state, stages
                    ),
                    self.programs.changed(),
                )
        except (CaptureError, LoweringError) as cause:
            if isinstance(cause, (HookError, OptimizerError)) or (coordinator is not None and coordinator.has_agreed):
                raise
            asked_for = setup.settings.dynamic_shapes not in (None, AUTO)
            if asked_for and isinstance(cause, CaptureError) and is_one_graph(setup.module, batch):
                raise shapes_do_not_fit("the step", cause) from cause
            return self._piece_program(self._in_pieces(cause), spec, gather, leaves)
        self._keep(program, leaves, key, stale)
        return program

    def _keep(self, program: StepProgram, leaves: list[Any], key: tuple[Any, ...], stale: StepProgram | None) -> None:
        """Have a new program found again, and the ranks know what goes with it."""
        self._detector.begin()
        spec, before, *rest = key
        now = self._detector.module
        if now != before:  # weights were converted for storage without masters: earlier programs will never fit again
            self.programs.clear()
        if stale is not None:  # one of dynamic shapes stands under another shape
            self.programs.drop(stale)
        self.programs.add((spec, now, *rest), program, leaves)
        if self._setup.coordinator is not None:
            self._setup.coordinator.settle(self._state_with(program, leaves, key[3]), program.agreement.shared)

    def _gathered_before(self, gather: str) -> frozenset[int]:
        """Of which parameters the update that is built finds gradients of batches before its own."""
        return self._setup.state.kept.sums.gathered if gather == "use" else frozenset()

    def _may_run(self, program: StepProgram, leaves: list[Any], gather: str) -> bool:
        """Whether the other ranks have what goes with a program."""
        coordinator = self._setup.coordinator
        if coordinator is None:
            return True
        state = self._state_with(program, leaves, gather)
        if not coordinator.keeps(state, program.agreement.shared):
            return False
        coordinator.settle(state, program.agreement.shared)
        return True

    def _state_with(self, program: StepProgram, leaves: list[Any], gather: str) -> RankState:
        agreement = program.agreement
        return self._rank_state(agreement.offered, agreement.written, leaves, gather, agreement.norms)

    def _rank_state(
        self,
        gradients: tuple[SharedGradient, ...],
        buffers: tuple[str, ...],
        leaves: list[Any],
        gather: str,
        norms: tuple[str, ...] = (),
    ) -> RankState:
        coordinator, reduction = self._setup.coordinator, self._setup.reduction
        shown = buffers if reduction is not None and reduction.broadcast_buffers else ()
        settings = settings_of(self._setup.optimizers)
        held = () if coordinator is None else coordinator.values.parameters
        parts = self._setup.state.kept.weights.parts.names
        return RankState(gradients, shown, batch_form(leaves), gather, settings, parts, norms, held)

    def _piece_program(self, step: PieceStep, spec: Any, gather: str, leaves: list[Any]) -> PieceProgram:
        options, coordinator = self.options(gather, leaves), self._setup.coordinator
        if coordinator is None or options.reduction is None:
            return PieceProgram(step, spec, options, self._detector.owners)
        if norms := joins_ranks(self._setup.module):
            raise CaptureError(
                f"a step in pieces cannot take the statistics of the SyncBatchNorm '{norms[0].partition('.')[2]}' over"
                f" the ranks, and this one is no one graph: {step.cause}",
                hint="do what that says, or use BatchNorm with broadcast_buffers=",
            ) from step.cause

        def decide(gradients: tuple[SharedGradient, ...], buffers: tuple[str, ...]) -> tuple[SharedGradient, ...]:
            return coordinator.decide(self._rank_state(gradients, buffers, leaves, gather))

        reduction = replace(options.reduction, agree=Reduction.agree)  # of the update: all is there then
        options = replace(options, reduction=reduction)
        program = PieceProgram(step, spec, options, self._detector.owners, decide)
        program.prepare(leaves)
        return program

    def _in_pieces(self, cause: AmpError) -> PieceStep:
        setup = self._setup
        if setup.reduction is not None and setup.reduction.shards:
            raise CaptureError(
                f"a step in pieces cannot split its update over the ranks, and this one is no one graph: {cause}",
                hint=UNSPLIT,
            ) from cause
        return PieceStep(setup.module, setup.settings, cause, setup.state, setup.enabled)

    def options(self, gather: str, leaves: list[Any] | None = None) -> StepOptions:
        """What a program is built for.

        Args:
            gather: as for `GatherGradients`.
            leaves: a batch for which the ranks sum their gradients; without one, this process is by itself.
        """
        setup = self._setup
        options = StepOptions(
            setup.settings,
            setup.optimizers,
            setup.scale.config,
            setup.clip_norm,
            setup.enabled,
            setup.accumulate,
            gather,
            gathered=self._gathered_before(gather),
        )
        coordinator, reduction = setup.coordinator, setup.reduction
        if coordinator is None or reduction is None or leaves is None:
            return options

        def agree(
            gradients: tuple[SharedGradient, ...], norms: tuple[str, ...], buffers: tuple[str, ...]
        ) -> tuple[SharedGradient, ...]:
            return coordinator.agree(self._rank_state(gradients, buffers, leaves, gather, norms))

        reduction = replace(reduction, agree=agree, agree_on_parts=coordinator.agree_on_parts)
        ranks = 1 if gather == "add" else reduction.ranks
        return replace(options, divisor=setup.accumulate * ranks, reduction=reduction)


def _why_in_pieces(hooked: bool) -> CaptureError | None:
    """What around the step one graph would lose; `None` where there is nothing."""
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
