"""Text that comes with every Python: pages of its documentation, and the sources of its library."""

import importlib
import inspect
import re
from pydoc_data.topics import topics

import torch

MODULES = ("argparse", "datetime", "decimal", "difflib", "doctest", "inspect", "tarfile", "typing", "zipfile")
HELD_OUT = 10  # every tenth passage is for the test
UNKNOWN = "?"

Split = tuple[torch.Tensor, torch.Tensor]


def paragraphs() -> list[str]:
    """Of the documentation's pages; what several of them say is there once."""
    return list(dict.fromkeys(part for name in sorted(topics) for part in topics[name].split("\n\n")))


def functions() -> list[str]:
    """Passages of source code, from one `def` or `class` at the left margin or in a class to the next."""
    sources = (inspect.getsource(importlib.import_module(name)) for name in MODULES)
    return [passage for source in sources for passage in re.split(r"\n(?=(?:    )?(?:def|class) )", source)]


def split(passages: list[str]) -> tuple[list[str], list[str]]:
    """Those to learn from, and those of the test."""
    learnt = [passage for number, passage in enumerate(passages) if number % HELD_OUT]
    return learnt, passages[::HELD_OUT]


def letters(passages: list[str]) -> torch.Tensor:
    """All letters one after the other by their numbers in ASCII; 127 is any other. Shape (N,)."""
    return torch.tensor([min(ord(letter), 127) for letter in "\n\n".join(passages)])


def words(passages: list[str]) -> list[str]:
    """Words and single signs, and where a paragraph ends."""
    return re.findall(r"\w+|[^\w\s]|\n\n", "\n\n".join(passages))


def windows(text: torch.Tensor, length: int, count: int, generator: torch.Generator) -> Split:
    """So many passages of a text, and what follows on each of their places; (count, length) both."""
    starts = torch.randint(0, len(text) - length, (count,), generator=generator)
    rows = text[starts[:, None] + torch.arange(length + 1)]
    return rows[:, :-1], rows[:, 1:]
