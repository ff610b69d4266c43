"""One call of a training step in subgraphs, with what a step that is one graph tells of itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.utils._pytree as pytree

from amp_compiler.errors import AmpError
from amp_compiler.forward.subgraphs import Subgraph, plan_of, stages_of
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.training.build import StepOptions
from amp_compiler.training.program import StepOutput, StepProgram
from amp_compiler.training.subgraphs.step import Decide, SubgraphStep
from amp_compiler.training.subgraphs.update import Made


class SubgraphProgram:
    """One call of a `SubgraphStep`; behind it, it has what a `StepProgram` has.

    Args:
        step: what runs it.
        spec: tree of the batch.
        options: what to build an update for.
        owners: which parameters stand in which group of which optimizer.
        decide: gives what all ranks have a gradient of, see `SubgraphStep.shared`; `None` for one process.
    """

    def __init__(
        self, step: SubgraphStep, spec: Any, options: StepOptions, owners: Any, decide: Decide | None = None
    ) -> None:
        self.step, self._spec, self._options, self._owners, self._decide = step, spec, options, owners, decide
        self._update: StepProgram | None = None
        self._made: Made | None = None

    def prepare(self, leaves: Sequence[Any]) -> Made:
        """Run forward and backward, and have the update's program ready; the next call is one of these leaves.

        Args:
            leaves: the batch.
        """
        batch, _ = pytree.tree_unflatten(list(leaves), self._spec)
        computed = self.step.forward_and_backward(batch, self._options.optimizers)
        computed = self.step.completed(computed, self._options.gather)
        if self._decide is not None:
            computed = self.step.shared(computed, self._decide, self._options.gather)
        with building():
            self._update = self.step.update_for(computed, self._options, self._owners)
        self._made = computed
        return computed

    def __call__(self, leaves: Sequence[Any]) -> StepOutput:
        """Run one step on the flattened batch.

        Args:
            leaves: the batch.

        Raises:
            CaptureError: Dynamo can take none of it, or the loss depends on no parameter of the optimizers.
            LoweringError: a subgraph, or the update, cannot be compiled.
        """
        computed, self._made = self._made or self.prepare(leaves), None
        output = self.update(computed.given())
        return replace(output, loss=computed.loss, aux=computed.aux)

    @property
    def update(self) -> StepProgram:
        """The program of the update.

        Raises:
            AmpError: before the call.
        """
        if self._update is None:
            raise AmpError("the step has not been called yet", hint="call it with a batch first")
        return self._update

    @property
    def plan(self) -> PrecisionPlan | None:
        """The plans of all subgraphs together; `None` where there is none."""
        subgraphs = self._ran()
        return replace(plan_of(subgraphs), notes=self.update.report.notes) if subgraphs else None

    @property
    def stages(self) -> Stages:
        """The text of every subgraph, and of the update, behind each pass."""
        stages = Stages()
        for stage in [*stages_of(self._ran()), *self.update.stages]:
            stages.note(stage.name, stage.text)
        return stages

    def _ran(self) -> tuple[Subgraph, ...]:
        return () if self.step.subgraphs is None else self.step.subgraphs.last

    @property
    def execution(self) -> str:
        """How it ran and why, in words."""
        subgraphs = self.step.subgraphs
        if subgraphs is None or not (subgraphs.last or subgraphs.autocast):
            how = f"as they are written, in {'FP32' if subgraphs is None else 'the types of the model'}"
        elif subgraphs.autocast:
            how = f"under torch.autocast, for {subgraphs.autocast}"
        else:
            how = f"in {len(subgraphs.last)} subgraph{'s' * (len(subgraphs.last) > 1)}"
        cause = self.step.cause
        where = f" ({cause.where})" if cause.where else ""
        return f"forward and backward {how}, the update as one graph, because: {cause.what}{where}"
