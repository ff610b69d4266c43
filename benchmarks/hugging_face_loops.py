"""The loops of `framework_loops.py` that are Hugging Face's: Trainer, Accelerate, TRL, PEFT, diffusers and others."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from framework_loops import BATCHES, Loop
from torch import Tensor, nn

import amp_compiler as amp

TOKENS = 16


def language_model(width: int) -> nn.Module:
    """A small GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_embd=width, n_layer=2, n_head=2, n_positions=TOKENS, bos_token_id=1, eos_token_id=2,
                   pad_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip


def tokens() -> Tensor:
    """Sentences of all batches."""
    return torch.randint(3, 64, (BATCHES * 4, TOKENS), generator=torch.Generator().manual_seed(1))


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

    def mixed(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)

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

    def loss_of(self, *batch: Tensor) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[1]).loss


class Peft(OfSentences):
    package = "peft"
    rate = 0.003  # adapters alone learn slowly

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
    package, rate = "diffusers", 0.001

    def built(self) -> nn.Module:
        from diffusers import UNet2DModel

        torch.manual_seed(0)
        return UNet2DModel(
            sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
            norm_num_groups=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y = batch
        image = x[:2, :16].reshape(2, 1, 4, 4).repeat(1, 1, 2, 2)
        return nn.functional.mse_loss(self.model(image, y[:2]).sample, image)


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
