"""Models for the twin tests, small and of random weights: `name -> (module in eval mode, example arguments)`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class First(nn.Module):
    """A transformers model that returns one tensor.

    Args:
        model: the model.
        field: the field of its output.
        names: names of the inputs, in order.
    """

    def __init__(self, model: nn.Module, field: str, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.field, self.names = model, field, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = getattr(self.model(**dict(zip(self.names, inputs, strict=True))), self.field)
        return made


class LastState(nn.Module):
    """An LSTM and a linear layer on all of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def mlp() -> Made:
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8), nn.Softmax(-1)
    )
    return model, (torch.randn(4, 32),)


def cnn() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model, (torch.randn(2, 3, 12, 12),)


def encoder() -> Made:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), (torch.randn(2, 10, 32),)


def lstm() -> Made:
    return LastState(), (torch.randn(3, 7, 16),)


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    return First(GPT2LMHeadModel(config), "logits", ("input_ids",)), (torch.randint(1, 128, (2, 16)),)


def bert() -> Made:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=4,
    )  # fmt: skip
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    inputs = (torch.randint(1, 128, (2, 16)), mask)
    return First(BertForSequenceClassification(config), "logits", ("input_ids", "attention_mask")), inputs


def vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=32, patch_size=8,
        num_labels=4,
    )  # fmt: skip
    return First(ViTForImageClassification(config), "logits", ("pixel_values",)), (torch.randn(2, 3, 32, 32),)


MODELS: dict[str, Any] = {one.__name__: one for one in (mlp, cnn, encoder, lstm, gpt2, bert, vit)}


def make(name: str) -> Made:
    """The model, the same on every call."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for label, parameter in model.named_parameters():
        if label.endswith("bias") and not parameter.any():  # the exporter's optimizer leaves a bias of zeros out
            nn.init.normal_(parameter, std=0.1)
    return model.eval(), inputs
