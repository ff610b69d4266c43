"""A step in subgraphs tried again, node by node, under its rules or others; nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError, first_line
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.ir.nonfinite import LOSS, NonfiniteNode, NonfiniteReport
from amp_compiler.planner.cures import Cure, Trial, find_cure, spoilt_inputs
from amp_compiler.policy.rules import RuleSet
from amp_compiler.training.subgraphs.step import SubgraphStep


class SubgraphStepTrials:
    """Runs one batch again and again, under several rules.

    Args:
        step: what runs it.
        batch: arguments of the loss function behind the model.
        optimizers: what is trained.
        scale: the loss scale, FP32 scalar.
    """

    def __init__(
        self, step: SubgraphStep, batch: tuple[Any, ...], optimizers: Sequence[torch.optim.Optimizer], scale: Tensor
    ) -> None:
        self._step, self._given = step, (batch, optimizers, scale)

    def report(self) -> NonfiniteReport:
        """What is not finite in a batch that has not run yet, and what fixes it.

        Raises:
            AmpError: it runs in plain FP32, or not even in subgraphs.
        """
        self._step.note_random_state()
        with autocast_off():
            nodes, computed = self._step.replayed(*self._given)
        bad = [name for name, one in computed.gradients.items() if not bool(torch.isfinite(one).all())]
        parameters = tuple(name.partition(".")[2] for name in bad)
        loss = () if bool(torch.isfinite(computed.loss)) else (LOSS,)
        if not nodes and not parameters and not loss:
            return NonfiniteReport()
        cure = self.cure(nodes)
        if not parameters and not loss and not cure.rule:
            return NonfiniteReport()  # FP32 has it too, and nothing comes of it
        return NonfiniteReport(parameters, nodes, True, loss, cure.rule, cure.message)

    def origins(self) -> tuple[NonfiniteNode, ...]:
        """The nodes of the last call, which was skipped, that made something that is not finite."""
        if self._step.subgraphs is None:
            return ()
        with autocast_off():
            return self._step.replayed(*self._given)[0]

    def cure(self, nodes: tuple[NonfiniteNode, ...]) -> Cure:
        """What fixes it.

        Args:
            nodes: what `origins` gave.
        """
        if self._step.subgraphs is None:
            return Cure(message="it runs in FP32 (enabled=False): no rule fixes it, the model or its data have to")
        first = Trial(self._step.whole_plan(), nodes)
        try:
            with autocast_off():
                return spoilt_inputs(nodes, {}) or find_cure(self._step.rules, first, self._tried)
        except (AmpError, RuntimeError) as error:  # memory may not do; the report itself does not depend on it
            return Cure(message=f"no rule was tried: {first_line(error)}")

    def _tried(self, rules: RuleSet) -> Trial:
        other = self._step.under(rules)
        nodes, _ = other.replayed(*self._given)
        return Trial(other.whole_plan(), nodes)
