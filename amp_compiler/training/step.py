"""`TrainingStep`: forward, backward, check, clipping, update and 16-bit weights as one graph."""

from __future__ import annotations

import html
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic

import torch
import torch.utils._pytree as pytree
from torch.optim import Optimizer
from typing_extensions import TypeVar

from amp_compiler.errors import AmpError
from amp_compiler.forward.notices import silent
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.torch_private.dynamo import compiles_itself
from amp_compiler.fx.torch_private.tracing import TENSORS
from amp_compiler.policy.unused import warn_of_unused
from amp_compiler.ranks.coordinator import FLUSHING
from amp_compiler.ranks.group import ranks_of
from amp_compiler.training.arguments import check_call
from amp_compiler.training.change_detector import ChangeDetector
from amp_compiler.training.hidden_writes import HiddenWrites
from amp_compiler.training.program import StepOutput, StepProgram
from amp_compiler.training.program_choice import ProgramChoice
from amp_compiler.training.reporting.log import STEPS_KEY, StepLog
from amp_compiler.training.reporting.readings import StepReadings
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.step_hooks import check_hooks, run_behind, step_hooks
from amp_compiler.training.subgraphs.step import SubgraphStep
from amp_compiler.training.weights import OWN_KEY

logger = logging.getLogger("amp_compiler")


def _refuse_backward(*args: Any, **kwargs: Any) -> None:
    raise AmpError("the step has already updated the weights: its loss has no backward", hint="leave out backward(),"
                   " optimizer.step() and zero_grad(); a loop of your own takes amp.compile(model)")  # fmt: skip


# Attributes of the loss, which is saved without them: a checkpoint that holds it names no function of ours.
_SPENT: dict[str, Any] = {"backward": _refuse_backward, "__getstate__": lambda: None}
_Loss = TypeVar("_Loss", default=Any)  # what the loss function returns


class TrainingStep(StepReadings, Generic[_Loss]):
    """What `amp.training_step` returns: `loss = step(*batch)` trains on one batch.

    Attributes:
        model: the model that is trained, as it was given.

    Example:
        >>> step = amp.training_step(model, loss_fn, optimizer, dtype="fp16")
        >>> loss = step(x, y)
        >>> step.skipped_steps, step.plan.low_nodes
    """

    def __init__(self, setup: StepSetup, callbacks: Any = ()) -> None:
        self._detector = ChangeDetector(setup.module, setup.optimizers, setup.state)
        super().__init__(setup, ProgramChoice(setup, self._detector))
        self.model, self._module, self._settings = setup.model, setup.module, setup.settings
        self._low, self._accumulate, self._coordinator = setup.low, setup.accumulate, setup.coordinator
        self._hidden = HiddenWrites(self._module, self._optimizers, self._state)
        self._log = StepLog(callbacks if setup.speaks else (), self._low.short)
        self._keeps_parts = False  # between two calls, of the gradients that are split over the ranks
        self._warned = self._told_of_anomalies = False  # of rules that match nothing; that anomaly mode sees nothing

    @compiles_itself
    def __call__(self, *batch: Any, **named: Any) -> _Loss:
        """Train on one batch.

        Args:
            batch: what stands behind `model` in `loss_fn`.
            named: refused; a batch may be a dict.

        Returns:
            The detached loss, or `(loss, aux)`.

        Raises:
            AmpError: there are named arguments; `torch.inference_mode()`, a tracer or `torch.func` is around the call.
            CaptureError: the loss cannot be captured, neither as one graph nor in subgraphs.
            LoweringError: the graph cannot be compiled.
            LossScaleError: the gradients stay non-finite at the lowest loss scale; on a GPU some calls later.
        """
        check_call(batch, named)
        if self._last is None and self._coordinator is None:
            ranks_of(self._setup.group)
        hooks, skipped = self._hooks_behind()
        with autocast_off(), silent(not self._setup.speaks), self._with_ranks():
            program, output, leaves, spec = self._run(batch)
        self._note(program, output, leaves, spec)
        if self._gathered == 0:
            self._behind_update(hooks, skipped)
        vars(output.loss).update(_SPENT)
        result: Any = output.loss if output.aux is None else (output.loss, output.aux)
        return result  # type: ignore[no-any-return]

    @compiles_itself
    def flush(self) -> None:
        """Update the weights by what was gathered where that is less than `accumulate` batches: behind an epoch's last.

        The gradients are averaged over the batches that were gathered. Where there is none nothing is done.

        Several ranks call it together, and average over the batches of all of them.

        Raises:
            AmpError: a weight was frozen since.
            RankError: the ranks gathered other numbers of batches, or one of them does not call it.
        """
        hooks, skipped = self._hooks_behind()
        with autocast_off(), silent(not self._setup.speaks), self._with_ranks():
            if self._coordinator is not None:
                self._coordinator.join(FLUSHING)
            ran = self._flushed() if self._gathered or self._coordinator is not None else None
        if ran is None:
            return
        self._gathered = self._accumulate - 1  # as if all were there
        self._note(*ran, self._leaves, self._spec, batch=False)
        self._behind_update(hooks, skipped)

    def update_next(self) -> None:
        """Let the next call update the weights, however few calls of `accumulate` were gathered (as an epoch ends).

        Gradients are averaged over `accumulate` calls as ever: scale the losses where fewer are to count in full.
        """
        self._gathered = self._accumulate - 1

    def _with_ranks(self) -> AbstractContextManager[None]:
        return nullcontext() if self._coordinator is None else self._coordinator.call()

    def _flushed(self) -> tuple[StepProgram, StepOutput] | None:
        self._look()
        if self._coordinator is not None:
            self._coordinator.look(self._detector.generation)
        samples = self._state.samples
        if samples is not None:
            samples.flush()
        return self._choice.flush(self._gathered, None if self._last is None else self._last[:2])

    def _hooks_behind(self) -> tuple[list[tuple[Optimizer, Any]], int]:
        """The hooks behind the update of a call, and the number of steps skipped so far, for which they wait."""
        hooks = step_hooks(self._optimizers, "post")
        return hooks, int(self._scale.skipped_steps) if hooks else 0

    def _behind_update(self, hooks: list[tuple[Optimizer, Any]], skipped: int) -> None:
        if hooks and int(self._scale.skipped_steps) == skipped:  # as under `GradScaler`
            run_behind(hooks)
        if self._watch.see(self._scale_config, self._scale):
            self.check()

    def _note(
        self,
        program: StepProgram | SubgraphStep,
        output: StepOutput,
        leaves: list[Any],
        spec: Any,
        batch: bool = True,
    ) -> None:
        """What a call has changed, and what others want to know of it."""
        self._detector.left()
        if self._coordinator is not None:
            self._coordinator.values.left()
        # Only now: a call that failed decides nothing.
        if isinstance(program, SubgraphStep) and self._choice.note(program) and self._setup.speaks:
            logger.warning("the training step runs %s", program.execution)
        if torch.is_anomaly_enabled() and not self._told_of_anomalies:
            self._told_of_anomalies = True
            logger.warning(
                "anomaly mode sees nothing of the training step, which skips what is not finite:"
                " step.nonfinite_report() names the node that made an inf or NaN"
            )
        self._gathered = (self._gathered + 1) % self._accumulate
        state = self._state
        if self._gathered == 0:
            self._hidden.note(program.update.compiled.groups)
        if program.update.found_anew or program.update.settled != state.low_weights.generation:
            program.update.settle(state.low_weights)
        if self._gathered:
            state.sums.note(program.update.trained)
        else:
            state.sums.gathered = frozenset()
        for parameter in program.update.behind:
            state.low_weights.follow(parameter)
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether a step came before theirs
        if not self._warned and program.plan is not None:
            self._warned = True
            if self._setup.speaks:
                warn_of_unused(program.plan.unused_rules, "the training step")
        if state.samples is not None:
            state.samples.left()
        self._last = (program, output, self._scale_config.constant)
        self._leaves, self._spec, self._without_batch = leaves, spec, not batch
        updated, skipped = self._gathered == 0, self._scale.skipped_steps
        self._log.note(output, updated, lambda: self._seen()[2], skipped, lambda: self.grad_norm, batch)
        if not self._keeps_parts:
            output.gradients = output.gradients[program.update.report.parts :]

    def _run(self, batch: tuple[Any, ...]) -> tuple[StepProgram | SubgraphStep, StepOutput, list[Any], Any]:
        """Train on a batch: what has run, what it gave, and the batch's leaves and tree."""
        if self._watch.arrived() and self._last is not None:
            self.check()
        check_hooks(self._optimizers, self._setup.between)
        leaves, spec = pytree.tree_flatten((batch, {}))
        self._look()
        if self._coordinator is not None:
            self._coordinator.look(self._detector.generation)
        if self._state.samples is not None:
            self._state.samples.begin(leaves, first=self._gathered == 0)
        gather = "" if self._accumulate == 1 else "use" if self._gathered == self._accumulate - 1 else "add"
        self._last = None  # last step's gradients must not live through this one
        program, output = self._choice.run(batch, leaves, gather)
        return program, output, leaves, spec

    def _look(self) -> None:
        """Notice what was changed and written since the last call."""
        with TENSORS:
            self._detector.look()
            if self._hidden.look(self._detector.generation):
                self._detector.look()

    @property
    def __name__(self) -> str:
        # Tools name what they are given: torch.jit.trace does so before it calls the step, which then says why not.
        return "TrainingStep"

    def __repr__(self) -> str:
        names = ", ".join(type(one).__name__ for one in (self.model, *self._optimizers))
        last = "not called yet" if self._last is None else self.execution
        return f"TrainingStep({names}, {self._low.short}, {last})"

    def _repr_html_(self) -> str:
        plan = "" if self._last is None or self.plan is None else self.plan._repr_html_()  # type: ignore[attr-defined]
        return f"<p><code>{html.escape(repr(self))}</code></p>{plan}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AmpError(
            "a training step can be neither copied nor pickled, as it holds compiled code and the optimizer itself",
            hint="save model, optimizer and step.state_dict(), or use amp.save_checkpoint; for a copy make a step of"
            " copy.deepcopy((model, optimizer))",
        )

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, with the keys of `torch.amp.GradScaler.state_dict()`.

        With stochastic rounding its random state is there too, under the key `amp_compiler`, which GradScaler ignores,
        with delayed scaling of FP8 operands its magnitudes, and with callbacks the number of steps.
        """
        state = self._scale_config.state_dict(self._scale)
        self._hidden.tell()
        own = {**self._state.rounding.state_dict(), **self._state.amaxes.state_dict(), **self._log.state_dict()}
        return {**state, OWN_KEY: {**state.get(OWN_KEY, {}), **own}} if own else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the loss scale of another step or of a `torch.amp.GradScaler`, and what else `state_dict` holds.

        Args:
            state: what `step.state_dict()` or `GradScaler.state_dict()` gave.

        Raises:
            AmpError: keys are missing or do not fit the kind of loss scale.
        """
        if not isinstance(state, Mapping):
            raise AmpError(
                f"the saved state of a step is a {type(state).__name__}",
                hint="give what step.state_dict(), or that of a torch.amp.GradScaler, has returned",
            )
        self._state.scale.load(state)
        self._state.rounding.load_state_dict(state.get(OWN_KEY, {}))
        self._state.amaxes.load_state_dict(state.get(OWN_KEY, {}))
        self._log.load_state_dict(state.get(OWN_KEY, {}))
        if STEPS_KEY in state.get(OWN_KEY, {}):
            self._state.events.go_on_from(self._log.steps)
        self._watch.forget()
