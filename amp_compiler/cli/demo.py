"""The demo: two small CNNs learn handwritten digits in FP32, with `torch.autocast` and with `amp.training_step`."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from amp_compiler.errors import AmpError
from amp_compiler.forward.api import compile
from amp_compiler.forward.autocast import CastCounter
from amp_compiler.forward.settings import make_settings
from amp_compiler.fx.step_graph import step_graph_of
from amp_compiler.report.table import human_bytes
from amp_compiler.training.api import training_step
from amp_compiler.training.step import TrainingStep

BATCH = 64
WARM_UP = 3  # steps that the median leaves out: compilation, and the allocator's first requests
FP32, AUTOCAST, STEP = "FP32", "torch.autocast", "amp.training_step"


@dataclass(frozen=True)
class DemoRow:
    """What one training run showed.

    Args:
        model: which of the two networks.
        mode: FP32, torch.autocast or amp.training_step.
        accuracy: share of the test images that were read right.
        ms_per_step: median over the steps, without the first few.
        cast_bytes: bytes that casts move in one forward.
    """

    model: str
    mode: str
    accuracy: float
    ms_per_step: float
    cast_bytes: int


@dataclass(frozen=True)
class Digits:
    """The images (N, 1, 8, 8) in [0, 1] and their labels, on the device."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


class SmallCnn(nn.Module):
    """Three convolutions and two linear layers.

    Args:
        batch_norm: put a BatchNorm behind every convolution.
        width: channels of the first convolution.
    """

    def __init__(self, batch_norm: bool, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((1, width), (width, 2 * width), (2 * width, 2 * width)):
            layers.append(nn.Conv2d(inputs, outputs, 3, padding=1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm2d(outputs))
            layers.append(nn.ReLU())
        self.features = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(32 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The logits of the ten digits."""
        return self.head(self.features(images))  # type: ignore[no-any-return]


def load_digits(device: torch.device | str = "cpu", train_images: int | None = None) -> Digits:
    """scikit-learn's handwritten digits, a quarter of them held back for the test, split the same way every time.

    Args:
        device: where the tensors go.
        train_images: keep only so many images for training.

    Raises:
        AmpError: where scikit-learn is not installed.
    """
    try:
        from sklearn import datasets, model_selection
    except ImportError as cause:
        raise AmpError(
            "the demo's images come with scikit-learn, which is not installed", hint="pip install 'amp_compiler[demo]'"
        ) from cause
    data = datasets.load_digits()
    parts = model_selection.train_test_split(
        data.images.astype("float32") / 16, data.target, test_size=0.25, random_state=0, stratify=data.target
    )
    train, test, train_labels, test_labels = (torch.from_numpy(part).to(device) for part in parts)
    return Digits(train[:train_images, None], train_labels[:train_images], test[:, None], test_labels)


def run_demo(
    *,
    epochs: int = 10,
    device: str = "auto",
    backend: Any = "inductor",
    console: Console | None = None,
    train_images: int | None = None,
) -> list[DemoRow]:
    """Train, show the progress, print the table.

    Args:
        epochs: passes over the training images.
        device: `cpu`, `cuda`, or `auto`: the GPU where there is one.
        backend: what runs the step that `amp.training_step` made.
        console: where to print; the standard output by default.
        train_images: use only so many training images, for a quick run.

    Returns:
        One row per network and mode.

    Raises:
        AmpError: scikit-learn or the device is missing.
    """
    console = console or Console()
    place = _device(device)
    low = make_settings(dtype="auto").low(place)
    data = load_digits(place, train_images)
    steps = epochs * (len(data.train_images) // BATCH)
    if steps <= WARM_UP:
        raise AmpError(f"{steps} training steps are too few to time", hint="train more epochs")
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<38}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    rows = []
    with Progress(*columns, console=console) as progress:
        for batch_norm in (True, False):
            for mode in (FP32, AUTOCAST, STEP):
                name = "BatchNorm CNN" if batch_norm else "plain CNN"
                task = progress.add_task(f"{name}, {mode}", total=steps)
                run = _Run(name, mode, place, getattr(torch, low.value), backend)
                rows.append(run.train(batch_norm, data, steps, functools.partial(progress.advance, task)))
    console.print(
        _table(rows, f"{low.short} on {place.type}, {steps} steps of {BATCH} images, amp.training_step by {backend}")
    )
    return rows


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise AmpError("torch sees no CUDA device", hint="use --device cpu, or install a torch build with CUDA")
    return torch.device(name)


@dataclass(frozen=True)
class _Run:
    """One network in one mode."""

    name: str
    mode: str
    device: torch.device
    low: torch.dtype
    backend: Any

    def train(self, batch_norm: bool, data: Digits, steps: int, advance: Callable[[], object]) -> DemoRow:
        """Train from the same start and on the same batches as every other mode, then test."""
        torch.manual_seed(0)
        model = SmallCnn(batch_norm).to(self.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = self._step(model, optimizer)
        order = _batches(len(data.train_labels), steps)
        times = []
        for index in order:
            images, labels = data.train_images[index], data.train_labels[index]
            start = self._now()
            step(images, labels)
            times.append(self._now() - start)
            advance()
        return DemoRow(
            self.name,
            self.mode,
            accuracy=self._test(model, data),
            ms_per_step=1000 * statistics.median(times[WARM_UP:]),
            cast_bytes=self._cast_bytes(step, model, data.train_images[order[0]], data.train_labels[order[0]]),
        )

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., object]:
        if self.mode == STEP:
            return training_step(model, _loss, optimizer, dtype=self.low, backend=self.backend)
        # FP16 gradients underflow without a scale; for the other types the scaler is told to do nothing.
        scaler = torch.amp.GradScaler(self.device.type, enabled=self.mode != FP32 and self.low is torch.float16)

        def step(images: torch.Tensor, labels: torch.Tensor) -> None:
            optimizer.zero_grad()
            with self._autocast():
                loss = _loss(model, images, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.mode == AUTOCAST:
            return torch.autocast(self.device.type, dtype=self.low)
        return contextlib.nullcontext()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _cast_bytes(
        self, step: Callable[..., object], model: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> int:
        """Bytes cast by one forward."""
        if isinstance(step, TrainingStep):
            return sum(cast.bytes for cast in step_graph_of(step.graph_module).casts if cast.phase == "forward")
        if self.mode == AUTOCAST:
            with self._autocast(), CastCounter() as counter:
                _loss(model, images, labels)
            return int(counter.cast_bytes)
        return 0

    def _test(self, model: nn.Module, data: Digits) -> float:
        model.eval()
        # In the types that it was trained in; one batch is not worth compiling for.
        run = compile(model, dtype=self.low, backend="eager") if self.mode == STEP else model
        with torch.no_grad(), self._autocast():
            right = run(data.test_images).argmax(1) == data.test_labels
        return float(right.float().mean())


def _loss(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(images), labels)


def _batches(images: int, steps: int) -> list[torch.Tensor]:
    """Indices of `steps` full batches, shuffled anew at each pass, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    batches: list[torch.Tensor] = []
    while len(batches) < steps:
        batches += torch.randperm(images, generator=generator).split(BATCH)[: images // BATCH]
    return batches[:steps]


def _table(rows: list[DemoRow], title: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("network", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for column in ("test\naccuracy", "ms /\nstep", "cast in\nforward"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.model if row.mode == FP32 else "",
            row.mode,
            f"{100 * row.accuracy:.1f} %",
            f"{row.ms_per_step:.2f}",
            human_bytes(row.cast_bytes),
            end_section=row.mode == STEP,
        )
    return table
