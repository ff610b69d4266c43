"""The table of behaviour: what a row is, and the rows that `rows_*.py` add to it.

A row is a model, changes between calls, and calls. Through every door the calls have eager's values, gradients, side
effects, prints, random numbers and exceptions, with at most so many builds, as one graph or not.
"""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
CALLS = 3  # of a row that says nothing of them
FORWARD = ("inference", "compile", "backend")  # doors that take a model
TRAINED = ("compile", "step", "backend")  # those that differentiate it
# Of rows in which the value of a tensor decides: it breaks a graph, but for that of a whole step.
READS: dict[str, Any] = {"builds": {"compile": 3, "step": 1, "backend": 3}, "broken": "compile backend"}
DOORS = ("inference", "compile", "step", "backend")


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        name: what is tried.
        make: makes the model; called behind a fixed seed, once for the door and once for eager.
        begin: `begin(model)`, done before the first call.
        change: `change(model, number)`, done before each call, which has to move what comes out.
        calls: positional arguments of each call, a dict at the end being keywords.
        use: `use(model, *args)`, how the model is called.
        loss: makes the loss function `loss(model, *args)` for a model; outside of a step it is the user's own.
        look: `look(model, result)`, what has to be as in eager beside the attributes of the model.
        around: makes the context of every call through the door.
        around_both: whether eager's calls have it too.
        doors: through which it goes.
        builds: most graphs that are built, in all or by door.
        broken: doors through which it is not one graph.
        refused: by door, what the `AmpError` says that refuses it.
        today: by door, what falls short.
        inside: calls of the model in one `use`.
        autocast: eager's calls run under `torch.autocast`, to whose numbers those of the door are near.
        tolerance: of the norm of a difference, as a part of the norm of the value.
        settles: whether a call like the last one builds nothing.
        lines: most lines that are logged.
        draws: whether the random numbers drawn are eager's.
        inductor: whether it is tried with compiled code too.
        quiet: whether the change is one that must move nothing.
        fp32: whether there is nothing in it that runs in 16 bits.
    """

    name: str
    make: Callable[[], nn.Module]
    begin: Callable[[Any], Any] = lambda model: None
    change: Callable[[Any, int], Any] | None = None
    quiet: bool = False
    calls: tuple[tuple[Any, ...], ...] = ((X,),) * CALLS
    use: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None
    look: Callable[[Any, Any], Any] = lambda model, result: None
    around: Callable[[], Any] = contextlib.nullcontext
    around_both: bool = False
    doors: tuple[str, ...] = TRAINED
    builds: int | dict[str, int] = 1
    broken: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    today: dict[str, str] = field(default_factory=dict)
    inside: int = 1
    autocast: bool = False
    tolerance: float = 2e-2  # a few roundings of 2**-9 each
    settles: bool = True
    lines: int = 12
    draws: bool = True
    inductor: bool = False
    fp32: bool = False


ROWS: dict[str, Row] = {}


class Net(nn.Module):
    """What most rows have: two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)


def row(
    name: str, has: dict[str, Any] | None = None, *, breaks: Any = None, step_breaks: Any = None, **fields: Any
) -> Callable[[Any], Any]:
    """Add a row.

    Args:
        name: of the row.
        has: attributes of the model, each model with its own.
        breaks: most graphs that are built, by door or in all, where it is one graph through no door that trains.
        step_breaks: the same where it is not one graph in a step alone.
        fields: of `Row`.

    Returns:
        What takes the forward function of a `Net`, each model with a class of its own, or a class of modules.
    """

    if breaks is not None:
        fields |= {"builds": breaks, "broken": "compile step backend"}
    if step_breaks is not None:
        fields |= {"builds": step_breaks, "broken": "step"}

    def add(inputs: Any) -> Any:
        def make() -> nn.Module:
            whole = isinstance(inputs, type)
            result = inputs() if whole else type("Model", (Net,), {"forward": inputs, "__module__": __name__})()
            for key, value in copy.deepcopy(has or {}).items():
                setattr(result, key, value)
            return result

        assert name not in ROWS, f"two rows are named {name!r}"
        ROWS[name] = Row(name, make, **fields)
        return inputs

    return add


def setting(name: str, *values: Any) -> Callable[[Any, int], Any]:
    """A change that gives an attribute one value after another; `a.b` is one of an attribute."""
    *path, last = name.split(".")

    def change(model: Any, number: int) -> None:
        for part in path:
            model = getattr(model, part)
        setattr(model, last, values[number % len(values)])

    return change


def at(number: int, change: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    """A change before one call alone."""
    return lambda model, now: change(model) if now == number else None


def rows_of(*sizes: int) -> tuple[tuple[torch.Tensor], ...]:
    """Calls with batches of these sizes."""
    return tuple((torch.randn(size, 4, generator=torch.Generator().manual_seed(size)),) for size in sizes)
