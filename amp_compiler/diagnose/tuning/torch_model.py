"""A module, or the loss of a training step, under many rules: captured once, planned and rewritten for each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from amp_compiler.backends.backend import DEFAULT
from amp_compiler.diagnose.losses import Arguments, leaves_key
from amp_compiler.diagnose.tuning.deviation import Deviation, Measured
from amp_compiler.diagnose.tuning.sensitivity import Estimate, ProfiledRun
from amp_compiler.diagnose.tuning.subject import NOT_FINITE, SEED, Subject
from amp_compiler.errors import AmpError
from amp_compiler.forward.capture import capture_model, inputs_for
from amp_compiler.forward.program import EAGER, normalize, rewrite
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.fx.alias import AliasGroups, written_roots
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.graph import LOW_TYPES, copy_graph, torch_dtype
from amp_compiler.fx.lower import lower
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.graph_text import format_graph
from amp_compiler.ir.nonfinite import LOSS
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.capture import capture_once
from amp_compiler.training.loss_module import LossModule

_FALL = 4.0  # by which a loss scale falls where gradients are not finite with it


@dataclass(frozen=True)
class Goal:
    """Loss and gradients of a training step, which are compared with FP32 instead of outputs.

    Args:
        scale: what the loss is multiplied by before the backward.
        falls: whether that falls where gradients are too large with it.
    """

    scale: float
    falls: bool


@dataclass(frozen=True)
class _Form:
    """The captured graph for batches of one signature, in normal form.

    Args:
        captured: the graph.
        inputs: what it was captured with, one for each placeholder.
        leaves: the batch that it was captured for, flat.
    """

    captured: Captured
    inputs: tuple[Any, ...]
    leaves: Sequence[Any]


class TorchSubject(Subject):
    """A module with its batches.

    Args:
        model: the module, in the mode in which it is to run, or the loss of a step as a module.
        batches: arguments, positional and by name.
        settings: rules, type and pipelines.
        goal: loss and gradients instead of outputs; `None` for outputs.
        around: within which it is captured and run.
        root: name of the model in what is captured.

    Raises:
        AmpError: the module is not one graph, or the batches go different ways through it.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Arguments],
        settings: Settings,
        goal: Goal | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        root: str = "",
    ) -> None:
        super().__init__()
        self._model, self._batches, self._goal, self._around, self._root = model, list(batches), goal, around, root
        self._settings = replace(settings, dynamic_shapes=None, backend=EAGER, mode=DEFAULT)
        self.what = "outputs" if goal is None else "loss and gradients"
        self.batches = len(self._batches)
        leaves = pytree.tree_leaves(self._batches)
        self._device = device_of([*leaves, *model.parameters()])
        self.low = self._settings.low(self._device)
        self._forms: dict[Any, _Form] = {}
        self._expected: list[list[tuple[str, Tensor, bool]]] = []
        with self._surrounded():
            for batch in self._batches:
                self._form(batch)
        graphs = [form.captured.graph_module.graph for form in self._forms.values()]
        calls = ([one for one in graph.nodes if one.op == "call_function"] for graph in graphs)
        ways = {tuple((one.name, str(one.target)) for one in nodes) for nodes in calls}
        if len(ways) > 1:
            raise AmpError(
                "the batches go different ways through the model",
                hint="tune on the batches of one way, then on those of the next with rules= of the file that it gave",
            )

    @contextmanager
    def _surrounded(self) -> Iterator[None]:
        with autocast_off(), building(), self._around(), generators_kept():
            yield

    def _form(self, batch: Arguments) -> _Form:
        leaves, spec = pytree.tree_flatten(batch)
        key = (spec, leaves_key(leaves))
        if key not in self._forms:
            captured, inputs = self._captured(batch)
            normalize(captured.graph_module, self._settings, None, self._root, self.low)
            self._forms[key] = _Form(captured, inputs, leaves)
        return self._forms[key]

    def _captured(self, batch: Arguments) -> tuple[Captured, tuple[Any, ...]]:
        if not isinstance(self._model, LossModule):
            return capture_model(self._model, *batch, torch_dtype(self.low))
        loss = capture_once(self._model, batch[0], torch_dtype(self.low))
        return loss.captured, (*loss.inputs, *loss.captured.constants.values())

    def plan(self, rules: RuleSet) -> PrecisionPlan:
        """That of the first batch."""
        return self._planned(next(iter(self._forms.values())), rules)

    def _planned(self, form: _Form, rules: RuleSet) -> PrecisionPlan:
        return make_plan(lower(form.captured), rules, self.low, pipeline=self._settings.pipelines["PLAN"])

    def digest(self) -> str:
        """Of the graphs, and of all that they are given: weights, buffers, constants and batches."""
        digest = hashlib.blake2b(f"{self.low} {self._goal}".encode(), digest_size=16)
        with self._surrounded():
            for batch in self._batches:
                form = self._form(batch)
                digest.update(format_graph(lower(form.captured)).encode())
                for one in self._inputs(form, form.captured.graph_module, batch):
                    held = one.detach().cpu().contiguous().reshape(-1) if isinstance(one, Tensor) else None
                    digest.update(f"{getattr(one, 'dtype', '')} {tuple(getattr(one, 'shape', ()))} ".encode())
                    digest.update(repr(one).encode() if held is None else held.view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    # ---- FP32

    def profile(self, plan: PrecisionPlan, names: frozenset[str]) -> dict[str, Estimate]:
        """One run in FP32, with the rounding of some nodes measured beside it."""
        estimates: dict[str, Estimate] = {}
        self._expected = []
        self.runs += 1
        with self._surrounded():
            for number, batch in enumerate(self._batches):
                self._expected.append(self._reference(number, batch, names, estimates))
        for one in estimates.values():
            one.batches = self.batches
        return estimates

    def _reference(
        self, number: int, batch: Arguments, names: frozenset[str], estimates: dict[str, Estimate]
    ) -> list[tuple[str, Tensor, bool]]:
        form = self._form(batch)
        graph_module = form.captured.graph_module
        watched = {node: node.name for node in graph_module.graph.nodes if node.name in names}
        goal, wide = self._goal, not _casts_itself(graph_module)
        run = ProfiledRun(
            graph_module, watched, torch_dtype(self.low), estimates, backward=goal is not None, device=self._device
        )
        inputs = [
            one.float() if wide and isinstance(one, Tensor) and one.dtype in LOW_TYPES else one
            for one in self._inputs(form, graph_module, batch)
        ]
        # Of this form of attention the backward has a derivative too.
        with self._seeded(number), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            results = list(run.run(*inputs))
            named = _named(results)
            if goal is None:
                _check(named)
                run.spread_to([one for _, one in named])
                return [(name, one.detach(), False) for name, one in named]
            loss = results[0]
            _check([(LOSS, loss)])
            if not loss.requires_grad:
                raise AmpError("the loss has no gradient", hint="leave detach() and torch.no_grad() out of loss_fn")
            trained = self._trained(form, inputs)
            gradients = run.spread_to_gradients(loss, [one for _, one in trained], goal.scale, falls=goal.falls)
        named_gradients = [
            (f"the gradient of {name}", one, True)
            for (name, _), one in zip(trained, gradients, strict=True)
            if one is not None
        ]
        _check([(name, one) for name, one, _ in named_gradients])
        return [(LOSS, loss.detach(), False), *named_gradients]

    # ---- 16 bits

    def measure(self, rules: RuleSet) -> Measured:
        """All batches under some rules, against FP32."""
        self.runs += 1
        rewritten: dict[int, fx.GraphModule] = {}
        deviation = Deviation()
        with self._surrounded():
            for number, batch in enumerate(self._batches):
                form = self._form(batch)
                if id(form) not in rewritten:
                    rewritten[id(form)] = self._rewritten(form, rules)
                results = dict(self._made(number, batch, form, rewritten[id(form)]))
                for name, expected, gradient in self._expected[number]:
                    actual = results.get(name)
                    if actual is None:  # a gradient that nothing reaches any more
                        actual = torch.zeros_like(expected)
                    deviation.add(name, expected, actual, gradient=gradient)
        return deviation.result()

    def _rewritten(self, form: _Form, rules: RuleSet) -> fx.GraphModule:
        graph_module = copy_graph(form.captured.graph_module)
        for node, copy in zip(form.captured.graph_module.graph.nodes, graph_module.graph.nodes, strict=True):
            copy.name = node.name  # a copy gives names of Python's own, such as `input`, a number
        plan = self._planned(form, rules)
        rewrite(graph_module, plan, replace(self._settings, rules=rules), Stages(), past_weights=not self._root)
        return graph_module

    def _made(
        self, number: int, batch: Arguments, form: _Form, graph_module: fx.GraphModule
    ) -> Iterator[tuple[str, Tensor]]:
        inputs = self._inputs(form, graph_module, batch)
        goal = self._goal
        interpreter = fx.Interpreter(graph_module, garbage_collect_values=True)
        with self._seeded(number), torch.set_grad_enabled(goal is not None):
            results = list(interpreter.run(*inputs))
            if goal is None:
                yield from _named(results)
                return
            loss = results[0]
            trained = self._trained(form, inputs)
            gradients, scale = _backward(loss, [one for _, one in trained], goal)
        yield LOSS, loss.detach()
        for (name, _), one in zip(trained, gradients, strict=True):
            if one is not None:
                yield f"the gradient of {name}", one.float() / scale

    # ---- inputs and outputs

    @contextmanager
    def _seeded(self, number: int) -> Iterator[None]:
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(SEED + number)
            yield

    def _inputs(self, form: _Form, graph_module: fx.GraphModule, batch: Arguments) -> list[Any]:
        """What a graph is given; what it writes to are copies."""
        written = written_roots(graph_module.graph, AliasGroups(graph_module.graph))
        writes = [node in written for node in graph_module.graph.find_nodes(op="placeholder")]
        inputs = inputs_for(form.inputs, pytree.tree_leaves(batch), form.leaves)
        return [
            one.detach().clone() if copied and isinstance(one, Tensor) else one
            for one, copied in zip(inputs, writes, strict=True)
        ]

    def _trained(self, form: _Form, inputs: Sequence[Any]) -> list[tuple[str, Tensor]]:
        trained: dict[int, tuple[str, Tensor]] = {}
        for entry, one in zip(form.captured.inputs, inputs, strict=True):
            if entry.source is Source.PARAMETER and isinstance(one, Tensor) and one.requires_grad:
                trained.setdefault(id(one), (entry.target.partition(".")[2], one))
        if not trained:
            raise AmpError(
                "the loss depends on no parameter that requires a gradient",
                hint="leave loss_fn away, so that the outputs are compared",
            )
        return list(trained.values())


def _named(results: Sequence[Any]) -> list[tuple[str, Tensor]]:
    tensors = [one for one in results if isinstance(one, Tensor)]
    if not tensors:
        raise AmpError("the model returns no tensor", hint="pass loss_fn=, or a model that returns one")
    return [(f"output {place}" if len(tensors) > 1 else "the output", one) for place, one in enumerate(tensors)]


def _casts_itself(graph_module: fx.GraphModule) -> bool:
    """Whether the model says itself what is 16-bit: with FP32 inputs its types would not fit one another."""
    arguments = (one for node in graph_module.graph.nodes for one in (*node.args, *node.kwargs.values()))
    return any(isinstance(one, torch.dtype) and one in LOW_TYPES for one in arguments)


def _backward(loss: Tensor, trained: Sequence[Tensor], goal: Goal) -> tuple[Sequence[Tensor | None], float]:
    """The scaled gradients, and the loss scale that they carry: that of the goal, or to which it had to fall."""
    scale = goal.scale
    while True:
        gradients = torch.autograd.grad(loss * scale, trained, allow_unused=True, retain_graph=goal.falls)
        finite = all(one is None or bool(torch.isfinite(one).all()) for one in gradients)
        if finite or not goal.falls or scale <= 1 or not bool(torch.isfinite(loss.detach())):
            return gradients, scale
        scale = max(scale / _FALL, 1.0)


def _check(named: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse what is not finite in FP32."""
    bad = next((name for name, one in named if not bool(torch.isfinite(one.detach()).all())), None)
    if bad is not None:
        raise AmpError(f"in FP32 {bad} is not finite", hint=NOT_FINITE)
