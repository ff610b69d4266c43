"""Corpus models that torch's dynamo exporter writes: transformers' architectures, tiny and with random weights.

The weights are drawn anew from a fixed seed; nothing is downloaded. Each builder gives (model, batches).
"""

from __future__ import annotations

import io
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

from onnx_corpus.case import Batches, Built

SEED = 0


class _Fields(nn.Module):
    """Gives the named fields of a transformers model's output, as a tuple of tensors.

    Args:
        model: the model.
        fields: names of the output's fields.
        names: names of the inputs, in the order of `forward`.
    """

    def __init__(self, model: nn.Module, fields: tuple[str, ...], names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.fields, self.names = model, fields, names

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.model(**dict(zip(self.names, inputs, strict=True)))
        return tuple(getattr(made, field) for field in self.fields)


def export(model: nn.Module, fields: tuple[str, ...], inputs: dict[str, torch.Tensor], seed: int = 1) -> Built:
    """Export `model` for `inputs`; the batches are the inputs and a second draw of them."""
    wrapped = _Fields(model.eval(), fields, tuple(inputs)).eval()
    quiet = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(quiet), redirect_stderr(quiet), torch.no_grad():
        warnings.simplefilter("ignore")
        program: Any = torch.onnx.export(
            wrapped, tuple(inputs.values()), dynamo=True, input_names=list(inputs), output_names=list(fields),
            verbose=False,
        )  # fmt: skip
    proto: onnx.ModelProto = program.model_proto
    generator = np.random.default_rng(seed)
    second = {name: _redrawn(tensor, generator) for name, tensor in inputs.items()}
    batches: Batches = [{name: tensor.numpy() for name, tensor in inputs.items()}, second]
    return proto, batches


def _redrawn(tensor: torch.Tensor, generator: np.random.Generator) -> np.ndarray:
    array = tensor.numpy()
    if array.dtype.kind == "f":
        return generator.standard_normal(array.shape).astype(array.dtype)
    return generator.permuted(array, axis=-1)


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(SEED))


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


def _mask(*shape: int) -> torch.Tensor:
    mask = torch.ones(*shape, dtype=torch.int64)
    mask[-1, shape[-1] // 2 :] = 0
    return mask


def bert() -> Built:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(SEED)
    config = BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32, num_labels=4,
    )  # fmt: skip
    inputs = {"input_ids": _tokens(128, 2, 16), "attention_mask": _mask(2, 16)}
    return export(BertForSequenceClassification(config), ("logits",), inputs)


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(SEED)
    config = GPT2Config(vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=4, use_cache=False)
    return export(GPT2LMHeadModel(config), ("logits",), {"input_ids": _tokens(128, 2, 16)})


def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return export(LlamaForCausalLM(config), ("logits",), {"input_ids": _tokens(128, 2, 16)})


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(SEED)
    config = T5Config(
        vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": _tokens(128, 2, 12), "decoder_input_ids": _tokens(128, 2, 8)}
    return export(T5ForConditionalGeneration(config), ("logits",), inputs)


def vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(SEED)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, num_labels=10,
    )  # fmt: skip
    return export(ViTForImageClassification(config), ("logits",), {"pixel_values": _images(2, 3, 32, 32)})


def resnet50() -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(SEED)
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 64, 128], depths=[3, 4, 6, 3], layer_type="bottleneck", num_labels=10
    )
    return export(ResNetForImageClassification(config), ("logits",), {"pixel_values": _images(2, 3, 64, 64)})


def convnext() -> Built:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    torch.manual_seed(SEED)
    config = ConvNextConfig(
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], num_labels=10, layer_scale_init_value=1.0
    )
    return export(ConvNextForImageClassification(config), ("logits",), {"pixel_values": _images(2, 3, 64, 64)})


def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(SEED)
    config = WhisperConfig(
        vocab_size=128, num_mel_bins=16, encoder_layers=2, encoder_attention_heads=4, decoder_layers=2,
        decoder_attention_heads=4, decoder_ffn_dim=128, encoder_ffn_dim=128, d_model=64, max_source_positions=32,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        use_cache=False,
    )  # fmt: skip
    inputs = {"input_features": _images(2, 16, 64), "decoder_input_ids": _tokens(128, 2, 8)}
    return export(WhisperForConditionalGeneration(config), ("logits",), inputs)


def segformer() -> Built:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    torch.manual_seed(SEED)
    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 48, 64], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=32,
        num_labels=5,
    )  # fmt: skip
    return export(SegformerForSemanticSegmentation(config), ("logits",), {"pixel_values": _images(1, 3, 64, 64)})
