"""A model with graph breaks, its subgraphs run node by node under its rules or others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from amp_compiler.diagnose.model_trials import OUTPUT, ModelTrials, Observed, Tried, buffers_kept
from amp_compiler.diagnose.subgraph_replay import SubgraphReplay
from amp_compiler.errors import AmpError, CaptureError, first_line
from amp_compiler.forward.subgraphs import Subgraphs, plan_of
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.errors import name_of, user_frame
from amp_compiler.fx.capture.export import twin
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.ir.nonfinite import LOSS
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.inputs import depends_on_nothing
from amp_compiler.training.loss_module import ROOT


class SubgraphTrials(ModelTrials):
    """Runs one batch through the subgraphs; what stands between them runs as it is written.

    Args:
        tried: model, batch and options.
        cause: why it is no one graph.
    """

    _root = ""  # name of the model in what runs

    def __init__(self, tried: Tried, cause: CaptureError) -> None:
        super().__init__(tried)
        self._cause = cause

    def _run(self, rules: RuleSet) -> Observed:
        replay = SubgraphReplay()

        def around(name: str, graph_module: torch.fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *inputs: replay.run(name, graph_module, inputs)

        model = twin(self._model)
        subgraphs = Subgraphs(model, self._tried.under(rules), name_of(self._model), around, root=self._root)
        try:
            with autocast_off(), generators_kept(model), buffers_kept(model):
                results, parameters = self._spoilt(subgraphs)
        except AmpError:
            raise
        except Exception as error:  # the model's own code may raise anything
            raise AmpError(
                f"{name_of(self._model)} raised {type(error).__name__}: {first_line(error)}",
                where=user_frame(error),
                hint="call the model itself with this batch first",
            ) from error
        plan = plan_of(subgraphs.made)
        nodes = replay.origins(plan)
        return Observed(plan, nodes, nodes, results, parameters, {})

    def _spoilt(self, subgraphs: Subgraphs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What the model returns that is not finite, in words, and no parameters: its backward does not run."""
        with torch.no_grad():
            output = subgraphs(self._tried.args, self._tried.kwargs)
        results = tuple(
            f"{OUTPUT}{pytree.keystr(path)}"
            for path, one in pytree.tree_flatten_with_path(output)[0]
            if isinstance(one, Tensor) and one.is_floating_point() and not bool(torch.isfinite(one).all())
        )
        return results, ()


class StepSubgraphTrials(SubgraphTrials):
    """Those of a training step: the loss as a module, which returns it with what goes with it.

    Args:
        tried: loss module, batch and options.
        cause: why it is no one graph.
        scale: what the loss is multiplied by.
    """

    _root = ROOT

    def __init__(self, tried: Tried, cause: CaptureError, scale: float) -> None:
        super().__init__(tried, cause)
        self._scale = scale

    def _spoilt(self, subgraphs: Subgraphs) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The loss where it is not finite, in words, and the parameters whose gradient is not."""
        with torch.enable_grad():
            loss, *_ = subgraphs(self._tried.args, self._tried.kwargs)
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
