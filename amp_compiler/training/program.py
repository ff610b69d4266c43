"""`StepProgram`: one whole training step for inputs of one signature, ready to run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from amp_compiler.backends.cuda_graph import GraphedRun
from amp_compiler.errors import AmpError
from amp_compiler.forward.shape_guards import InputForm
from amp_compiler.forward.tensor_versions import note_writes, writable
from amp_compiler.forward.value_guards import ValueGuards
from amp_compiler.fx.attribute_writes import Writes
from amp_compiler.fx.capture_errors import SPOKEN_OF
from amp_compiler.fx.graph import LOW_TYPES, results_of
from amp_compiler.fx.python_state import PythonState
from amp_compiler.fx.torch_private import SET_GRAD_ENABLED, TENSORS
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.update.product import Product
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.step.reduce_gradients import SharedGradient
from amp_compiler.training.fused_optimizers import BoundGroup
from amp_compiler.training.outside import OUTSIDE, Alone, Substitutes, adopt
from amp_compiler.training.state import LowWeights
from amp_compiler.training.traced_optimizers import TracedGroup

if TYPE_CHECKING:
    from amp_compiler.training.standing import Standing

_PAIR = pytree.tree_structure((0, 0))
ROOT = "model"  # name of the models in a `LossModule`
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # of a capture too


class LossModule(nn.Module):
    """`loss_fn(model, *batch)` as a module, so that it can be captured with the parameters of all models in it.

    One model stands under `model`; of a nest, each under its path: `model.generator` for `{"generator": …}`. What the
    loss function holds beside them stands under `outside`.
    """

    def __init__(self, model: Any, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__[SPOKEN_OF] = "the loss function"
        self.__dict__["nest"], self.__dict__["loss_fn"], self.__dict__["alone"] = model, loss_fn, Alone()
        if isinstance(model, nn.Module):
            self.add_module(ROOT, model)
            return
        for path, leaf in pytree.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, nn.Module))[0]:
            if not isinstance(leaf, nn.Module):
                raise AmpError(
                    f"model holds a {type(leaf).__name__} at {pytree.keystr(path)}"
                    if path
                    else f"model is a {type(leaf).__name__}",
                    mend="pass an nn.Module, or a dict, list or tuple of them",
                )
            self._place(path, leaf)

    def _place(self, path: tuple[Any, ...], leaf: nn.Module) -> None:
        holder: nn.Module = self
        *outer, last = [ROOT, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)]
        try:
            for name in outer:
                if name not in holder._modules:
                    holder.add_module(name, nn.Module())
                holder = holder._modules[name]  # type: ignore[assignment]
            if last in holder._modules:
                raise KeyError(f"'{last}' is there twice")
            holder.add_module(last, leaf)
        except KeyError as cause:
            raise AmpError(
                f"model holds a module at {pytree.keystr(path)} whose path is no name: {cause.args[0]}",
                mend="use keys without dots, each another text",
            ) from cause

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take in what the loss function holds beside the models, see `training.outside`."""
        self.__dict__["alone"].names = adopt(self, optimizers)

    @contextmanager
    def as_parameters(self) -> Iterator[None]:
        """Within it, adopted tensors that are no `nn.Parameter` stand as one over the same memory: export asks it."""
        own = self.__dict__
        plain = {name: tensor for name, tensor in own["alone"].names.values() if not isinstance(tensor, nn.Parameter)}
        try:
            for name, tensor in plain.items():
                own["_modules"][OUTSIDE]._parameters[name] = nn.Parameter(tensor.detach(), tensor.requires_grad)
            yield
        finally:
            for name, tensor in plain.items():
                own["_modules"][OUTSIDE]._parameters[name] = tensor

    def _call(self, batch: tuple[Any, ...]) -> Any:
        own = self.__dict__
        if not own["alone"].names or not torch.compiler.is_exporting():
            return own["loss_fn"](own["nest"], *batch)
        table = own["_modules"][OUTSIDE]._parameters  # holds what stands for the parameters while they are traced
        with Substitutes({key: table[name] for key, (name, _) in own["alone"].names.items()}) as mode:
            return mode.swap(own["loss_fn"](own["nest"], *batch))

    def forward(self, *batch: Any) -> tuple[Tensor, Any]:
        """The loss and aux (`None` where the loss function gives none)."""
        result = self._call(batch)
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise AmpError(f"loss_fn returned {_describe(loss)} as the loss", mend=_mend(loss))
        # A 16-bit loss could not hold the loss scale that the backward starts from.
        return loss.float() if loss.dtype in LOW_TYPES else loss, aux


def _describe(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)} and type {loss.dtype}"
    if isinstance(loss, _NUMBERS):
        return "a Python number"
    return "None" if loss is None else f"a {type(loss).__name__}"


def _mend(loss: Any) -> str:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        return "return its mean() or sum(), one floating-point number, or (loss, aux)"
    if isinstance(loss, _NUMBERS):
        return "return a tensor, without item() or float(), or (loss, aux)"
    if isinstance(loss, Mapping) and "loss" in loss:
        return "return (result['loss'], result), the loss and what goes with it"
    return "return one floating-point number as a tensor, or (loss, aux)"


_Beside = tuple[Tensor, Tensor, tuple["Tensor | Product", ...], "Tensor | None"]


@dataclass(frozen=True, slots=True)
class Resolver:
    """How to get the tensor of a placeholder of a step graph at run time.

    Args:
        get: from the flat batch.
        behind: gives the parameter, buffer or constant that it is, or is made of; `None` where it is kept by the step
            or by an optimizer.
        leaf: whether it comes from the batch.
    """

    get: Callable[[Sequence[Any]], Any]
    behind: Callable[[], Tensor] | None = None
    leaf: bool = False


@dataclass
class StepOutput:
    """What one run of a step program gives.

    Args:
        loss: detached loss.
        aux: what the loss function returned beside it.
        norm: FP32 L2 norm of the unscaled gradients; NaN where the step looked at none.
        flags: uint8 per parameter of `StepProgram.updated`: 1 where its gradient was not finite; empty where the step
            looked at none.
        gradients: raw (scaled) gradients per parameter of `StepProgram.updated`.
        scale: the loss scale that it ran with, FP32 scalar; `None` where that never changes.

    All but loss and aux are overwritten by the next run where a graph is replayed.
    """

    loss: Tensor
    aux: Any
    norm: Tensor
    flags: Tensor
    gradients: tuple[Tensor | Product, ...]
    scale: Tensor | None

    @property
    def checked(self) -> bool:
        """Whether the step looked at its gradients before the update, so that norm and flags are known."""
        return len(self.flags) == len(self.gradients)


@dataclass(eq=False)
class StepProgram:
    """A compiled step.

    Args:
        graph_module: the step graph, for reading.
        plan: what was decided for the forward; `None` in plain FP32.
        groups: the update groups.
        updated: qualified names of the updated parameters, in the order of the gradients.
        run: the compiled graph, replayed as a CUDA graph where it can be.
        resolve: one per placeholder.
        out_spec: tree of `(loss, aux)`.
        results: number of flat values in it, and of those that `writes` assigns.
        form: which batches it can be used for.
        stages: the text of the graph behind each pass.
        gives_scale: whether the last result of `run` is the loss scale that it ran with.
        buffers: gets the buffers that it writes.
        writes: what is assigned after a call, detached.
        values: the Python values that it holds for.
        offered: what this rank's graph has a gradient of; empty for one process.
        shared: what all ranks together have a gradient of, for which it was made.
        written: placeholders of the buffers that it writes.
        divisor: number of batches, on all ranks together, whose gradients its own are the sums of.
        parts: of how many of `updated`, the first ones, a rank has a part of the gradient only.
        norms: the messages that this rank sends in forward and backward.
        weights: gets the parameters of `updated`.

    Attributes:
        found_anew: whether the last call had to find its tensors.
        behind: the parameters that it updates without their 16-bit copies, which other programs read.
        trained: ids of the parameters that it updates, as they were at the last call that had to find its tensors.
        replayed: stands for what the last call wrote, where that was the replay of a graph and nothing else.
    """

    graph_module: fx.GraphModule
    plan: PrecisionPlan | None
    groups: list[BoundGroup | TracedGroup]
    updated: tuple[str, ...]
    run: GraphedRun
    resolve: list[Resolver]
    out_spec: pytree.TreeSpec
    results: int
    form: InputForm
    stages: Stages
    gives_scale: bool
    buffers: tuple[Callable[[], Tensor], ...] = ()
    writes: Writes = field(default_factory=Writes)
    values: ValueGuards = field(default_factory=lambda: ValueGuards(PythonState()))
    offered: tuple[SharedGradient, ...] = ()
    shared: tuple[SharedGradient, ...] = ()
    written: tuple[str, ...] = ()
    divisor: int = 1
    parts: int = 0
    norms: tuple[str, ...] = ()
    weights: tuple[Callable[[], Tensor], ...] = ()
    found_anew: bool = field(default=True, init=False, repr=False)
    behind: tuple[Tensor, ...] = field(default=(), init=False, repr=False)
    trained: frozenset[int] = field(default=frozenset(), init=False, repr=False)
    replayed: list[Tensor] | None = field(default=None, init=False, repr=False)
    _seen: _Seen | None = field(default=None, init=False, repr=False)
    _numbers: int = field(default=-1, init=False, repr=False)

    @property
    def update(self) -> StepProgram:
        """The program that updates the weights: this one."""
        return self

    def settle(self, lows: LowWeights) -> None:
        """Note what a call trains: which copies it writes together with their masters, and which are left behind.

        Args:
            lows: the 16-bit copies that there are.
        """
        pairs = [
            (parameter, low)
            for group in self.groups
            for parameter, low in zip(group.parameters, group.spec.lows or [None] * len(group.parameters), strict=True)
        ]
        self.trained = frozenset(id(parameter) for parameter, _ in pairs)
        lows.settle([parameter for parameter, low in pairs if low is not None])
        self.behind = tuple(parameter for parameter, low in pairs if low is None and lows.has(parameter))

    @property
    def execution(self) -> str:
        """How it ran, in words: as one CUDA graph, or without one and why."""
        return self.run.execution

    def gradient_node(self, number: int) -> fx.Node:
        """The node of the graph that gives the gradient of a parameter of `updated`."""
        return results_of(self.graph_module.graph)[self.results + 3 + number]  # type: ignore[no-any-return]

    def __post_init__(self) -> None:
        self._is_pair = self.out_spec == _PAIR

    def flags_changed(self, standing: Standing) -> bool:
        """Whether a setting of an optimizer that is part of the graph is no longer what was compiled."""
        return self._numbers != standing.numbers and any(group.flags_changed() for group in self.groups)

    def __call__(self, leaves: Sequence[Any], standing: Standing | None = None) -> StepOutput:
        """Run one step on the flattened batch.

        Args:
            leaves: the batch.
            standing: what has changed since the last call; `None` where nobody has looked.
        """
        self._refresh(standing)
        seen, self.replayed = self._seen, None
        self.found_anew = seen is None or standing is None or seen.generation != standing.generation
        if seen is None or self.found_anew:
            flat, written = self._run_anew(leaves, standing)
            note_writes(written)
            return self._output(flat, self._beside(flat[self.results :]))
        with TENSORS:
            inputs = seen.filled(leaves)
        SET_GRAD_ENABLED(False)  # they are enabled, or nothing would be as it was
        try:
            copied = self.run.again(inputs)
            flat = list(self.run(*inputs)) if copied is None else copied
        finally:
            SET_GRAD_ENABLED(True)
        note_writes(seen.written)
        seen.let_go()
        if copied is None:
            return self._output(flat, self._beside(flat[self.results :]))
        if seen.beside is None:
            seen.beside = self._beside(self.run.beside)
        self.replayed = seen.written
        return self._output(flat, seen.beside)

    def _beside(self, results: Sequence[Any]) -> _Beside:
        """What a run gives beside loss and aux: all but these of a `StepOutput`, in its order."""
        scale = results[-1] if self.gives_scale else None
        norm, _, flags, *gradients = results[: len(results) - self.gives_scale]
        return norm, flags, tuple(gradients), scale

    def _output(self, flat: Sequence[Any], beside: _Beside) -> StepOutput:
        self.writes.put(flat[: self.results])
        leaves = flat[: self.out_spec.num_leaves]
        loss, aux = leaves if self._is_pair else pytree.tree_unflatten(leaves, self.out_spec)
        return StepOutput(loss, aux, *beside)

    def _refresh(self, standing: Standing | None) -> None:
        """Bring changed numbers of the optimizers to the device."""
        same = standing is not None and self._numbers == standing.numbers
        for group in self.groups:
            if not same or group.asks_state:
                group.refresh()
        self._numbers = -1 if standing is None else standing.numbers

    def _run_anew(self, leaves: Sequence[Any], standing: Standing | None) -> tuple[list[Any], list[Tensor]]:
        """Find all inputs, run, and remember the inputs where they will be found again."""
        self._seen = None
        with TENSORS:
            with torch.no_grad():
                inputs = [resolve.get(leaves) for resolve in self.resolve]
            written = writable([p for group in self.groups for p in group.parameters] + [get() for get in self.buffers])
            if standing is not None and standing.note():
                loose = [
                    (place, one)
                    for place, one in enumerate(self.resolve)
                    if one.leaf or (one.behind is not None and not standing.covers(one.behind()))
                ]
                if self.run.batch.issuperset(place for place, _ in loose):
                    self._seen = _Seen(standing.generation, list(inputs), loose, written)
                    self._seen.let_go()
        with torch.no_grad():
            return list(self.run(*inputs)), written


@dataclass
class _Seen:
    """The inputs of a program's last call, which are those of the next one as long as nothing is assigned.

    Args:
        generation: for which they are.
        inputs: one per placeholder; `None` where it is found at every call.
        loose: places of these.
        written: the parameters and buffers that a call writes and whose versions it moves.
        beside: what a replay gives beside loss and aux; `None` where there was none.
    """

    generation: int
    inputs: list[Any]
    loose: list[tuple[int, Resolver]]
    written: list[Tensor]
    beside: _Beside | None = None

    def filled(self, leaves: Sequence[Any]) -> list[Any]:
        """All inputs of a call."""
        for place, resolve in self.loose:
            self.inputs[place] = resolve.get(leaves)
        return self.inputs

    def let_go(self) -> None:
        """Keep no batch alive."""
        for place, _ in self.loose:
            self.inputs[place] = None
