"""A model's forward, run node by node under its rules or others; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from amp_compiler.backends.backend import DEFAULT
from amp_compiler.diagnose.subgraph_replay import SubgraphReplay
from amp_compiler.errors import AmpError, CaptureError, first_line
from amp_compiler.forward.program import EAGER
from amp_compiler.forward.settings import Settings
from amp_compiler.forward.subgraphs import Subgraph, Subgraphs, plan_of
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.errors import name_of, user_frame
from amp_compiler.fx.capture.export import twin
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.captured import Input, Source
from amp_compiler.ir.nonfinite import LOSS, SHOWN, NonfiniteNode, NonfiniteReport
from amp_compiler.planner.cures import Cure, Trial, find_cure, spoilt_inputs
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.inputs import depends_on_nothing
from amp_compiler.training.loss_module import ROOT

OUTPUT = "the output"


@dataclass(frozen=True)
class Observed(Trial):
    """What a run showed; its nodes are those that outputs or gradients that are not finite go back to.

    Args:
        swallowed: the same of all of the forward that is not finite, whether anything came of it or not.
        results: outputs that are not finite, in words.
        parameters: those whose gradient is not, of a step.
        names: what each placeholder is, in words.
    """

    swallowed: tuple[NonfiniteNode, ...]
    results: tuple[str, ...]
    parameters: tuple[str, ...]
    names: dict[str, str]


class ModelTrials:
    """Runs one batch through the graphs that Dynamo makes; what stands between them runs as it is written.

    Args:
        model: the module, in the mode in which it is to run.
        args: positional arguments.
        kwargs: keyword arguments.
        settings: the options.
    """

    _root = ""  # name of the model in what runs

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> None:
        self._model, self._args, self._kwargs = model, args, kwargs
        self._settings = replace(settings, dynamic_shapes=None, backend=EAGER, mode=DEFAULT)

    def report(self) -> NonfiniteReport:
        """What is not finite, and what fixes it.

        Raises:
            AmpError: the model raises with this batch, or no graph of it can be made.
        """
        rules = self._settings.rules
        seen = self._run(rules)
        if not seen.results and not seen.parameters:
            if not seen.swallowed:
                return NonfiniteReport()
            first = Trial(seen.plan, seen.swallowed)
            cure = find_cure(rules, first, lambda others: self._trial(others, swallowed=True))
            return self._report(seen.swallowed, cure) if cure.rule else NonfiniteReport()
        cure = spoilt_inputs(seen.nodes, seen.names) or find_cure(rules, seen, self._trial)
        return replace(self._report(seen.nodes, cure), parameters=seen.parameters, results=seen.results)

    def _report(self, nodes: tuple[NonfiniteNode, ...], cure: Cure) -> NonfiniteReport:
        return NonfiniteReport((), nodes[:SHOWN], (), cure.rule, cure.message)

    def _trial(self, rules: RuleSet, *, swallowed: bool = False) -> Trial:
        seen = self._run(rules)
        return Trial(seen.plan, seen.swallowed if swallowed else seen.nodes)

    def _run(self, rules: RuleSet) -> Observed:
        replay, name = SubgraphReplay(), name_of(self._model)

        def around(graph: str, graph_module: torch.fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *inputs: replay.run(graph, graph_module, inputs)

        model = twin(self._model)
        subgraphs = Subgraphs(model, replace(self._settings, rules=rules), name, around, root=self._root)
        try:
            with autocast_off(), generators_kept(), buffers_kept(model):
                results, parameters = self._spoilt(subgraphs)
        except AmpError:
            raise
        except Exception as error:  # the model's own code may raise anything
            raise AmpError(
                f"{name} raised {type(error).__name__}: {first_line(error)}",
                where=user_frame(error),
                hint="call the model itself with this batch first",
            ) from error
        graphs = subgraphs.graphs
        if not graphs:
            raise CaptureError(f"{name} ran {subgraphs.without}", hint="call it where torch.compile is on")
        plan = plan_of(graphs)
        replay.several = len(graphs) > 1
        return Observed(
            plan, replay.origins(plan), replay.origins(plan, swallowed=True), results, parameters, _names(graphs)
        )

    def _spoilt(self, subgraphs: Subgraphs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the model returns that is not finite, in words, and no parameters: its backward does not run."""
        output = subgraphs(self._args, self._kwargs)
        results = tuple(
            f"{OUTPUT}{pytree.keystr(path)}"
            for path, one in pytree.tree_flatten_with_path(output)[0]
            if isinstance(one, Tensor) and one.is_floating_point() and not bool(torch.isfinite(one).all())
        )
        return results, ()


class StepSubgraphTrials(ModelTrials):
    """Those of a training step with graph breaks: the loss as a module, which returns it with what goes with it.

    Args:
        module: the loss as a module.
        batch: its arguments.
        settings: the options.
        scale: what the loss is multiplied by.
    """

    _root = ROOT

    def __init__(self, module: nn.Module, batch: tuple[Any, ...], settings: Settings, scale: float) -> None:
        super().__init__(module, batch, {}, settings)
        self._scale = scale

    def _spoilt(self, subgraphs: Subgraphs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The loss where it is not finite, in words, and the parameters whose gradient is not."""
        with torch.enable_grad():
            loss, *_ = subgraphs(self._args, self._kwargs)
        if not loss.requires_grad:
            raise depends_on_nothing()
        trained = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        gradients = torch.autograd.grad(loss.float() * self._scale, list(trained.values()), allow_unused=True)
        parameters = tuple(
            name
            for name, gradient in zip(trained, gradients, strict=True)
            if gradient is not None and not bool(torch.isfinite(gradient).all())
        )
        return () if bool(torch.isfinite(loss)) else (LOSS,), parameters


def _names(graphs: Sequence[Subgraph]) -> dict[str, str]:
    """What each input of the graphs is, in words."""
    prefixes = [f"graph{number}/" for number in range(len(graphs))] if len(graphs) > 1 else [""]
    return {
        prefix + entry.name: _name(entry)
        for prefix, one in zip(prefixes, graphs, strict=True)
        for entry in one.captured.inputs
    }


def _name(entry: Input) -> str:
    path = entry.target.removeprefix("kw").removeprefix("args")
    if entry.source is Source.USER and path != entry.target:
        return f"the batch itself (argument {path})"
    kinds = {Source.PARAMETER: "the parameter", Source.BUFFER: "the buffer", Source.USER: "the value"}
    return f"{kinds.get(entry.source, 'the constant')} {entry.target or entry.name}"


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
