"""Corpus models that torch's dynamo exporter writes: transformers' architectures, tiny and with random weights.

The weights are drawn anew from a fixed seed; nothing is downloaded.
"""

import warnings
from typing import Any

import numpy as np
import torch
from onnx_models import kept
from torch import nn

from amp_compiler.onnx.exporting.exporter import quiet_exporter
from onnx_corpus.case import Built

SEED = 0


class Logits(nn.Module):
    """Gives the logits of a transformers model.

    Args:
        model: the model.
        names: names of the inputs, in the order of `forward`.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True))).logits
        return logits


def module(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """One of the models as a module of tensors, and its inputs."""
    import transformers

    architecture, facts, inputs = MODELS[name]
    kind = getattr(transformers, architecture)
    torch.manual_seed(SEED)
    return Logits(kind(kind.config_class(**facts)), tuple(inputs)).eval(), inputs


def export(model: nn.Module, inputs: tuple[torch.Tensor, ...], **options: Any) -> Any:
    """The program that torch's exporter makes of a module, which says nothing."""
    with quiet_exporter(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False, **options)


def build(name: str) -> Built:
    """Export a model; the batches are its inputs and a second draw of them."""
    return kept(name, lambda: _build(name), __file__)  # type: ignore[no-any-return]


def _build(name: str) -> Built:
    model, inputs = module(name)
    program = export(model, tuple(inputs.values()), input_names=list(inputs), output_names=["logits"])
    first, generator = {name: tensor.numpy() for name, tensor in inputs.items()}, np.random.default_rng(1)
    floats, whole = generator.standard_normal, generator.permuted
    second = {
        name: floats(one.shape, one.dtype) if one.dtype.kind == "f" else whole(one, axis=-1)
        for name, one in first.items()
    }
    return program.model_proto, [first, second]


def _tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(1, vocabulary, shape, generator=torch.Generator().manual_seed(SEED))


def _images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED))


def _mask(*shape: int) -> torch.Tensor:
    mask = torch.ones(*shape, dtype=torch.int64)
    mask[-1, shape[-1] // 2 :] = 0
    return mask


TRANSFORMER = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
# The class of a model, what its config differs in, and its inputs.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "bert": (
        "BertForSequenceClassification",
        {**TRANSFORMER, "vocab_size": 128, "max_position_embeddings": 32, "num_labels": 4},
        {"input_ids": _tokens(128, 2, 16), "attention_mask": _mask(2, 16)},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 128, "n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4, "use_cache": False},
        {"input_ids": _tokens(128, 2, 16)},
    ),
    "llama": (
        "LlamaForCausalLM",
        {**TRANSFORMER, "vocab_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 64, "use_cache": False},
        {"input_ids": _tokens(128, 2, 16)},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "use_cache": False,
         "decoder_start_token_id": 0},
        {"input_ids": _tokens(128, 2, 12), "decoder_input_ids": _tokens(128, 2, 8)},
    ),
    "vit": (
        "ViTForImageClassification",
        {**TRANSFORMER, "image_size": 32, "patch_size": 8, "num_labels": 10},
        {"pixel_values": _images(2, 3, 32, 32)},
    ),
    "resnet50": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [16, 32, 64, 128], "depths": [3, 4, 6, 3], "layer_type": "bottleneck",
         "num_labels": 10},
        {"pixel_values": _images(2, 3, 64, 64)},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "num_labels": 10, "layer_scale_init_value": 1.0},
        {"pixel_values": _images(2, 3, 64, 64)},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"vocab_size": 128, "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 4, "decoder_layers": 2,
         "decoder_attention_heads": 4, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128, "d_model": 64,
         "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 3, "use_cache": False},
        {"input_features": _images(2, 16, 64), "decoder_input_ids": _tokens(128, 2, 8)},
    ),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 3, 4],
         "decoder_hidden_size": 32, "num_labels": 5},
        {"pixel_values": _images(1, 3, 64, 64)},
    ),
}  # fmt: skip
