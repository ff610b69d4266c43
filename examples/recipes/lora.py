"""A transformer that reads documentation learns to read source code, by low-rank adapters on frozen BF16 weights.

The base is trained here, in FP32, on the pages of Python's documentation, letter by letter. Then its weights are
rounded to BF16 and stay as they are, and adapters (Hu et al., 2021) learn from the sources of Python's library. An
adapter's update is a small part of its weight, and a weight in BF16 does not notice less than 2^-9 of it, half the
distance to its neighbour. Adapters that are BF16 themselves therefore stop early; with FP32 masters they learn as in
FP32, while the base takes half of the memory. BF16 has FP32's range, so that no loss scale is needed.

    python examples/recipes/lora.py                # --short: a few steps
"""

import copy
import functools
import math

import torch
from common import BF16, BF16_MASTERS, DEFAULT, FP32, NO_MASTERS, Options, Recipe, Training, main
from text import functions, letters, paragraphs, split, windows
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

LENGTH, WIDTH, HEADS, LAYERS = 48, 64, 4, 2
BATCH, RANK, ALPHA = 16, 4, 8.0
RATE = 3e-4


class Block(nn.Module):
    """Attention and a network of two layers, each behind a LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Reader(nn.Module):
    """Predicts each next letter from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.letters(letters) + self.places.weight)))


class Adapted(nn.Module):
    """A linear layer that stays as it is, and beside it a product of two narrow ones that learns."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        self.a, self.b = (
            nn.Linear(frozen.in_features, RANK, bias=False),
            nn.Linear(RANK, frozen.out_features, bias=False),
        )
        nn.init.zeros_(self.b.weight)  # at first the adapter adds nothing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.b(self.a(x)) * (ALPHA / RANK)


def loss_fn(model: nn.Module, letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(letters).flatten(0, 1), following.flatten())


@functools.cache
@torch.enable_grad()
def base(steps: int = 300) -> Reader:
    """What has learnt to read documentation, in FP32."""
    torch.manual_seed(0)
    model, text = Reader(), letters(paragraphs())
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(model, *windows(text, LENGTH, BATCH, generator)).backward()
        optimizer.step()
    return model.requires_grad_(False)


def adapted(low: bool) -> nn.Module:
    """The base with an adapter at every linear layer of its blocks; frozen weights in BF16 or in FP32."""
    model = copy.deepcopy(base())
    model = model.bfloat16() if low else model
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))
    return model


def start(seed: int, options: Options) -> Training:
    torch.manual_seed(seed)
    model = adapted(low=options.get("enabled", True))
    learnt, tested = map(letters, split(functions()))
    judged = windows(tested, LENGTH, 256, torch.Generator().manual_seed(0))

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return windows(learnt, LENGTH, BATCH, torch.Generator().manual_seed(100_000 * seed + number))

    @torch.no_grad()
    def bits() -> float:
        return float(loss_fn(copy.deepcopy(model).float(), *judged)) / math.log(2)

    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], RATE, weight_decay=0)
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", **options)
    return Training([step], [optimizer], batch, bits)


def ways(scale: float) -> dict[str, Options]:
    """Adapters in FP32 on a base in FP32; on a base in BF16 without masters, with them, and by default."""
    return {
        FP32: {"enabled": False},
        BF16: {"dtype": "bf16", "rules": NO_MASTERS},
        BF16_MASTERS: {"dtype": "bf16"},
        DEFAULT: {},
    }


RECIPE = Recipe(
    "lora",
    "Adapters on a frozen base in BF16",
    "bits per letter",
    start,
    higher=False,
    length=600,
    fails=(BF16,),
    ways=ways,
    low="bf16",
)

if __name__ == "__main__":
    main(RECIPE)
