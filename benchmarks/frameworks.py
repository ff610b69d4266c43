"""100 steps in the loops of other frameworks, with their own BF16 and with ours: losses, milliseconds, resuming.

Both train the same model from the same weights on the same batches. `off` is the greatest difference of a loss, as a
part of it. A time is CPU time of a step, the median of the second half of them. Resuming: half of the steps, a
checkpoint by the framework's means, all objects made anew, the rest; the losses are to be those of the run without a
stop, to the bit. Where a framework's own mixed precision is for CUDA alone, `torch.autocast` stands around its loop.
Rows of frameworks that are left out stay as they are.

    make test-frameworks                                     # makes the environment .venv/frameworks, and tries these
    .venv/frameworks/bin/python benchmarks/frameworks.py     # all that are installed, with Inductor
    .venv/frameworks/bin/python benchmarks/frameworks.py --only ignite skorch --steps 20 --backend eager --width 32
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import itertools
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from measuring import RESULTS, write_results
from torch import Tensor, nn

import amp_compiler as amp

ROWS, CLASSES, BATCHES, TOKENS = 16, 4, 10, 16
MOST_OFF = 0.05  # BF16 roundings that AdamW amplifies over 100 updates


def classifier(width: int) -> nn.Module:
    """A small MLP."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.GELU(),
                         nn.Linear(width, CLASSES))  # fmt: skip


def language_model(width: int) -> nn.Module:
    """A small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=width, n_layer=2, n_head=2, n_positions=TOKENS, bos_token_id=1, eos_token_id=2,
                   pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def numbers(width: int) -> tuple[Tensor, Tensor]:
    """Rows of all batches with their classes."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(BATCHES * ROWS, width, generator=draw)
    return x, (x @ torch.randn(width, CLASSES, generator=draw)).argmax(1)


def tokens() -> Tensor:
    """Sentences of all batches."""
    return torch.randint(3, 64, (BATCHES * 4, TOKENS), generator=torch.Generator().manual_seed(1))


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

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One of them."""
        with self.mixed():
            loss = of_logits(self.model, x, y)
        loss.backward()
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

    def step(self, *batch: Any) -> Tensor:
        if self.ours:
            return super().step(*batch)
        loss = of_logits(self.model, *batch)
        self.fabric.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, folder: str) -> None:
        self.fabric.save(f"{folder}/a.ckpt", {"model": self.model, "optimizer": self.optimizer})

    def load(self, folder: str) -> None:
        self.fabric.load(f"{folder}/a.ckpt", {"model": self.model, "optimizer": self.optimizer})


class Trainer(Loop):
    package, graph = "transformers", "the whole step"
    rate = 0.0003
    bf16 = False  # beside ours

    def built(self) -> nn.Module:
        return language_model(self.width)

    def begin(self) -> None:
        self.folder, self.resumed = tempfile.mkdtemp(), None

    def options_of(self, kind: Any, **others: Any) -> Any:
        return kind(
            self.folder, max_steps=self.steps, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            logging_steps=1, disable_tqdm=True, save_strategy="steps", save_steps=max(self.steps // 2, 1),
            learning_rate=self.rate, lr_scheduler_type="constant", bf16=self.bf16 or not self.ours, **others,
        )  # fmt: skip

    def trainer(self) -> Any:
        from transformers import Trainer as Own
        from transformers import TrainingArguments

        from amp_compiler.integrations.transformers import AmpTrainer

        rows = [{"input_ids": row, "labels": row} for row in tokens()]
        own: dict[str, Any] = {"amp_options": self.options} if self.ours else {}
        kind = AmpTrainer if self.ours else Own
        return kind(self.model, self.options_of(TrainingArguments), train_dataset=rows, **own)

    def run(self, steps: int) -> None:
        from transformers import PrinterCallback, TrainerCallback

        loop, last = self, len(self.losses) + steps

        class Seen(TrainerCallback):
            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
                if "loss" in logs:
                    loop.took(logs["loss"])
                    control.should_training_stop |= len(loop.losses) >= last

        trainer = self.trainer()
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Seen())
        trainer.train(resume_from_checkpoint=self.resumed)

    def save(self, folder: str) -> None:
        self.latest = max(Path(self.folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        (Path(folder) / "latest").write_text(str(self.latest))

    def load(self, folder: str) -> None:
        self.resumed = (Path(folder) / "latest").read_text()


class Accelerate(Loop):
    package = "accelerate"

    def begin(self) -> None:
        from accelerate import Accelerator

        super().begin()
        self.accelerator = Accelerator(cpu=True, mixed_precision="no" if self.ours else "bf16")
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = of_logits(self.model, x, y)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def save(self, folder: str) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: str) -> None:
        self.accelerator.load_state(folder)


class Trl(Trainer):
    package, graph, bf16 = "trl", "forward, backward of the body", True

    def begin(self) -> None:
        super().begin()
        if self.ours:
            self.model.transformer = amp.compile(self.model.transformer, **self.options)

    def trainer(self) -> Any:
        from datasets import Dataset
        from transformers import BertTokenizer
        from trl import SFTConfig, SFTTrainer

        words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{number}" for number in range(59))]
        (Path(self.folder) / "vocab.txt").write_text("\n".join(words))
        tokenizer = BertTokenizer(f"{self.folder}/vocab.txt", eos_token="[SEP]", bos_token="[CLS]")
        rows = Dataset.from_dict({"input_ids": tokens().tolist()})
        return SFTTrainer(self.model, self.options_of(SFTConfig), train_dataset=rows, processing_class=tokenizer)


class OfSentences(Loop):
    """Loops over sentences that call the model with its labels."""

    rate = 0.0003

    def built(self) -> nn.Module:
        return language_model(self.width)

    def run(self, steps: int) -> None:
        done = len(self.losses)
        for rows in itertools.islice(itertools.cycle(tokens().split(4)), done % BATCHES, done % BATCHES + steps):
            self.took(self.step(rows, rows))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        with self.mixed():
            loss = self.model(input_ids=x, labels=y).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Peft(OfSentences):
    package = "peft"

    def built(self) -> nn.Module:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(target_modules=["c_attn"], r=4, fan_in_fan_out=True, lora_dropout=0.0)
        return get_peft_model(super().built(), config)

    def save(self, folder: str) -> None:
        self.model.save_pretrained(folder)
        torch.save(self.optimizer.state_dict(), Path(folder, "optimizer.pt"))

    def load(self, folder: str) -> None:
        from peft import load_peft_weights, set_peft_model_state_dict

        set_peft_model_state_dict(self.model, load_peft_weights(folder, device="cpu"))
        self.optimizer.load_state_dict(torch.load(Path(folder, "optimizer.pt")))


class Diffusers(Loop):
    package = "diffusers"

    def built(self) -> nn.Module:
        from diffusers import UNet2DModel

        torch.manual_seed(0)
        return UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
            norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        image = x[:2, :16].reshape(2, 1, 4, 4).repeat(1, 1, 2, 2)
        with self.mixed():
            loss = nn.functional.mse_loss(self.model(image, y[:2]).sample, image)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class SentenceTransformers(Trainer):
    package, graph = "sentence_transformers", "forward, backward"

    def built(self) -> nn.Module:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer
        from transformers import BertConfig, BertModel, BertTokenizer

        torch.manual_seed(0)
        folder = tempfile.mkdtemp()
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(59))]
        (Path(folder) / "vocab.txt").write_text("\n".join(words))
        BertTokenizer(f"{folder}/vocab.txt").save_pretrained(folder)
        config = BertConfig(vocab_size=64, hidden_size=self.width, num_hidden_layers=2, num_attention_heads=2,
                            intermediate_size=2 * self.width, hidden_dropout_prob=0.0,
                            attention_probs_dropout_prob=0.0)  # fmt: skip
        BertModel(config).save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder), Pooling(self.width)], device="cpu")

    def begin(self) -> None:
        super().begin()
        Loop.begin(self)

    def trainer(self) -> Any:
        from datasets import Dataset
        from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

        texts = [" ".join(f"w{int(word) % 59}" for word in row) for row in tokens()]
        rows = Dataset.from_dict({"anchor": texts, "positive": [text[:20].rpartition(" ")[0] for text in texts]})
        arguments = self.options_of(SentenceTransformerTrainingArguments)
        loss = losses.MultipleNegativesRankingLoss(self.model)
        return SentenceTransformerTrainer(self.model, arguments, train_dataset=rows, loss=loss)


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

    def step(self, *batch: Any) -> Tensor:
        if self.whole is not None:
            return self.whole(*batch)
        with self.mixed():
            loss = self.loss(self.model, *batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


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


LOOPS: dict[str, type[Loop]] = {
    "Lightning": Lightning,
    "Fabric": Fabric,
    "Trainer of transformers": Trainer,
    "Accelerate": Accelerate,
    "TRL": Trl,
    "PEFT": Peft,
    "diffusers": Diffusers,
    "sentence-transformers": SentenceTransformers,
    "PyTorch Geometric": Geometric,
    "MONAI": Monai,
    "skorch": Skorch,
    "ignite": Ignite,
    "torchao, float8": Float8,
    "torchao, AdamW8bit": LowBitOptimizer,
}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A loop leaves no settings of Accelerate's to the next, and says nothing on defaults."""
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(name: str, ours: bool, steps: int, width: int, options: dict[str, Any]) -> Loop:
    """A loop that has made all its steps."""
    with alone():
        loop = LOOPS[name](ours, steps, width, options)
        loop.run(steps)
    return loop


def resumed(name: str, whole: Loop, steps: int, width: int, options: dict[str, Any]) -> list[float]:
    """Losses of the second half, behind a checkpoint and with new objects."""
    with tempfile.TemporaryDirectory() as folder:
        with alone():
            first = LOOPS[name](True, steps, width, options)
            first.run(steps // 2)
            first.save(folder)
        with alone():
            second = LOOPS[name](True, steps, width, options)
            second.load(folder)
            second.losses = copy.copy(first.losses)
            second.run(steps - steps // 2)
    return second.losses


def difference(ours: list[float], own: list[float]) -> float:
    """The greatest of all steps, as a part of the loss."""
    return max(abs(a - b) / max(abs(b), 0.05) for a, b in zip(ours, own, strict=True))


def milliseconds(loop: Loop) -> float:
    """Of a step, after warm-up."""
    late = loop.times[len(loop.times) // 2 :]
    return 1000 * statistics.median(b - a for a, b in itertools.pairwise(late))


def row_of(name: str, steps: int, width: int, options: dict[str, Any]) -> dict[str, Any]:
    """What the table says of a framework."""
    kind = LOOPS[name]
    ours, own = (trained(name, which, steps, width, options) for which in (True, False))
    again = resumed(name, ours, steps, width, options)
    package = {"ignite": "pytorch-ignite"}.get(kind.package, kind.package)
    return {
        "framework": name,
        "version": importlib.metadata.version(package),
        "lines": kind.lines,
        "graph": kind.graph,
        "first_loss": own.losses[0],
        "last_loss": own.losses[-1],
        "off": difference(ours.losses, own.losses),
        "own_ms": milliseconds(own),
        "ours_ms": milliseconds(ours),
        "resumed": again == ours.losses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--steps", type=int, default=100, help="even multiples of 10")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--json", type=Path, default=RESULTS / "frameworks_cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(1)  # CPU time counts threads that wait
    rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.is_file() else []
    for name in options.only:
        try:
            __import__(LOOPS[name].package)
        except ImportError:
            print(f"{name}: not installed", file=sys.stderr)
            continue
        row = row_of(name, options.steps, options.width, {"dtype": "bf16", "backend": options.backend})
        print(json.dumps(row), flush=True)
        known = {one["framework"]: one for one in [*rows, row]}
        rows = [known[name] for name in LOOPS if name in known]
        write_results(options.json, "frameworks", options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
