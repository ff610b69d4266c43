"""`AmpTrainer`: the Trainer of transformers, whose training step is one graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError
from amp_compiler.forward.settings import device_of, make_settings
from amp_compiler.training.api import training_step
from amp_compiler.training.step import TrainingStep

try:
    import accelerate as accelerate  # which its Trainer needs
    from transformers import Trainer
except ImportError as missing:
    raise AmpError("transformers or accelerate is not installed", hint="pip install transformers[torch]") from missing

_STATE = "amp_step.pt"  # in a checkpoint, beside optimizer.pt


def _updated(closure: Any = None) -> None:
    """What the loop calls to update the weights: they are."""


_updated._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers ask whether a step comes before theirs


class AmpTrainer(Trainer):  # type: ignore[misc]
    """A `Trainer` that trains by `amp.training_step`: forward, loss, backward, clipping and update are one graph.

    `gradient_accumulation_steps`, `max_grad_norm`, schedulers, callbacks, evaluation, checkpoints and
    `compute_loss` of a class that derives from it work as ever. Leave `bf16` and `fp16` of the arguments out.

    Args:
        *args: as for `Trainer`.
        amp_options: options of `amp.training_step`, such as `{"dtype": "bf16", "rules": "my_rules.yaml"}`.
        **kwargs: as for `Trainer`.

    Raises:
        AmpError: the arguments ask for what it cannot do.
    """

    def __init__(self, *args: Any, amp_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._amp_options = dict(amp_options or {})
        self._amp_settings = make_settings(dtype=self._amp_options.get("dtype", "auto"))
        self._amp_step: TrainingStep | None = None
        self._amp_optimizer: Any = None
        self._amp_state: dict[str, Any] | None = None  # of a checkpoint, for the step to come
        self._amp_gathered = 0
        if self.args.bf16 or self.args.fp16:
            raise AmpError(
                "bf16 and fp16 of TrainingArguments are torch.autocast's",
                hint="leave them out and write AmpTrainer(amp_options={'dtype': 'bf16'})",
            )
        if self.args.world_size > 1 or self.args.n_gpu > 1:
            raise AmpError(
                "AmpTrainer trains in one process on one device",
                hint="give the plain Trainer amp.compile(model), which it spreads",
            )

    def _amp_begin(self, model: Any) -> TrainingStep:
        optimizer = self.optimizer.optimizer  # behind Accelerate's
        if self._amp_step is None or self._amp_optimizer is not optimizer:
            options = {
                "clip_norm": self.args.max_grad_norm or None,
                "accumulate": self.args.gradient_accumulation_steps,
                **self._amp_options,
            }
            self._amp_step, self._amp_gathered = training_step(model, self._amp_loss, optimizer, **options), 0
            self._amp_optimizer, self.optimizer.step, self.optimizer._opt_called = optimizer, _updated, True
            if self._amp_state is not None:
                self._amp_step.load_state_dict(self._amp_state)
                self._amp_state = None
        return self._amp_step

    def _amp_loss(self, model: Any, inputs: dict[str, Any], items: Any, weight: Tensor | None) -> Tensor:
        loss: Tensor = self.compute_loss(model, inputs, num_items_in_batch=items)
        return loss if weight is None else loss * weight

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train on one batch; the last one of an update updates the weights."""
        model.train()
        inputs, step = dict(self._prepare_inputs(inputs)), self._amp_begin(model)
        every, gathered = self.args.gradient_accumulation_steps, self.current_gradient_accumulation_steps
        self._amp_gathered = (self._amp_gathered + 1) % gathered
        if self._amp_gathered == 0:
            step.update_next()
        weight = None
        if every > 1:  # the step averages over all; behind the last batches of an epoch there may be fewer
            scaled = self.loss_is_scaled_for_ga
            if scaled is None:
                counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
                scaled = counted or self.compute_loss_func is not None
            weight = torch.tensor(float(every) if scaled else every / gathered, device=device_of(inputs.values()))
        loss: Tensor = step(inputs, num_items_in_batch, weight) / every
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        return None  # part of the step

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return None if self._amp_step is None else self._amp_step.grad_norm

    def compute_loss_context_manager(self) -> torch.autocast:
        """Evaluation and prediction run under `torch.autocast`."""
        return self._amp_settings.autocast(self.args.device)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._amp_step is not None:
            torch.save(self._amp_step.state_dict(), Path(output_dir) / _STATE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (path := Path(checkpoint) / _STATE).is_file():
            self._amp_state = torch.load(path, map_location="cpu", weights_only=True)
