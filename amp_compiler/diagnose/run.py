"""`amp.profile`: batches run with the exponents of everything counted."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from amp_compiler.diagnose.exponents import Counts, Histogram
from amp_compiler.diagnose.losses import arguments, batches_of, check_given, leaves_key, loss_step, positional
from amp_compiler.diagnose.profile import (
    ACTIVATION,
    ACTIVATION_GRADIENT,
    GRADIENTS,
    WEIGHT,
    WEIGHT_GRADIENT,
    Product,
    Profile,
    Row,
    UpdateRow,
)
from amp_compiler.errors import AmpError, CaptureError, LoweringError
from amp_compiler.forward.api import is_onnx
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.counting import CountingProgram, build_counting
from amp_compiler.forward.products import CountedProduct
from amp_compiler.forward.program import EAGER
from amp_compiler.forward.settings import Settings, device_of, make_settings
from amp_compiler.fx.graph import annotate_calls, canonical_op, module_of, neutral_dtype, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.fx.sign_of_life import sign_of_life
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.dtypes import DType, DTypeArgument, low_name, short_name
from amp_compiler.onnx.importing.api import module_of as imported
from amp_compiler.ops.cpu.update import made_gradient
from amp_compiler.ops.exponents import BINS, ZERO, count_exponents, count_update
from amp_compiler.planner.cures import match_of
from amp_compiler.training.program import StepProgram
from amp_compiler.training.step import TrainingStep

_LOST_IN = ("fp16", "bf16")  # as `count_update` counts them
_Place = tuple[str, str, str, str, str, str, str]  # the fields of a `Row` that are text


@sign_of_life("amp.profile")
def profile(
    subject: Any,
    batches: Iterable[Any],
    *,
    rules: Any = "default",
    dtype: DTypeArgument = "auto",
    loss_fn: Callable[..., Any] | None = None,
    loss_scale: float = 1.0,
    every: int = 1,
) -> Profile:
    """Run some batches, and count the binary exponents of all that is computed.

    A training step trains: every step is `step(*batch)`; weights, states and the loss scale move on, and to the bit as
    they would otherwise. Before each its forward and backward run once more, compiled with counters in them (pipeline
    COUNT). Of a model, the forward of which is run node by node as `amp.compile` rewrites it, activations and weights
    are counted, and nothing is changed; with `loss_fn` its backward runs as well, and the gradients of activations and
    weights are counted too. The counts are as large for a thousand batches as for one.

    Args:
        subject: a training step; a module, of `amp.compile` or plain; or an ONNX model, a path or a `ModelProto`.
        batches: for a step or a module each a tuple of arguments, or a single one; for a module and for an ONNX model
            also a dict of arguments by name.
        rules: of a module that is not compiled yet, and of an ONNX model.
        dtype: as for `amp.compile`, for the same.
        loss_fn: of a model, as for a training step: `loss_fn(model, *batch)` gives the loss, or `(loss, aux)`; a batch
            that is a dict is given by name.
        loss_scale: what that loss is multiplied by; a step has its own.
        every: count the first batch of so many. A training step trains on the others at no cost; a model does not run
            on them. `Profile.counted` says which batches were counted.

    Returns:
        The counts, a row for each tensor, with `loss_scale`, `worst` and `updates` to ask them.

    Raises:
        AmpError: `subject` or `batches` is none of these, there is no batch, the subject is not one graph, or `every`
            is no number from 1 on.

    Source: the histograms of Micikevicius et al., Mixed Precision Training, 2018, section 3.2.

    Example:
        >>> import torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1),
        ...                          dtype="fp16", loss_scale=1024.0, backend="eager")
        >>> counts = amp.profile(step, [torch.ones(2, 4)])
        >>> [row.name for row in counts.of("weight gradient")]
        ['weight', 'bias']
    """
    dtype = low_name(dtype)
    check_given(subject, loss_fn, loss_scale, dtype, rules=rules != "default")
    if type(every) is not int or every < 1:
        raise AmpError(f"every={every!r} is no number of batches", hint="pass 1, or more for the first of so many")
    run: _Run
    if isinstance(subject, TrainingStep):
        run = _StepRun(subject)
    elif isinstance(subject, nn.Module) or is_onnx(subject):
        compiled = isinstance(subject, CompiledModule)
        model = subject._amp_original if compiled else imported(subject)
        settings = subject._amp_settings if compiled else make_settings(rules, dtype, EAGER)
        run = _ModelRun(model, settings) if loss_fn is None else _LossRun(model, settings, loss_fn, loss_scale)
        if is_onnx(subject):
            from amp_compiler.onnx.plan import explain_onnx  # ONNX is imported by those who use it

            annotate_calls(model)
            plan = explain_onnx(subject, rules=rules, dtype=short_name(run.low))
            run.onnx_nodes = {value: node.name for node in plan.nodes for value, _ in node.outputs}
    else:
        raise AmpError(
            f"amp.profile cannot run a {type(subject).__name__}",
            hint="pass what amp.training_step gave, a module or an ONNX model",
        )
    for batch in batches_of(batches):
        if run.batches % every == 0:
            run.take(batch)
        elif isinstance(subject, TrainingStep):
            subject(*positional(batch))
        run.batches += 1
    return run.profile(every)


class _Run(ABC):
    """Gathers what the batches show."""

    def __init__(self, model: nn.Module, low: DType) -> None:
        self.model, self.low = model, low
        self.rows: dict[_Place, tuple[Counts, Counts]] = {}
        self.places: dict[fx.Node, _Place] = {}
        self.updates: dict[str, UpdateRow] = {}
        self.vanished: set[_Place] = set()  # gradients zero in every element of a batch, and perhaps not in FP32
        self.batches = 0
        self.programs: dict[Any, CountingProgram] = {}
        self.onnx_nodes: dict[str, str] = {}  # of an ONNX model: by value, the node of its plan
        self.products: dict[str, CountedProduct] = {}

    @abstractmethod
    def take(self, batch: Any) -> None:
        """Run one batch, and count."""

    def skipped(self) -> int:
        """How many steps were skipped."""
        return 0

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, one) for name, one in self.model.named_parameters() if one.is_floating_point())

    def program_for(self, tree: Any, build: Callable[[], CountingProgram]) -> tuple[CountingProgram, list[Any]]:
        """The program for batches like this one, and what is in the batch."""
        leaves, spec = pytree.tree_flatten(tree)
        form = (spec, leaves_key(leaves), tuple(module.training for module in self.model.modules()))
        if form not in self.programs:
            self.programs[form] = build()
        return self.programs[form], leaves

    def count(self, tree: Any, build: Callable[[], CountingProgram], shift: int) -> None:
        """Count what the nodes make of a batch, by a program for batches like it."""
        program, leaves = self.program_for(tree, build)
        rows = self.add_counts(program, program(leaves), shift)
        weights = {}
        for (name, dtype), row in zip(program.weights, rows[len(program.nodes) :], strict=True):
            weights[name] = _place_of(name, WEIGHT_GRADIENT, dtype), row
            self.add(*weights[name], shift)
        self.look_at_zeros(program, rows, weights)

    def add_counts(self, program: CountingProgram, counts: Tensor | None, shift: int) -> list[Counts]:
        """Take in what a program has counted of nodes; gives all that it has counted."""
        rows = [] if counts is None else list(counts.cpu().numpy())
        names = self.onnx_names(program) if self.onnx_nodes else {}
        for node, row in zip(program.nodes, rows[: len(program.nodes)], strict=True):
            kind = ACTIVATION_GRADIENT if node in program.scaled else ACTIVATION
            if node not in self.places:
                self.places[node] = _key(node, kind, *names.get(node, ()))
            self.add(self.places[node], row, shift if kind in GRADIENTS else 0)
        for product in program.products:
            self.products.setdefault(product.node.name, product)
        return rows

    def look_at_zeros(
        self, program: CountingProgram, rows: Sequence[Counts], weights: Mapping[str, tuple[_Place, Counts]]
    ) -> None:
        """Note which gradients of a batch are zero in every element, and may not be so in FP32."""
        if self.low.short != "fp16" or program.trail is None:
            return
        zero = {node: _is_zero(row) for node, row in zip(program.nodes, rows, strict=False)}
        suspects = {node: self.places[node] for node in program.nodes if zero[node] and node in program.scaled}
        for name, (place, counts) in weights.items():
            if name in program.gradients and _is_zero(counts):
                suspects[program.gradients[name]] = place
        if suspects:
            self.vanished.update(suspects[node] for node in program.trail.vanished(zero, suspects))

    def onnx_names(self, program: CountingProgram) -> dict[fx.Node, tuple[str, str]]:
        """Name and planned node of what was made of an ONNX node: the last of what makes its one result is named so.

        What the backward makes keeps its own name; it was planned with what it is the gradient of.
        """
        from amp_compiler.onnx.importing.scope import onnx_values

        all_values = {node: onnx_values(node) for node in program.nodes}
        values = {node: results for node, results in all_values.items() if results and results[0] in self.onnx_nodes}
        makers = {results[0]: node for node, results in values.items() if len(results) == 1}
        planned = {node.meta.get(Key.PLANNED): self.onnx_nodes[results[0]] for node, results in values.items()}
        names = {}
        for node in program.nodes:
            first = values.get(node, ("",))[0]
            if of := self.onnx_nodes.get(first) or planned.get(node.meta.get(Key.PLANNED)):
                names[node] = (first if makers.get(first) is node else node.name, of)
        return names

    def add(self, key: _Place, counts: Counts, shift: int) -> None:
        kept = self.rows.setdefault(key, (np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)))
        kept[0][:] += Histogram(counts).shifted(shift).counts if shift else counts
        kept[1][:] += counts

    def profile(self, every: int) -> Profile:
        """All of it."""
        if not self.batches:
            raise AmpError("there is no batch to profile", hint="pass at least one")
        rows = [
            Row(*key, Histogram(true), Histogram(stored), key in self.vanished and _is_zero(stored))
            for key, (true, stored) in self.rows.items()
        ]
        named = list(self.parameters())
        for (name, parameter), counts in zip(named, _count([one for _, one in named]), strict=True):
            held = Histogram(counts)
            rows.append(Row(*_place_of(name, WEIGHT, parameter.dtype), held, held))
        updates, products = tuple(self.updates.values()), tuple(self.products_of(rows))
        return Profile(tuple(rows), updates, self.batches, self.skipped(), self.low.short, every, products)

    def products_of(self, rows: Sequence[Row]) -> Iterator[Product]:
        """The products, with the places of the rows of what they multiply."""
        places = {key: place for place, key in enumerate(self.rows)}
        place_of: dict[Any, int] = {node: places[key] for node, key in self.places.items()}
        place_of |= {row.name: place for place, row in enumerate(rows) if row.kind == WEIGHT}
        onnx_names = {node.meta.get(Key.PLANNED, node.name): key[5] for node, key in self.places.items()}
        nodes = [product.node for product in self.products.values()]
        for product in self.products.values():
            node, op = product.node, product.node.op
            if self.onnx_nodes and node.name not in onnx_names:
                continue
            if self.onnx_nodes:
                node, op = replace(node, name=onnx_names[node.name], module=""), ""
            operands, gradients = (
                tuple(sorted(place_of[one] for one in those if one in place_of))
                for those in (product.operands, product.gradients)
            )
            yield Product(node.name, op, node.source, match_of(node, nodes, {node.name}), operands, gradients)


class _StepRun(_Run):
    """Of a training step."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__(step.model, step._low)
        self.step, self.skipped_before = step, int(step.skipped_steps)
        self.before: dict[str, Tensor] = {}  # the parameters as they were before this batch

    def skipped(self) -> int:
        return int(self.step.skipped_steps) - self.skipped_before

    def take(self, batch: Any) -> None:
        arguments = positional(batch)
        shift = _exponent_of(self.step.loss_scale)
        with _told_of("this step"):
            counting, leaves = self.program_for((arguments, {}), lambda: self.step._counting(arguments))
            self.step._look()  # or it would count with 16-bit copies of weights that were written since
            rows = self.add_counts(counting, counting(leaves), shift)
        self.keep_weights()
        self.step._keeps_parts = True
        try:
            self.step(*arguments)
        finally:
            self.step._keeps_parts = False
        program, output, _ = self.step._seen()
        if not isinstance(program, StepProgram):
            raise AmpError(
                f"the step runs {self.step.execution}: what its subgraphs compute is not counted",
                hint="profile a loss that is one graph",
            )
        for name, parameter in self.parameters():
            self.update(name, *(one.cpu().numpy() for one in count_update(self.before[name], parameter)))
        weights = {}
        for name, gradient in zip(program.report.updated, output.gradients, strict=True):
            whole = gradient if isinstance(gradient, Tensor) else made_gradient(gradient, self.before[name].float())
            weights[name] = _place_of(name, WEIGHT_GRADIENT, gradient.dtype), _count([whole])[0]
            self.add(*weights[name], shift)
        self.look_at_zeros(counting, rows, weights)

    def keep_weights(self) -> None:
        """Copy the parameters into memory that is kept, for the system is slow to give it anew for every batch."""
        for name, parameter in self.parameters():
            kept = self.before.get(name)
            if kept is None or (kept.shape, kept.dtype) != (parameter.shape, parameter.dtype):
                kept = self.before[name] = torch.empty_like(parameter, requires_grad=False)
            kept.copy_(parameter.detach())

    def update(self, name: str, ratios: Counts, numbers: Counts) -> None:
        """Take in what was done to a parameter."""
        changed, *lost = map(int, numbers)
        known = self.updates.get(name, UpdateRow(name, Histogram.empty(), 0, dict.fromkeys(_LOST_IN, 0)))
        sums = {dtype: known.lost[dtype] + more for dtype, more in zip(_LOST_IN, lost, strict=True)}
        self.updates[name] = UpdateRow(name, known.ratios + Histogram(ratios), known.changed + changed, sums)


class _ModelRun(_Run):
    """Of a model's forward."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.device = device_of(model.parameters())
        super().__init__(model, settings.low(self.device))
        self.settings = settings

    def take(self, batch: Any) -> None:
        tree = arguments(batch)
        with building():
            self.count(tree, lambda: build_counting(self.model, tree[0], tree[1], self.settings, self.device), 0)


class _LossRun(_Run):
    """Of a model's forward and backward, by the counting program of a training step that is never made."""

    def __init__(self, model: nn.Module, settings: Settings, loss_fn: Callable[..., Any], loss_scale: float) -> None:
        super().__init__(model, settings.low(device_of(model.parameters())))
        self.step = loss_step(model, settings, loss_fn, loss_scale, by_name=False)
        self.by_name = loss_step(model, settings, loss_fn, loss_scale, by_name=True)

    def take(self, batch: Any) -> None:
        args, named = arguments(batch)
        step, args = (self.by_name, (named,)) if named else (self.step, args)
        shift = _exponent_of(step.loss_scale)
        with _told_of("the loss"):
            self.count((args, {}), lambda: step._counting(args, with_weights=True), shift)


def _is_zero(counts: Counts) -> bool:
    return bool(counts[ZERO] == counts.sum())


def _exponent_of(scale: Tensor) -> int:
    return -math.floor(math.log2(float(scale)))


@contextmanager
def _told_of(subject: str) -> Iterator[None]:
    try:
        yield
    except (CaptureError, LoweringError) as cause:
        what = f"exponents are counted in one graph, which {subject} is not: {cause.what}"
        raise AmpError(what, where=cause.where, hint=cause.hint) from cause


def _count(values: Sequence[Tensor]) -> Counts:
    counts: Counts = count_exponents([one.detach() for one in values]).cpu().numpy()
    return counts


def _place_of(parameter: str, kind: str, dtype: torch.dtype) -> _Place:
    return (parameter, kind, "", parameter.rpartition(".")[0], "", "", neutral_dtype(dtype).short)


def _key(node: fx.Node, kind: str, name: str = "", planned: str = "") -> _Place:
    maker = node.all_input_nodes[0] if node.target is operator.getitem else node
    where, planned = user_source(node.meta.get("stack_trace")), planned or str(node.meta.get(Key.PLANNED, ""))
    op, dtype = canonical_op(maker.target), neutral_dtype(node.meta["val"].dtype).short
    return (name or node.name, kind, op, module_of(node)[0], where, planned, dtype)
