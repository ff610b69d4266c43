"""Random-initialised models, built from their configs, that compute their loss inside; nothing is downloaded.

`build("bert")` gives (model, kwargs): the model in train mode with every dropout at 0, so that two runs of it differ
by their arithmetic alone, and keyword arguments with labels, so that `model(**kwargs)` returns the loss and the logits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Set before transformers is imported: the models come from configs, and the hub must not be asked for anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from torch import nn
from torch.nn import functional as F

transformers.logging.set_verbosity_error()
logging.getLogger("transformers").setLevel(logging.ERROR)

Built = tuple[nn.Module, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Size:
    """How large a model is: `tiny` for tests, `small` for benchmarks, `cuda` for those on a GPU.

    Args:
        widening: width of the layer between the two products of a block, in hidden widths.
        key_value_heads: those of grouped attention; half of all where it is 0.
        patch: width and height of an image transformer's patches.
        whole: whether all layers of an encoder and a decoder have this depth; otherwise each has half of it.
        tied: whether the head's weight is that of the embedding, where the model leaves the choice.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    batch: int
    tokens: int
    image: int
    classes: int = 16
    widening: int = 2
    key_value_heads: int = 0
    patch: int = 8
    whole: bool = False
    tied: bool = False

    @property
    def inner(self) -> int:
        return self.widening * self.hidden


SIZES = {
    "tiny": Size(vocab=128, hidden=64, layers=2, heads=4, batch=2, tokens=16, image=32),
    "small": Size(vocab=1024, hidden=256, layers=4, heads=8, batch=4, tokens=64, image=64),
}
CUDA = "cuda"
# Sizes that fill a GPU, of models as they are trained: GPT-2 of 355M parameters, BERT-large, Llama 3.2 1B, T5-base,
# ViT-L/16, ResNet-50. Hidden width is four times the width of ResNet's first layer. The MLP is that of `cases.py`.
CUDA_SIZES = {
    "gpt2": Size(50257, 1024, 24, 16, batch=16, tokens=1024, image=0, widening=4),
    "bert": Size(30522, 1024, 24, 16, batch=32, tokens=512, image=0, widening=4),
    "llama": Size(128256, 2048, 16, 32, batch=4, tokens=2048, image=0, widening=4, key_value_heads=8, tied=True),
    "t5": Size(32128, 768, 12, 12, batch=32, tokens=512, image=0, widening=4, whole=True),
    "vit": Size(0, 1024, 24, 16, batch=64, tokens=0, image=224, classes=1000, widening=4, patch=16),
    "resnet50": Size(0, 256, 0, 0, batch=256, tokens=0, image=224, classes=1000),
    "lstm": Size(32000, 1024, 2, 0, batch=128, tokens=64, image=0),
    "mlp": Size(0, 4096, 8, 0, batch=8192, tokens=0, image=0, classes=1000),
}


class LstmLanguageModel(nn.Module):
    """Embedding, two LSTM layers, a linear head and cross-entropy: a model that is not of transformers."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.hidden)
        self.rnn = nn.LSTM(size.hidden, size.hidden, 2, batch_first=True)
        self.head = nn.Linear(size.hidden, size.vocab)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden, _ = self.rnn(self.embedding(input_ids))
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _tokens(size: Size) -> torch.Tensor:
    return torch.randint(3, size.vocab, (size.batch, size.tokens))


def _text(size: Size) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(size), "labels": _tokens(size)}


def _image(size: Size, side: int | None = None) -> dict[str, torch.Tensor]:
    side = side or size.image
    return {
        "pixel_values": torch.randn(size.batch, 3, side, side),
        "labels": torch.randint(0, size.classes, (size.batch,)),
    }


def _bert(size: Size) -> Built:
    config = transformers.BertConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    mask = torch.ones(size.batch, size.tokens, dtype=torch.long)
    mask[0, size.tokens // 2 :] = 0
    return transformers.BertForMaskedLM(config), {**_text(size), "attention_mask": mask}


def _gpt2(size: Size) -> Built:
    config = transformers.GPT2Config(
        vocab_size=size.vocab,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=size.tokens,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what it takes otherwise, with a warning at which torch.compile breaks its graph
    return model, _text(size)


def _llama(size: Size) -> Built:
    config = transformers.LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads or size.heads // 2,
        intermediate_size=size.inner,
        tie_word_embeddings=size.tied,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _text(size)


def _t5(size: Size) -> Built:
    config = transformers.T5Config(
        vocab_size=size.vocab,
        d_model=size.hidden,
        d_kv=size.hidden // size.heads,
        d_ff=size.inner,
        num_layers=size.layers if size.whole else size.layers // 2,
        num_heads=size.heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config), _text(size)


def _vit(size: Size) -> Built:
    config = transformers.ViTConfig(
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.inner,
        image_size=size.image,
        patch_size=size.patch,
        num_labels=size.classes,
    )
    return transformers.ViTForImageClassification(config), _image(size)


def _resnet50(size: Size) -> Built:
    # transformers imports a model when it is asked for; here it takes seconds, which the other models need not pay.
    from transformers.models.resnet.modeling_resnet import ResNetBottleNeckLayer

    width = size.hidden // 4
    config = transformers.ResNetConfig(
        embedding_size=width,
        hidden_sizes=[4 * width, 8 * width, 16 * width, 32 * width],
        depths=[3, 4, 6, 3],
        layer_type="bottleneck",
        num_labels=size.classes,
    )
    model = transformers.ResNetForImageClassification(config)
    # Each residual branch starts small, as is usual in training. With branches of full strength rounding noise grows
    # through 50 layers of BatchNorm until 16-bit gradients have nothing in common with FP32's, whoever makes them.
    for module in model.modules():
        if isinstance(module, ResNetBottleNeckLayer):
            nn.init.constant_(module.layer[-1].normalization.weight, 0.2)
    return model, _image(size, max(size.image, 64))


def _convnext(size: Size) -> Built:
    width = size.hidden // 4
    config = transformers.ConvNextConfig(
        hidden_sizes=[width, 2 * width, 4 * width, 8 * width],
        depths=[1] * 4 if size.layers < 4 else [2, 2, 2, 2],
        image_size=64,
        num_labels=size.classes,
    )
    return transformers.ConvNextForImageClassification(config), _image(size, 64)


def _whisper(size: Size) -> Built:
    config = transformers.WhisperConfig(
        vocab_size=size.vocab,
        d_model=size.hidden,
        encoder_layers=size.layers // 2,
        decoder_layers=size.layers // 2,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=size.inner,
        decoder_ffn_dim=size.inner,
        num_mel_bins=16,
        max_source_positions=size.tokens,
        max_target_positions=size.tokens,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    features = torch.randn(size.batch, 16, 2 * size.tokens)
    return transformers.WhisperForConditionalGeneration(config), {"input_features": features, "labels": _tokens(size)}


def _segformer(size: Size) -> Built:
    width = size.hidden // 4
    config = transformers.SegformerConfig(
        hidden_sizes=[width, 2 * width, 4 * width, 4 * width],
        num_attention_heads=[1, 2, 4, 4],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=size.hidden,
        num_labels=size.classes,
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
    )
    images = torch.randn(size.batch, 3, 64, 64)
    labels = torch.randint(0, size.classes, (size.batch, 64, 64))
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": images, "labels": labels}


def _mamba(size: Size) -> Built:
    config = transformers.MambaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden // 2,
        num_hidden_layers=2,
        state_size=8,
        use_cache=False,
    )
    return transformers.MambaForCausalLM(config), _text(size)


def _rwkv(size: Size) -> Built:
    config = transformers.RwkvConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        num_hidden_layers=2,
        attention_hidden_size=size.hidden,
        intermediate_size=size.inner,
        context_length=size.tokens,
        use_cache=False,
    )
    return transformers.RwkvForCausalLM(config), _text(size)


def _lstm(size: Size) -> Built:
    return LstmLanguageModel(size), _text(size)


_BUILDERS: dict[str, Callable[[Size], Built]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
    "resnet50": _resnet50,
    "convnext": _convnext,
    "whisper": _whisper,
    "segformer": _segformer,
    "mamba": _mamba,
    "rwkv": _rwkv,
    "lstm": _lstm,
}
NAMES = tuple(_BUILDERS)


def build(name: str, size: str = "tiny", seed: int = 0) -> Built:
    """The model `name` and keyword arguments for it, the same ones for the same seed.

    Args:
        name: one of `NAMES`.
        size: `tiny`, `small` or `cuda`, see `size_of`.
        seed: of the weights and of the inputs.

    Raises:
        ValueError: for a name or a size that is not there.
    """
    if name not in _BUILDERS:
        raise ValueError(f"{name}, {size}: the names are {', '.join(NAMES)}")
    return build_of(name, size_of(name, size), seed)


def build_of(name: str, size: Size, seed: int = 0) -> Built:
    """As `build`, of any size."""
    torch.manual_seed(seed)
    model, kwargs = _BUILDERS[name](size)
    return model.train(), kwargs


def size_of(name: str, size: str) -> Size:
    """The size of that name; `cuda` is another one for each model, and there only for those of `CUDA_SIZES`.

    Raises:
        ValueError: for a size that is not there.
    """
    if size == CUDA and name in CUDA_SIZES:
        return CUDA_SIZES[name]
    if size not in SIZES:
        sizes = [*SIZES, *([CUDA] if name in CUDA_SIZES else [])]
        raise ValueError(f"{name}, {size}: the sizes are {', '.join(sizes)}")
    return SIZES[size]


def loss_and_logits(outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the logits of what a model of this file returned."""
    return outputs["loss"], outputs["logits"]
