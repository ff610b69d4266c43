"""A model that is no one graph, its pieces run node by node under its rules or others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from amp_compiler.diagnose.model_trials import OUTPUT, Tried
from amp_compiler.errors import AmpError, CaptureError, first_line
from amp_compiler.forward.graph_breaks import Pieces
from amp_compiler.fx.attribute_writes import restored
from amp_compiler.fx.autocast_state import autocast_off
from amp_compiler.fx.capture_errors import name_of, user_frame
from amp_compiler.fx.generators import generators_kept
from amp_compiler.fx.python_walk import python_state
from amp_compiler.ir.nonfinite import NonfiniteNode, NonfiniteReport
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.planner.cures import Trial, find_cure, spoilt_inputs
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.piece_replay import PieceReplay


@dataclass(frozen=True)
class _Seen:
    plan: PrecisionPlan
    nodes: tuple[NonfiniteNode, ...]
    results: tuple[str, ...]
    parameters: tuple[str, ...]


class ModelPieceTrials:
    """Runs one batch through the pieces; `ModelTrials` is for a model that is one graph.

    What stands between the pieces runs as it is written.

    Args:
        tried: model, batch and options.
        cause: why it is no one graph.
    """

    def __init__(self, tried: Tried, cause: CaptureError) -> None:
        self._tried, self._model, self._backward, self._cause = tried, tried.model, tried.backward, cause

    def report(self) -> NonfiniteReport:
        """What is not finite, and what mends it.

        Raises:
            AmpError: the model cannot be run in pieces either.
        """
        rules = self._tried.settings.rules
        seen = self._run(rules)
        if not seen.results and not seen.parameters:
            return NonfiniteReport()  # what only forward has, and nothing comes of
        first = Trial(seen.plan, seen.nodes)
        cure = spoilt_inputs(seen.nodes, {}) or find_cure(rules, first, self._trial)
        return NonfiniteReport(seen.parameters, seen.nodes, True, seen.results, cure.rule, cure.told)

    def _trial(self, rules: RuleSet) -> Trial:
        seen = self._run(rules)
        return Trial(seen.plan, seen.nodes if seen.results or seen.parameters else ())

    def _run(self, rules: RuleSet) -> _Seen:
        replay = PieceReplay()

        def around(name: str, graph_module: torch.fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *inputs: replay.run(name, graph_module, inputs)

        pieces = Pieces(self._model, self._tried.under(rules), self._cause, self._tried.device, around)
        try:
            with autocast_off(), generators_kept(self._model), _unchanged(self._model):
                with torch.set_grad_enabled(self._backward is not None):
                    output = pieces(self._tried.args, self._tried.kwargs)
                results = tuple(
                    f"{OUTPUT}{pytree.keystr(path)}"
                    for path, one in pytree.tree_flatten_with_path(output)[0]
                    if isinstance(one, Tensor) and one.is_floating_point() and not bool(torch.isfinite(one).all())
                )
                parameters = () if results or self._backward is None else self._gradients(self._backward.start(output))
        except AmpError:
            raise
        except Exception as error:  # the model's own code may raise anything
            raise AmpError(
                f"{name_of(self._model)} raised {type(error).__name__}: {first_line(error)}",
                where=user_frame(error),
                hint="call the model itself with this batch first",
            ) from error
        return _Seen(pieces.plan, replay.origins(pieces.plan), results, parameters)

    def _gradients(self, loss: Tensor) -> tuple[str, ...]:
        """The parameters whose gradient is not finite."""
        trained = {name: one for name, one in self._model.named_parameters() if one.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        return tuple(
            name
            for name, one in zip(trained, gradients, strict=True)
            if one is not None and not bool(torch.isfinite(one).all())
        )


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """What the model writes to its buffers and attributes is undone."""
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        with restored(python_state(model)):
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
