"""The variants of a training step that `train_step.py` measures."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from cases import build, loss_of
from comparison import FP8, FP32, compiled, mode_of_ours
from measuring import TORCH_TYPES
from torch import nn

import amp_compiler as amp

Step = Callable[[], torch.Tensor]


class Variant:
    """One way to train: call it for one step. `idle` frees what its user's loop would free between steps."""

    def __init__(self, variant: str, name: str, bound: str, dtype: str, device: str) -> None:
        model, self.batch = build(name, bound, device)
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        mode = mode_of_ours(variant)
        rules = "fp8" if variant == FP8 else "default"
        self.run = self._torch(model, variant, dtype, device) if mode is None else self._ours(model, dtype, mode, rules)

    def __call__(self) -> torch.Tensor:
        return self.run()

    def idle(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _ours(self, model: nn.Module, dtype: str, mode: str, rules: str) -> Step:
        step = amp.training_step(model, loss_of, self.optimizer, dtype=dtype, mode=mode, rules=rules)
        return lambda: step(self.batch)

    def _torch(self, model: nn.Module, variant: str, dtype: str, device: str) -> Step:
        context = contextlib.nullcontext if variant == FP32 else lambda: torch.autocast(device, TORCH_TYPES[dtype])
        forward = compiled(loss_of, variant)
        scaler = torch.amp.GradScaler(device, enabled=dtype == "fp16" and variant != FP32)

        def step() -> torch.Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            self.optimizer.zero_grad(set_to_none=True)
            with context():
                loss = forward(model, self.batch)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            return loss.detach()

        return step
