"""A model's forward, run node by node under its rules or others; nothing is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from amp_compiler.backends.backend import DEFAULT
from amp_compiler.forward.program import EAGER, plan_captured, rewrite
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.export import capture_module
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.captured import Captured, Source, tensor_getter
from amp_compiler.fx.checkpoints import refused_checkpoints
from amp_compiler.fx.finiteness import Replay
from amp_compiler.fx.graph import results_of, torch_dtype
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.nonfinite import SHOWN, NonfiniteNode, NonfiniteReport
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.planner.cures import Cure, Trial, find_cure, spoilt_inputs
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.reporting.nonfinite import described, in_order

OUTPUT = "the output"


@dataclass(frozen=True)
class Observed:
    """What a run showed.

    Args:
        plan: what ran.
        nodes: the first nodes that broke, of those that outputs or gradients that are not finite go back to.
        swallowed: the same of all of the forward that is not finite, whether anything came of it or not.
        results: outputs that are not finite, in words.
        parameters: those whose gradient is not, of a step.
        names: what each placeholder is, in words.
    """

    plan: PrecisionPlan
    nodes: tuple[NonfiniteNode, ...]
    swallowed: tuple[NonfiniteNode, ...]
    results: tuple[str, ...]
    parameters: tuple[str, ...]
    names: dict[str, str]


@dataclass(frozen=True)
class Tried:
    """What is run again and again, under several rules.

    Args:
        model: the module, in the mode in which it is to run.
        args: positional arguments.
        kwargs: keyword arguments.
        settings: the options.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: Settings

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return device_of([*pytree.tree_leaves((self.args, self.kwargs)), *self.model.parameters()])

    def under(self, rules: RuleSet) -> Settings:
        """The options to run it node by node, under these rules."""
        return replace(self.settings, rules=rules, dynamic_shapes=None, backend=EAGER, mode=DEFAULT)


class ModelTrials:
    """Runs one batch through one graph.

    Args:
        tried: model, batch and options.
    """

    def __init__(self, tried: Tried) -> None:
        self._tried, self._model, self._args = tried, tried.model, tried.args
        self._kwargs = dict(sorted(tried.kwargs.items()))
        self._leaves, _ = pytree.tree_flatten((self._args, self._kwargs))
        self._device = tried.device

    def report(self) -> NonfiniteReport:
        """What is not finite, and what fixes it.

        Raises:
            CaptureError: the module is no one graph.
        """
        rules = self._tried.settings.rules
        seen = self._run(rules)
        if not seen.results and not seen.parameters:
            if not seen.swallowed:
                return NonfiniteReport()
            first = Trial(seen.plan, seen.swallowed)
            cure = find_cure(rules, first, lambda others: self._trial(others, swallowed=True))
            return self._report(seen.swallowed, cure) if cure.rule else NonfiniteReport()
        cure = spoilt_inputs(seen.nodes, seen.names) or find_cure(rules, Trial(seen.plan, seen.nodes), self._trial)
        return replace(self._report(seen.nodes, cure), parameters=seen.parameters, results=seen.results)

    def _report(self, nodes: tuple[NonfiniteNode, ...], cure: Cure) -> NonfiniteReport:
        return NonfiniteReport((), nodes[:SHOWN], True, (), cure.rule, cure.message)

    def _trial(self, rules: RuleSet, *, swallowed: bool = False) -> Trial:
        seen = self._run(rules)
        return Trial(seen.plan, seen.swallowed if swallowed else seen.nodes)

    def _run(self, rules: RuleSet) -> Observed:
        kept = generators_kept(self._model, self._args, self._kwargs)
        with autocast_off(), building(), kept, buffers_kept(self._model):
            captured, plan = self._rewritten(self._tried.under(rules))
            inputs = [
                self._leaves[entry.index]
                if entry.source is Source.USER
                else tensor_getter(self._model, captured, entry)()
                for entry in captured.inputs
            ]
            return self._forward(captured, plan, inputs)

    def _rewritten(self, settings: Settings) -> tuple[Captured, PrecisionPlan]:
        low = settings.low(self._device)
        with refused_checkpoints():
            captured = capture_module(self._model, self._args, self._kwargs, None, torch_dtype(low))
        plan = plan_captured(captured, settings, low)
        rewrite(captured.graph_module, plan, settings, Stages())
        return captured, plan

    def _forward(self, captured: Captured, plan: PrecisionPlan, inputs: list[Any]) -> Observed:
        graph = captured.graph_module.graph
        values = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        replayed = Replay(captured.graph_module).run_again(values, self._device)
        count = captured.out_spec.num_leaves
        paths = pytree.tree_flatten_with_path(pytree.tree_unflatten([0] * count, captured.out_spec))[0]
        named = {
            f"{OUTPUT}{pytree.keystr(path)}": node
            for (path, _), node in zip(paths, results_of(graph)[:count], strict=True)
            if isinstance(node, torch.fx.Node)
        }
        origins = {name: replayed.origins([node]) for name, node in named.items()}
        broken = {node for bad in origins.values() for node in bad}
        descriptions = {
            node: described(node, is_forward=True, ranges=replayed.ranges, plan=plan)
            for node in broken | replayed.origins(replayed.bad)
        }
        return Observed(
            plan,
            tuple(descriptions[node] for node in in_order(graph, broken)),
            tuple(descriptions[node] for node in in_order(graph, descriptions)),
            tuple(name for name, bad in origins.items() if bad),
            (),
            self._names(captured),
        )

    def _names(self, captured: Captured) -> dict[str, str]:
        paths = [path for path, _ in pytree.tree_flatten_with_path((self._args, self._kwargs))[0]]
        kinds = {Source.PARAMETER: "the parameter", Source.BUFFER: "the buffer"}
        return {
            entry.name: f"the batch itself (argument {pytree.keystr(paths[entry.index][1:])})"
            if entry.source is Source.USER
            else f"{kinds.get(entry.source, 'the constant')} {entry.target or entry.name}"
            for entry in captured.inputs
        }


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """What the model writes to its buffers is undone."""
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
