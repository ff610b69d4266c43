"""The models and the variants of a training step that `train_step.py` measures, and how it measures them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import models
import torch
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

FP32, AUTOCAST, COMPILED, OURS = VARIANTS = ("fp32", "autocast", "torch.compile", "amp_compiler")
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BOUNDS = ("gemm", "update")  # what a step spends its time on: a large batch, a small one
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """How large one model of the benchmark is, and its large and small batch; images have no tokens."""

    hidden: int
    layers: int
    gemm_batch: int
    update_batch: int
    tokens: int = 64
    update_tokens: int = 16
    vocab: int = 4096
    image: int = 64

    def size(self, bound: str) -> models.Size:
        """The same as `models.py` wants it."""
        large = bound == "gemm"
        batch, tokens = (self.gemm_batch, self.tokens) if large else (self.update_batch, self.update_tokens)
        return models.Size(self.vocab, self.hidden, self.layers, 8, batch, tokens, self.image, classes=100)


SHAPES = {
    "gpt2": Shape(hidden=768, layers=2, gemm_batch=4, update_batch=1),
    "bert": Shape(hidden=768, layers=2, gemm_batch=4, update_batch=1),
    "llama": Shape(hidden=768, layers=2, gemm_batch=4, update_batch=1),
    "vit": Shape(hidden=768, layers=2, gemm_batch=4, update_batch=1),
    "resnet50": Shape(hidden=256, layers=0, gemm_batch=4, update_batch=1),
    "lstm": Shape(hidden=512, layers=2, gemm_batch=16, update_batch=1, tokens=16, update_tokens=4),
    "mlp": Shape(hidden=2048, layers=4, gemm_batch=256, update_batch=4),
}
IMAGES = ("vit", "resnet50", "mlp")


class WideMlp(nn.Module):
    """Wide linear layers with GELU between them, and cross-entropy."""

    def __init__(self, size: models.Size) -> None:
        super().__init__()
        layers = [layer for _ in range(size.layers) for layer in (nn.Linear(size.hidden, size.hidden), nn.GELU())]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(size.hidden, size.classes)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(inputs))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def build(name: str, bound: str, device: str) -> models.Built:
    """A model in train mode and a batch for it, the same ones on every call."""
    size = SHAPES[name].size(bound)
    if name == "mlp":
        torch.manual_seed(0)
        inputs = torch.randn(size.batch, size.hidden)
        model: nn.Module = WideMlp(size)
        batch = {"inputs": inputs, "labels": torch.randint(0, size.classes, (size.batch,))}
    else:
        models.SIZES["train_step"] = size
        model, batch = models.build(name, "train_step")
    return model.train().to(device), {key: value.to(device) for key, value in batch.items()}


def items(name: str, bound: str) -> int:
    """Images or tokens in one batch."""
    size = SHAPES[name].size(bound)
    return size.batch if name in IMAGES else size.batch * size.tokens


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch)["loss"]  # type: ignore[no-any-return]


class Variant:
    """One way to train: call it for one step. `idle` frees what its user's loop would free between steps."""

    def __init__(self, variant: str, name: str, bound: str, dtype: str, device: str) -> None:
        model, self.batch = build(name, bound, device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        self.run = self._ours(model, dtype) if variant == OURS else self._torch(model, variant, dtype, device)

    def __call__(self) -> torch.Tensor:
        return self.run()

    def idle(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def _ours(self, model: nn.Module, dtype: str) -> Step:
        step = amp.training_step(model, loss_of, self.optimizer, dtype=dtype)
        return lambda: step(self.batch)

    def _torch(self, model: nn.Module, variant: str, dtype: str, device: str) -> Step:
        context = contextlib.nullcontext if variant == FP32 else lambda: torch.autocast(device, TORCH_TYPES[dtype])
        forward = torch.compile(loss_of) if variant == COMPILED else loss_of
        scaler = torch.amp.GradScaler(device, enabled=dtype == "fp16" and variant != FP32)

        def step() -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            with context():
                loss = forward(model, self.batch)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            return loss.detach()

        return step


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(
    variants: dict[str, Variant], steps: int, device: str, seconds: float = 40.0
) -> dict[str, tuple[float, float, float]]:
    """Median, 10% and 90% quantile of the milliseconds of a step: one step of each variant in turn."""
    times: dict[str, list[float]] = {variant: [] for variant in variants}
    end = time.perf_counter() + seconds
    for number in range(steps + 3):
        for variant, step in variants.items():
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            if number >= 3:
                times[variant].append(1000 * (time.perf_counter() - start))
        if number >= 8 and time.perf_counter() > end:
            break
    return {variant: _spread(values) for variant, values in times.items()}


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
    return statistics.median(values), tenths[0], tenths[-1]


@dataclass(frozen=True)
class Memory:
    """What one variant needs, measured in a process of its own.

    Args:
        first_call_s: seconds of the first step, compilation included, without a cache of compiled code.
        state_bytes: bytes of all tensors that are alive between two steps.
        growth_bytes: by how much a step exceeds that at its worst moment.
    """

    first_call_s: float
    state_bytes: int
    growth_bytes: int

    @property
    def peak_bytes(self) -> int:
        return self.state_bytes + self.growth_bytes


def measure_memory(step: Variant, device: str) -> Memory:
    """Run a few steps. On a CPU the growth is that of the process's resident pages (VmHWM), else of the allocator."""
    start = time.perf_counter()
    step()
    synchronize(device)
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    step.idle()
    gc.collect()
    state = _live_bytes()
    if device == "cuda":
        synchronize(device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        synchronize(device)
        return Memory(first, state, torch.cuda.max_memory_allocated() - before)
    return Memory(first, state, statistics.median_low([_resident_growth(step) for _ in range(3)]))


def _resident_growth(step: Variant) -> int:
    step.idle()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets VmHWM back to VmRSS
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.MULTILINE)
    return 1024 * int(found[1]) if found else 0


def _live_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, nn.Parameter) and item.layout is torch.strided:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
