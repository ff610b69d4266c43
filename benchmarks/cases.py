"""The models that `train_step.py` and `inference.py` measure, in two batch sizes each, and their matrix products.

On a GPU they are those of `models.CUDA_SIZES`, made there, with batches that fill it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import models
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from amp_compiler.cli.demo import SmallCnn

LARGE = "gemm"  # the bound of the large batch; whatever else binds, the batch is the small one
_SMALL_TOKENS = 128  # of the small batch on a GPU, which is one text or image


@dataclass(frozen=True)
class Shape:
    """How large one model of the benchmark is, and its large and small batch; images have no tokens."""

    hidden: int
    layers: int
    large_batch: int
    small_batch: int
    tokens: int = 64
    small_tokens: int = 16
    vocab: int = 4096
    image: int = 64

    def size(self, bound: str) -> models.Size:
        """The same as `models.py` wants it."""
        large = bound == LARGE
        batch, tokens = (self.large_batch, self.tokens) if large else (self.small_batch, self.small_tokens)
        return models.Size(self.vocab, self.hidden, self.layers, 8, batch, tokens, self.image, classes=100)


SHAPES = {
    "gpt2": Shape(hidden=768, layers=2, large_batch=4, small_batch=1),
    "bert": Shape(hidden=768, layers=2, large_batch=4, small_batch=1),
    "llama": Shape(hidden=768, layers=2, large_batch=4, small_batch=1),
    "vit": Shape(hidden=768, layers=2, large_batch=4, small_batch=1),
    "resnet50": Shape(hidden=256, layers=0, large_batch=4, small_batch=1),
    "digits": Shape(hidden=32, layers=3, large_batch=256, small_batch=64, image=8),
    "lstm": Shape(hidden=512, layers=2, large_batch=16, small_batch=1, tokens=16, small_tokens=4),
    "mlp": Shape(hidden=2048, layers=4, large_batch=256, small_batch=4),
}
TINY = "tiny-mlp"  # for the tests of the benchmarks alone
SHAPES[TINY] = replace(SHAPES["mlp"], hidden=32, layers=1, large_batch=8, small_batch=2)
NAMES = tuple(name for name in SHAPES if name != TINY)
MLPS = ("mlp", TINY)
DIGITS = "digits"  # the CNN of the demo, which trains with batches of 64
RECURRENT = ("lstm",)
IMAGES = ("vit", "resnet50", DIGITS, *MLPS)


class WideMlp(nn.Module):
    """Wide linear layers with GELU between them, and cross-entropy where there are labels."""

    def __init__(self, size: models.Size) -> None:
        super().__init__()
        layers = [layer for _ in range(size.layers) for layer in (nn.Linear(size.hidden, size.hidden), nn.GELU())]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(size.hidden, size.classes)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.head(self.body(inputs))
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class DigitsCnn(nn.Module):
    """The demo's CNN with BatchNorm, and cross-entropy where there are labels."""

    def __init__(self, size: models.Size) -> None:
        super().__init__()
        self.cnn = SmallCnn(batch_norm=True, width=size.hidden)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        logits = self.cnn(images)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class LstmLogits(nn.Module):
    """The LSTM language model of `models.py` without its loss."""

    def __init__(self, model: models.LstmLanguageModel) -> None:
        super().__init__()
        self.embedding, self.rnn, self.head = model.embedding, model.rnn, model.head

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.rnn(self.embedding(input_ids))[0])}


def names(device: str) -> tuple[str, ...]:
    """The models that are measured on a device where none are named."""
    return tuple(models.CUDA_SIZES) if device == "cuda" else NAMES


def size_of(name: str, bound: str, device: str) -> models.Size:
    """How large a model and its batch are on a device."""
    if device != "cuda" or name not in models.CUDA_SIZES:
        return SHAPES[name].size(bound)
    size = models.CUDA_SIZES[name]
    return size if bound == LARGE else replace(size, batch=1, tokens=min(size.tokens, _SMALL_TOKENS))


def build(name: str, bound: str, device: str, place: str | None = None) -> models.Built:
    """A model in train mode and a batch for it with labels, the same ones on every call.

    Args:
        name: of the model.
        bound: which batch.
        device: whose sizes they have, `cpu` or `cuda`.
        place: where they lie if not on the device: `meta` where no numbers are wanted.
    """
    place = place or device
    # On a CPU everything is made there, and on a GPU there too: made elsewhere, a billion weights take half a minute.
    with contextlib.nullcontext() if place == "cpu" else torch.device(place):
        model, batch = build_of(name, size_of(name, bound, device))
    return model.to(place), {key: value.to(place) for key, value in batch.items()}


def build_of(name: str, size: models.Size) -> models.Built:
    """The same of any size, such as those of `models.CUDA_SIZES`, where tensors are made by default."""
    if name not in (*MLPS, DIGITS):
        return models.build_of(name, size)
    torch.manual_seed(0)
    if name in MLPS:
        inputs = torch.randn(size.batch, size.hidden)
        model: nn.Module = WideMlp(size)
        batch = {"inputs": inputs, "labels": torch.randint(0, size.classes, (size.batch,))}
    else:
        images = torch.rand(size.batch, 1, size.image, size.image)
        model, batch = DigitsCnn(size), {"images": images, "labels": torch.randint(0, 10, (size.batch,))}
    return model.train(), batch


def build_for_inference(name: str, bound: str, device: str, place: str | None = None) -> models.Built:
    """The same model in eval mode, and the batch without labels: it gives logits and no loss."""
    model, batch = build(name, bound, device, place)
    if isinstance(model, models.LstmLanguageModel):
        model = LstmLogits(model)
    return model.eval(), {key: value for key, value in batch.items() if key != "labels"}


def items(name: str, bound: str, device: str = "cpu") -> int:
    """Images or tokens in one batch."""
    size = size_of(name, bound, device)
    return size.batch if name in IMAGES else size.batch * size.tokens


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch)["loss"]  # type: ignore[no-any-return]


def matmul_flops(name: str, bound: str, backward: bool, device: str = "cpu") -> int:
    """Floating-point operations of all matrix products and convolutions of a step, counted on the eager FP32 model.

    Fused LSTM and attention kernels are switched off for it, because the counter does not see into them. A GPU's sizes
    are counted without numbers.

    Args:
        name: of the model.
        bound: which batch.
        backward: whether the step trains; else it is a forward without labels.
        device: whose sizes it has.
    """
    counter = FlopCounterMode(display=False)
    place = "meta" if device == "cuda" else device
    model, batch = (build if backward else build_for_inference)(name, bound, device, place)
    fake = FakeTensorMode(allow_non_fake_inputs=True) if device == "cuda" else None
    if fake is not None:  # transformers reads masks where they are no fake ones
        batch = {key: fake.from_tensor(value) for key, value in batch.items()}
    unfused = (torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH))
    with contextlib.ExitStack() as stack:
        for context in (fake or contextlib.nullcontext(), counter, *unfused, torch.set_grad_enabled(backward)):
            stack.enter_context(context)
        result = model(**batch)
        if backward:
            result["loss"].backward()
    return counter.get_total_flops()
