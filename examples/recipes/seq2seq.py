"""Dates as people write them become ISO dates: an LSTM reads, another writes, and attention lies between them.

The dates are made here, in a dozen forms in English: "Tuesday, the 3rd of March 1987", "3/3/87", "mar 3 '87". As in
Luong, Pham and Manning (2015), the reader goes in both directions, the writer's state asks the reader's for what
matters, and a letter is chosen from both. A test date counts where all ten letters are right, each chosen after those
that the network has written itself.

The loss is a mean over 3.2 million letters, as many as GPT-3 had tokens in a batch (Brown et al., 2020); of which
this process has 320, as one of many has. In FP16 most gradients of weights are zero then, and nothing is learnt; with
a loss scale it is learnt as in FP32. By Adam nothing fails with 8 times fewer letters, by SGD it learns less:
`trials.py` tells which settings were tried.

    python examples/recipes/seq2seq.py             # --short: a few steps
"""

import calendar
import copy
import datetime
import functools
import random
from collections.abc import Callable

import torch
from common import NEITHER, Options, Recipe, Training, main
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

ALPHABET = " abcdefghijklmnopqrstuvwxyz0123456789-/.,'"  # its first letter fills up what is shorter
OUTPUT = "0123456789-"
START = len(OUTPUT)  # what the writer is told before its first letter
LONGEST, WRITTEN = 32, 10
WIDTH, BATCH = 64, 32
DATES_OF_ALL = 320_000  # of which this process has BATCH
ADAM = functools.partial(torch.optim.Adam, lr=3e-3, eps=1e-14)
FIRST, LAST = datetime.date(1930, 1, 1).toordinal(), datetime.date(2029, 12, 31).toordinal()
DAYS = tuple([day for day in range(FIRST, LAST + 1) if (day % 10 == 0) == tested] for tested in (False, True))


def ordinal(day: int) -> str:
    ending = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def as_people_write(date: datetime.date, chance: random.Random) -> str:
    """In one of many forms. Among digits alone the day comes before the month; '29 is 2029, and '30 is 1930."""
    day, month, year, short = date.day, calendar.month_name[date.month], date.year, f"{date.year % 100:02}"
    weekday = calendar.day_name[date.weekday()]
    forms = (
        f"{day} {month} {year}",
        f"{month} {day}, {year}",
        f"{weekday}, {month} {ordinal(day)} {year}",
        f"{weekday[:3]} {day} {month[:3]} {year}",
        f"the {ordinal(day)} of {month} {year}",
        f"{month[:3]} {day} '{short}",
        f"{day}-{month[:3]}-{short}",
        f"{day}/{date.month}/{year}",
        f"{day:02}.{date.month:02}.{short}",
        f"{year}{date.month:02}{day:02}",
        f"{year}, {month} {day}",
        f"{ordinal(day)} {month[:3]}. {year}",
    )
    return chance.choice(forms).lower()


@functools.cache
def examples(count: int, seed: int, tested: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Letters that were read, (count, LONGEST), and that are to be written, (count, WRITTEN), by their numbers.

    Every tenth day is for the test alone.
    """
    chance = random.Random(seed)
    dates = [datetime.date.fromordinal(chance.choice(DAYS[tested])) for _ in range(count)]
    read = [[ALPHABET.index(letter) for letter in as_people_write(date, chance).ljust(LONGEST)] for date in dates]
    return torch.tensor(read), torch.tensor([[OUTPUT.index(letter) for letter in str(date)] for date in dates])


class Translator(nn.Module):
    """A reader, a writer, and attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.letters, self.outputs = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(len(OUTPUT) + 1, WIDTH)
        self.reader = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.writer = nn.LSTM(WIDTH, 2 * WIDTH, batch_first=True)
        self.ask = nn.Linear(2 * WIDTH, 2 * WIDTH, bias=False)
        self.mix, self.head = nn.Linear(4 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, len(OUTPUT))

    def forward(self, letters: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Logits of the letter behind each of those that the writer is told; (N, T) to (N, T, 11)."""
        read, (state, memory) = self.reader(self.letters(letters))
        begun = tuple(one.transpose(0, 1).flatten(1)[None] for one in (state, memory))
        written, _ = self.writer(self.outputs(previous), begun)
        weights = (self.ask(written) @ read.transpose(1, 2)).softmax(-1)
        return self.head(torch.tanh(self.mix(torch.cat([weights @ read, written], -1))))


def loss_fn(model: nn.Module, letters: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over the letters of a batch."""
    previous = torch.cat([torch.full_like(target[:, :1], START), target[:, :-1]], 1)
    return F.cross_entropy(model(letters, previous).flatten(0, 1), target.flatten())


@torch.no_grad()
def exact(model: nn.Module, count: int = 512) -> float:
    """Per cent of dates that were never seen and are written without a fault."""
    judge, (letters, target) = copy.deepcopy(model).float().eval(), examples(count, 0, tested=True)
    written = torch.full_like(target[:, :1], START)
    for _ in range(WRITTEN):
        written = torch.cat([written, judge(letters, written)[:, -1:].argmax(-1)], 1)
    return 100 * float((written[:, 1:] == target).all(1).float().mean())


def start(
    seed: int, options: Options, optimizer_of: Callable[..., torch.optim.Optimizer], dates_of_all: int
) -> Training:
    """The loss is a mean over the letters of so many dates, of which this process has 32."""
    torch.manual_seed(seed)
    model = Translator()

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return examples(BATCH, 100_000 * seed + number)

    def part(model: nn.Module, letters: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return loss_fn(model, letters, target) * (BATCH / dates_of_all)

    optimizer = optimizer_of(model.parameters())
    step = amp.training_step(model, part, optimizer, backend="eager", **options)
    return Training([step], [optimizer], batch, functools.partial(exact, model))


RECIPE = Recipe(
    "seq2seq",
    "Dates by LSTMs with attention",
    "dates without a fault, %",
    functools.partial(start, optimizer_of=ADAM, dates_of_all=DATES_OF_ALL),
    length=400,
    fails=(NEITHER,),
    seeds=6,
)

if __name__ == "__main__":
    main(RECIPE)
