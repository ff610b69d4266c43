"""What is built of a training step for one batch to be looked at, and not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from amp_compiler.forward.counting import CountingProgram
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.training.dry import DryStep, build_dry
from amp_compiler.training.loss_module import LossModule
from amp_compiler.training.program_choice import ProgramChoice
from amp_compiler.training.reporting.counting import build_counting
from amp_compiler.training.setup import StepSetup
from amp_compiler.training.step_hooks import check_hooks
from amp_compiler.training.trial import StepTrials
from amp_compiler.training.weights import widened


class StepInspection:
    """The part of `TrainingStep` that builds what `amp.find_nonfinite`, `amp.profile` and `amp.tune` run."""

    _setup: StepSetup
    _choice: ProgramChoice

    def graph_for(self, *batch: Any) -> DryStep:
        """The graph of a step for a batch, which is neither compiled nor run; for reading, of any size.

        Model and batch may lie on torch's meta device. Weights are converted as the first call does it. Of several
        ranks nothing is sent, so that the others may be those of a fake process group.

        Args:
            batch: what stands behind `model` in `loss_fn`.

        Raises:
            CaptureError: the loss cannot be captured as one graph.

        Example:
            >>> import torch, amp_compiler as amp
            >>> model = torch.nn.Linear(4096, 4096, device="meta")
            >>> step = amp.training_step(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), 0.1),
            ...                          dtype="bf16")
            >>> graph = step.graph_for(torch.empty(8, 4096, device="meta")).graph_module.graph
            >>> sum(node.target is torch.ops.amp_compiler.sgd_update.default for node in graph.nodes)
            1
        """
        self._check_hooks()
        with autocast_off(), building():
            return build_dry(self._setup.module, batch, self._choice.options("", []), self._setup.state)

    def _counting(self, batch: tuple[Any, ...], *, with_weights: bool = False) -> CountingProgram:
        """What counts exponents for batches like this one, see `diagnose.run` and `training.reporting.counting`."""
        self._check_hooks()
        with autocast_off(), building():
            options = self._choice.options("")
            return build_counting(self._setup.module, batch, options, self._setup.state, with_weights=with_weights)

    def _trials(self, batch: tuple[Any, ...]) -> StepTrials:
        self._check_hooks()
        return StepTrials(self._setup.module, batch, self._choice.options(""), self._setup.state)

    @contextmanager
    def _in_fp32(self) -> Iterator[LossModule]:
        """Within it the loss as a module, all of its parameters in FP32, as it is captured."""
        self._check_hooks()
        module = self._setup.module
        module.adopt(self._setup.optimizers)
        with widened(module.parameters()):
            yield module

    def _check_hooks(self) -> None:
        check_hooks(self._setup.optimizers, self._setup.between)
