"""Loops of other frameworks, each with its own mixed precision and with ours, for `frameworks.py`."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import amp_compiler as amp

ROWS, CLASSES, BATCHES = 16, 4, 10


def classifier(width: int) -> nn.Module:
    """A small MLP."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.GELU(),
                         nn.Linear(width, CLASSES))  # fmt: skip


def numbers(width: int) -> tuple[Tensor, Tensor]:
    """Rows of all batches with their classes."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * ROWS, width, generator=draw)
    return x, (x @ torch.randn(width, CLASSES, generator=draw)).argmax(1)


def of_logits(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a classifier."""
    return nn.functional.cross_entropy(model(x), y)


class Loop:
    """A framework's loop, with its own mixed precision or with ours.

    Args:
        ours: which.
        steps: how many it is to make in all, for loops that ask for it.
        width: of the model.
        options: of `amp.compile` and `amp.training_step`.
    """

    package: ClassVar[str]
    lines: ClassVar[str] = "1"  # that change
    graph: ClassVar[str] = "forward, backward"
    rate: ClassVar[float] = 0.01

    def __init__(self, ours: bool, steps: int, width: int, options: dict[str, Any]) -> None:
        self.ours, self.steps, self.width, self.options = ours, steps, width, options
        self.losses: list[float] = []
        self.times: list[float] = []
        self.model = self.built()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.rate)
        self.begin()

    def built(self) -> nn.Module:
        """The model."""
        return classifier(self.width)

    def begin(self) -> None:
        """Wrap the model and the optimizer; here as most do."""
        if self.ours:
            self.model = amp.compile(self.model, **self.options)

    def mixed(self) -> contextlib.AbstractContextManager[Any]:
        """`torch.autocast` where the framework's own is for CUDA alone; around several steps it must keep no copies."""
        off = contextlib.nullcontext()
        return off if self.ours else torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    def took(self, loss: Any) -> None:
        """Note a step."""
        self.losses.append(float(loss))
        self.times.append(time.process_time())

    def run(self, steps: int) -> None:
        """Train on."""
        x, y = numbers(self.width)
        batches = list(zip(x.split(ROWS), y.split(ROWS), strict=True))
        done = len(self.losses)
        for batch in itertools.islice(itertools.cycle(batches), done % BATCHES, done % BATCHES + steps):
            self.took(self.step(*batch))

    def loss_of(self, *batch: Tensor) -> Tensor:
        """The loss of one of them."""
        return of_logits(self.model, *batch)

    def backward(self, loss: Tensor) -> None:
        """Its gradients."""
        loss.backward()

    def step(self, *batch: Tensor) -> Tensor:
        """One update."""
        with self.mixed():
            loss = self.loss_of(*batch)
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, folder: str) -> None:
        """Write a checkpoint; here as torch does."""
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], f"{folder}/state.pt")

    def load(self, folder: str) -> None:
        """Go on from one."""
        model, optimizer = torch.load(f"{folder}/state.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)


class WholeStep(Loop):
    """A loop around `amp.training_step`."""

    graph = "the whole step"
    loss = staticmethod(of_logits)
    whole: Callable[..., Any] | None = None

    def begin(self) -> None:
        """Make the step."""
        if self.ours:
            self.whole = amp.training_step(self.model, self.loss, self.optimizer, **self.options)

    def loss_of(self, *batch: Tensor) -> Tensor:
        """By the function that a step takes."""
        return self.loss(self.model, *batch)

    def step(self, *batch: Any) -> Tensor:
        """By the step, or as torch writes it."""
        return super().step(*batch) if self.whole is None else self.whole(*batch)


class Lightning(Loop):
    package, graph = "lightning", "the whole step"

    def begin(self) -> None:
        from lightning.pytorch import LightningModule

        net, width, took = self.model, self.width, self.took

        class Lit(LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return of_logits(self.net, *batch)

            def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
                took(outputs["loss"])

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), Lightning.rate)

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*numbers(width)), ROWS)

        self.lit, self.resumed = Lit(), None

    def run(self, steps: int) -> None:
        from lightning.pytorch import Trainer

        from amp_compiler.integrations.lightning import AmpPrecision

        own: dict[str, Any] = {"precision": "bf16-mixed"}
        self.trainer = Trainer(
            max_epochs=(len(self.losses) + steps) // BATCHES, accelerator="cpu", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            **({"plugins": AmpPrecision(**self.options)} if self.ours else own),
        )  # fmt: skip
        self.trainer.fit(self.lit, ckpt_path=self.resumed)

    def save(self, folder: str) -> None:
        self.trainer.save_checkpoint(f"{folder}/a.ckpt")

    def load(self, folder: str) -> None:
        self.resumed = f"{folder}/a.ckpt"


class Fabric(WholeStep):
    package, lines = "lightning", "4"

    def begin(self) -> None:
        from lightning.fabric import Fabric as Own

        self.fabric = Own(accelerator="cpu", devices=1, precision="32-true" if self.ours else "bf16-mixed")
        super().begin()
        if not self.ours:
            self.model, self.optimizer = self.fabric.setup(self.model, self.optimizer)

    def mixed(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def save(self, folder: str) -> None:
        self.fabric.save(f"{folder}/a.ckpt", {"model": self.model, "optimizer": self.optimizer})

    def load(self, folder: str) -> None:
        self.fabric.load(f"{folder}/a.ckpt", {"model": self.model, "optimizer": self.optimizer})


class Geometric(WholeStep):
    package, lines = "torch_geometric", "4"

    def built(self) -> nn.Module:
        from torch_geometric.nn import GCN

        torch.manual_seed(0)
        return GCN(self.width, 2 * self.width, 2, CLASSES)

    @staticmethod
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        nodes = torch.arange(ROWS)
        return nn.functional.cross_entropy(model(x, torch.stack([nodes, (nodes + 1) % ROWS])), y)


class Monai(Loop):
    package = "monai"

    def run(self, steps: int) -> None:
        from ignite.engine import Events
        from monai.engines import SupervisedTrainer

        x, y = numbers(self.width)
        batches = [{"image": a, "label": b} for a, b in zip(x.split(ROWS), y.split(ROWS), strict=True)]
        self.engine = SupervisedTrainer(
            device=torch.device("cpu"), max_epochs=steps // BATCHES, amp=False, network=self.model,
            loss_function=nn.CrossEntropyLoss(), train_data_loader=batches, optimizer=self.optimizer, decollate=False,
        )  # fmt: skip
        self.engine.logger.setLevel(logging.ERROR)
        self.engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: self.took(engine.state.output["loss"]))
        with self.mixed():
            self.engine.run()

    def save(self, folder: str) -> None:
        from ignite.handlers import Checkpoint, DiskSaver

        objects = {"model": self.model, "optimizer": self.optimizer}
        Checkpoint(objects, DiskSaver(folder, require_empty=False), filename_pattern="a.pt")(self.engine)

    def load(self, folder: str) -> None:
        from ignite.handlers import Checkpoint

        objects = {"model": self.model, "optimizer": self.optimizer}
        Checkpoint.load_objects(objects, torch.load(f"{folder}/a.pt"))


class Skorch(Loop):
    package = "skorch"

    def begin(self) -> None:
        from skorch import NeuralNetClassifier
        from skorch.callbacks import Callback

        super().begin()
        took = self.took

        class Seen(Callback):
            def on_batch_end(self, net: Any, training: bool = False, loss: Any = None, **others: Any) -> None:
                took(loss)

        self.net = NeuralNetClassifier(
            self.model, criterion=nn.CrossEntropyLoss, optimizer=torch.optim.AdamW, lr=self.rate, batch_size=ROWS,
            train_split=None, verbose=0, callbacks=[Seen()], iterator_train__shuffle=False,
        )  # fmt: skip
        self.net.initialize()

    def run(self, steps: int) -> None:
        x, y = numbers(self.width)
        with self.mixed():
            self.net.partial_fit(x.numpy(), y.numpy(), epochs=steps // BATCHES)

    def save(self, folder: str) -> None:
        self.net.save_params(f_params=f"{folder}/a.pt", f_optimizer=f"{folder}/b.pt")

    def load(self, folder: str) -> None:
        self.net.load_params(f_params=f"{folder}/a.pt", f_optimizer=f"{folder}/b.pt")


class Ignite(WholeStep):
    package, lines = "ignite", "4"
    save, load = Monai.save, Monai.load

    def run(self, steps: int) -> None:
        from ignite.engine import Engine

        self.engine = Engine(lambda engine, batch: self.took(self.step(*batch)))
        x, y = numbers(self.width)
        self.engine.run(list(zip(x.split(ROWS), y.split(ROWS), strict=True)), max_epochs=steps // BATCHES)


class Float8(Loop):
    """Its training of `nn.Linear` in FP8, emulated on a CPU, beside `rules="fp8"`."""

    package, rate = "torchao", 0.001  # above, either diverges

    def begin(self) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        if self.ours:
            self.model = amp.compile(self.model, rules="fp8", **self.options)
        else:
            last = self.model[-1]
            convert_to_float8_training(
                self.model, config=Float8LinearConfig(emulate=True), module_filter_fn=lambda one, name: one is not last
            )


class LowBitOptimizer(Loop):
    """Its AdamW with moments of 8 bits, in a loop of one's own."""

    package = "torchao"

    def begin(self) -> None:
        from torchao.optim import AdamW8bit

        super().begin()
        self.optimizer = AdamW8bit(self.model.parameters(), self.rate)
