"""`StepProgram`: one whole training step for inputs of one signature, ready to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from amp_compiler.backends.cuda_graph import GraphedRun
from amp_compiler.forward.tensor_versions import writable
from amp_compiler.fx.torch_private.tracing import SET_GRAD_ENABLED, TENSORS
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.update.product import Product
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.step.reduce_gradients import SharedGradient
from amp_compiler.training.optimizers.fused import BoundGroup
from amp_compiler.training.optimizers.traced import TracedGroup
from amp_compiler.training.state import LowWeights

if TYPE_CHECKING:
    from amp_compiler.training.change_detector import ChangeDetector

Resolver = Callable[[Sequence[Any]], Any]  # gives the tensor of a placeholder from the flat batch
_Beside = tuple[Tensor, Tensor, tuple[Tensor | Product, ...], Tensor | None]


@dataclass
class StepOutput:
    """What one run of a step program gives.

    Args:
        loss: detached loss.
        aux: what the loss function returned beside it.
        norm: FP32 L2 norm of the unscaled gradients; NaN where the step looked at none.
        flags: uint8 per parameter of `StepReport.updated`: 1 where its gradient was not finite; empty where the step
            looked at none.
        gradients: raw (scaled) gradients per parameter of `StepReport.updated`; behind a call without those that are
            split over the ranks.
        scale: the loss scale that it ran with, FP32 scalar; `None` where it takes none.
        results: all that the forward gives, the loss first.

    All but loss, aux and results are overwritten by the next run where a graph is replayed.
    """

    loss: Tensor
    aux: Any
    norm: Tensor
    flags: Tensor
    gradients: tuple[Tensor | Product, ...]
    scale: Tensor | None
    results: Sequence[Any] = ()

    @property
    def checked(self) -> bool:
        """Whether the step looked at its gradients before the update, so that norm and flags are known."""
        return bool(len(self.flags))


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What runs.

    Args:
        run: the compiled graph, replayed as a CUDA graph where it can be.
        resolve: what gives its inputs, one per placeholder.
        batch: places of the inputs that come from the batch.
        groups: the update groups.
        results: number of results of the forward, of which the loss is the first.
        buffers: gets the buffers that it writes.
        operands: gets the weights of which it writes FP8 operands.
    """

    run: GraphedRun
    resolve: list[Resolver]
    batch: Sequence[int]
    groups: list[BoundGroup | TracedGroup]
    results: int
    buffers: tuple[Callable[[], Tensor], ...]
    operands: tuple[Callable[[], Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What can be read of a program.

    Args:
        graph_module: the step graph.
        plan: what was decided for the forward; `None` in plain FP32.
        notes: of several ranks, what each sends and holds.
        stages: the text of the graph behind each pass.
        updated: qualified names of the updated parameters, in the order of the gradients.
        parts: of how many of these parameters, the first ones, a rank has a part of the gradient only.
        divisor: number of batches, on all ranks together, whose gradients its own are the sums of.
        execution: how what came before it ran, in words; empty where it says that itself.
    """

    graph_module: fx.GraphModule
    plan: PrecisionPlan | None
    notes: tuple[str, ...]
    stages: Stages
    updated: tuple[str, ...]
    parts: int
    divisor: int
    execution: str = ""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """What the ranks agreed on when a program was made; all is empty for one process.

    Args:
        offered: what this rank's graph has a gradient of.
        shared: what all ranks together have a gradient of.
        written: placeholders of the buffers that it writes.
        norms: the messages that this rank sends in forward and backward.
    """

    offered: tuple[SharedGradient, ...] = ()
    shared: tuple[SharedGradient, ...] = ()
    written: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()


@dataclass(eq=False, kw_only=True)
class StepProgram:
    """A compiled step.

    Args:
        compiled: what runs.
        report: what can be read of it.
        agreement: what the ranks agreed on.

    Attributes:
        found_anew: whether the last call had to find its tensors.
        behind: the parameters that it updates without all that is kept of them, which other programs read.
        trained: ids of the parameters that it updates, as they were when it was settled.
        settled: generation of the 16-bit copies for which that is known.
    """

    compiled: CompiledStep
    report: StepReport
    agreement: Agreement
    found_anew: bool = field(default=True, init=False, repr=False)
    behind: tuple[Tensor, ...] = field(default=(), init=False, repr=False)
    trained: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    settled: int = field(default=-1, init=False, repr=False)
    _seen: _Seen | None = field(default=None, init=False, repr=False)

    @property
    def plan(self) -> PrecisionPlan | None:
        """What was decided for the forward; `None` in plain FP32."""
        return self.report.plan

    @property
    def stages(self) -> Stages:
        """The text of the graph behind each pass."""
        return self.report.stages

    @property
    def update(self) -> StepProgram:
        """The program that updates the weights: this one."""
        return self

    def settle(self, low_weights: LowWeights) -> None:
        """Note what a call trains, and of which parameters it leaves copies or FP8 operands behind.

        Args:
            low_weights: the 16-bit copies that there are.
        """
        pairs = [
            (parameter, low)
            for group in self.compiled.groups
            for parameter, low in zip(
                group.parameters, group.spec.low_weights or [None] * len(group.parameters), strict=True
            )
        ]
        self.trained = frozenset(id(parameter) for parameter, _ in pairs)
        writes = Counter(id(weight()) for weight in self.compiled.operands)
        self.settled = low_weights.generation
        self.behind = tuple(one for one, low in pairs if low_weights.number(one, low is None) > writes[id(one)])

    @property
    def execution(self) -> str:
        """How it ran, in words: as one CUDA graph, or without one and why."""
        return self.report.execution or self.compiled.run.execution

    @property
    def flags_changed(self) -> bool:
        """Whether a setting of an optimizer that is part of the graph is no longer what was compiled."""
        return any(group.flags_changed() for group in self.compiled.groups)

    def __call__(self, leaves: Sequence[Any], detector: ChangeDetector | None = None) -> StepOutput:
        """Run one step on the flattened batch.

        Args:
            leaves: the batch.
            detector: what has changed since the last call; `None` where nobody has looked.
        """
        for group in self.compiled.groups:
            group.refresh()
        seen = self._seen
        self.found_anew = seen is None or detector is None or seen.generation != detector.generation
        recorded = torch.is_grad_enabled()
        SET_GRAD_ENABLED(False)
        try:
            with TENSORS:
                if seen is None or self.found_anew:
                    seen = self._found(leaves, detector)
                inputs = seen.filled(leaves)
            copied = None if self.found_anew else self.compiled.run.again(inputs)
            flat = list(self.compiled.run(*inputs)) if copied is None else copied
        finally:
            SET_GRAD_ENABLED(recorded)
        torch.autograd.graph.increment_version(seen.written)
        published = [group.publish() for group in self.compiled.groups]
        if any(published) and detector is not None:
            with TENSORS:  # so that a state that is taken away again is seen
                detector.read()
        seen.let_go()
        if copied is None:
            return self._output(flat, self._beside(flat[self.compiled.results :]))
        if seen.beside is None:
            seen.beside = self._beside(self.compiled.run.beside)
        return self._output(flat, seen.beside)

    def _beside(self, results: Sequence[Any]) -> _Beside:
        """What a run gives beside loss and aux: all but these of a `StepOutput`, in its order."""
        norm, scale, flags, *gradients = results
        return norm, flags, tuple(gradients), scale

    def _output(self, flat: Sequence[Any], beside: _Beside) -> StepOutput:
        results = list(flat[: self.compiled.results])
        return StepOutput(results[0], None, *beside, results=results)

    def _found(self, leaves: Sequence[Any], detector: ChangeDetector | None) -> _Seen:
        """Find all inputs, and remember them where they will be found again."""
        self._seen = None
        inputs = [resolve(leaves) for resolve in self.compiled.resolve]
        parameters = [parameter for group in self.compiled.groups for parameter in group.parameters]
        written = writable(parameters + [get() for get in self.compiled.buffers])
        from_batch = [(place, self.compiled.resolve[place]) for place in self.compiled.batch]
        if detector is None:
            return _Seen(-1, inputs, from_batch, written)
        detector.settle()
        self._seen = _Seen(detector.generation, inputs, from_batch, written)
        return self._seen


@dataclass
class _Seen:
    """The inputs of a program's last call, which are those of the next one as long as nothing is assigned.

    Args:
        generation: for which they are.
        inputs: one per placeholder; `None` where it comes from the batch.
        from_batch: places of these.
        written: the parameters and buffers that a call writes and whose versions it moves.
        beside: what a replay gives beside loss and aux; `None` where there was none.
    """

    generation: int
    inputs: list[Any]
    from_batch: list[tuple[int, Resolver]]
    written: list[Tensor]
    beside: _Beside | None = None

    def filled(self, leaves: Sequence[Any]) -> list[Any]:
        """All inputs of a call."""
        for place, resolve in self.from_batch:
            self.inputs[place] = resolve(leaves)
        return self.inputs

    def let_go(self) -> None:
        """Keep no batch alive."""
        for place, _ in self.from_batch:
            self.inputs[place] = None
