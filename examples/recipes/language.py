"""What word comes next in Python's documentation: by an LSTM with a projection, and by a transformer.

The LSTM is a small one of those of Józefowicz et al. (2016): each layer's state is projected to half of its width, and
behind it stands one output for each of some four thousand words. The loss is a mean over all places of a batch of 1024
texts, of which this process has 16, as one of 64 has. The gradient of a word that does not come next is its probability
divided by the number of places: for most words less than 2^-25, which FP16 makes zero. What is left of the gradients is
only ever the pull towards the word that came, never the push away from those that did not. The transformer has
LayerNorm and the same outputs; what holds for the gradients of its logits is the same.

    python examples/recipes/language.py            # --short: a few steps
"""

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable

import torch
from common import MASTERS, NEITHER, Options, Recipe, Training, five_ways, main
from text import paragraphs, split, windows, words
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

LENGTH, BATCH, BATCH_OF_ALL = 20, 16, 1024
WIDTH, HEADS = 64, 4


@functools.cache
def data() -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many words there are, the text to learn from and that of the test, as numbers of words."""
    learnt, tested = map(words, split(paragraphs()))
    known = {word: number for number, (word, _) in enumerate(Counter(learnt).most_common())}
    return len(known) + 1, *(torch.tensor([known.get(word, len(known)) for word in text]) for text in (learnt, tested))


class Lstm(nn.Module):
    """Two layers, each with a projection."""

    def __init__(self, known: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(known, WIDTH), nn.Linear(WIDTH, known)
        self.body = nn.LSTM(WIDTH, 2 * WIDTH, num_layers=2, batch_first=True, proj_size=WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(words))[0])


class Transformer(nn.Module):
    """Two layers of attention, with LayerNorm in front of each part."""

    def __init__(self, known: int) -> None:
        super().__init__()
        self.words, self.places, self.head = (
            nn.Embedding(known, WIDTH),
            nn.Embedding(LENGTH, WIDTH),
            nn.Linear(WIDTH, known),
        )
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(words) + self.places.weight, self.mask, is_causal=True))


def loss_fn(model: nn.Module, words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(words).flatten(0, 1), following.flatten()) * (BATCH / BATCH_OF_ALL)


def start(seed: int, options: Options, network: Callable[[int], nn.Module], rate: float) -> Training:
    torch.manual_seed(seed)
    known, learnt, tested = data()
    model = network(known)
    judged = windows(tested, LENGTH, 128, torch.Generator().manual_seed(0))

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return windows(learnt, LENGTH, BATCH, torch.Generator().manual_seed(100_000 * seed + number))

    @torch.no_grad()
    def perplexity() -> float:
        loss = loss_fn(copy.deepcopy(model).float(), *judged) * (BATCH_OF_ALL / BATCH)
        return math.exp(min(float(loss), 100.0))

    optimizer = torch.optim.Adam(model.parameters(), rate)
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", **options)
    return Training([step], [optimizer], batch, perplexity)


LSTM = Recipe(
    "language_lstm",
    "The next word, by an LSTM with a projection",
    "perplexity",
    functools.partial(start, network=Lstm, rate=3e-3),
    higher=False,
    length=300,
    fails=(NEITHER, MASTERS),
    ways=five_ways,
)
TRANSFORMER = Recipe(
    "language_transformer",
    "The next word, by a transformer",
    "perplexity",
    functools.partial(start, network=Transformer, rate=2e-3),
    higher=False,
    length=300,
    fails=(NEITHER,),
)

if __name__ == "__main__":
    main(LSTM, TRANSFORMER)
