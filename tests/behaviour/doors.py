"""Runs a row of the table through a door beside eager, and says in what they differ."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import io
import itertools
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from table import Row
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.backends import BACKENDS

RATE = 0.05  # of the steps, by which a gradient is read off the weights
GRADIENT_ERROR = 5e-2  # of all gradients together: those of 16-bit activations


class Meter:
    """What was built and run since it was reset."""

    def __init__(self) -> None:
        self.builds: list[int] = []
        self.runs: list[int] = []  # lists, to which any thread may append


METER = Meter()


def counted(name: str) -> str:
    """A backend that does as another one, and counts."""
    real = BACKENDS[name]

    def build(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        METER.builds.append(1)
        function = real.build(*args, **kwargs)

        def run(*inputs: Any) -> Any:
            METER.runs.append(1)
            return function(*inputs)

        return run

    result = dataclasses.replace(real, name=f"counted_{name}", build=build)
    BACKENDS.setdefault(result.name, result)
    return result.name


@dataclass
class Seen:
    """What one call gave."""

    result: Any = None
    gradients: list[Tensor] = field(default_factory=list)
    printed: str = ""
    drawn: Any = None
    state: Any = None
    looked: Any = None
    error: Exception | None = None


@dataclass
class Outcome:
    """What a row came to through one door.

    Attributes:
        faults: in what it differs from eager.
        builds: graphs that were built.
        runs: graphs that ran in each call.
        refused: what an `AmpError` said.
    """

    faults: list[str] = field(default_factory=list)
    builds: int = 0
    runs: list[int] = field(default_factory=list)
    refused: str = ""
    inside: int = 1

    @property
    def one_graph(self) -> bool:
        """Whether every call ran one graph, and nothing but it."""
        return not self.refused and bool(self.runs) and all(number == self.inside for number in self.runs)


def total(value: Any) -> Tensor:
    """A loss of anything that a model returns."""
    result = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return sum((one.float().square().mean() for one in result), torch.zeros(()))


def leaves(value: Any) -> list[Any]:
    """Tensors, numbers and texts in what a model returns or holds, with the names of its types."""
    if isinstance(value, dict) or (hasattr(type(value), "items") and not isinstance(value, nn.Module)):
        return [len(value), *(leaf for key, one in value.items() for leaf in (str(key), *leaves(one)))]
    if isinstance(value, (list, tuple)):
        return [len(value), *(leaf for one in value for leaf in leaves(one))]
    if isinstance(value, (set, frozenset)):
        return [sorted(map(str, value))]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return leaves({one.name: getattr(value, one.name, None) for one in dataclasses.fields(value)})
    if isinstance(value, np.ndarray):
        return [str(value.tolist())]
    return [value] if value is None or isinstance(value, (Tensor, int, float, str, bytes, bytearray)) else []


_OWN = set(vars(nn.Module()))


def state_of(model: nn.Module) -> Any:
    """Buffers and attributes of a model and all below it."""
    result: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers}.items():
            if not name.startswith("_") and name not in _OWN - {"training"}:
                result[f"{path}.{name}"] = leaves(value)
    return result


def differ(actual: Any, expected: Any, tolerance: float) -> str:
    """In what two trees differ; empty where they do not."""
    mine, theirs = leaves(actual), leaves(expected)
    if len(mine) != len(theirs):
        return f"{len(mine)} values in the place of {len(theirs)}"
    for one, other in zip(mine, theirs, strict=True):
        if isinstance(other, Tensor) and isinstance(one, Tensor):
            if type(one) is not type(other) or one.shape != other.shape:
                return f"{type(one).__name__} of {list(one.shape)}, not {type(other).__name__} of {list(other.shape)}"
            a, b = one.detach().to_dense().double(), other.detach().to_dense().double()
            if one.is_sparse != other.is_sparse or not bool(
                (a.nan_to_num() - b.nan_to_num()).norm() <= tolerance * b.norm().nan_to_num()
            ):
                return f"off by {float((a - b).norm() / b.norm()):.2g}"
        elif isinstance(other, float) and isinstance(one, (int, float)):
            if not abs(one - other) <= tolerance * abs(other) + 1e-9:
                return f"{one} in the place of {other}"
        elif type(one) is not type(other) or one != other:
            return f"{one!r} in the place of {other!r}"
    return ""


def numbers(seen: list[Seen]) -> list[Tensor]:
    """The tensors of results, one for each call."""
    flat = [
        [leaf.detach().double().flatten() for leaf in leaves(one.result) if isinstance(leaf, Tensor)] for one in seen
    ]
    return [torch.cat(one) if one else torch.zeros(1) for one in flat]


def seed(number: int) -> None:
    """Seed all generators."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def arguments(call: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments of a call."""
    keywords = dict(call[-1]) if call and type(call[-1]) is dict else {}
    return (call[:-1], keywords) if keywords else (call, {})


def using(row: Row, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call that a row makes of a model."""
    return model(*args, **kwargs) if row.use is None else row.use(model, *args, **kwargs)


class Way:
    """One of two ways to run a row: eager or a door.

    Args:
        row: the row.
        door: name of the door.
        backend: what runs the graphs; `None`: it is eager's way.
    """

    def __init__(self, row: Row, door: str, backend: str | None) -> None:
        self.row, self.door, self.backend = row, door, backend
        torch.manual_seed(0)
        self.model = row.make()
        row.begin(self.model)
        self.loss = self._total if row.loss is None else row.loss(self.model)
        self.parameters = [*self.model.parameters(), *getattr(self.loss, "beside", [])]
        if door == "step":
            self.optimizer = torch.optim.SGD(self.parameters, RATE)
        if door == "inference":
            self.model.eval()
        self.run = self.model if backend is None else self._through()

    def _through(self) -> Any:
        if self.door == "step":
            return amp.training_step(self.model, self.loss, self.optimizer, dtype="bf16", backend=self.backend)
        if self.door == "backend":
            return torch.compile(self.model, backend="amp_compiler", options={"dtype": "bf16", "backend": self.backend})
        return amp.compile(self.model, dtype="bf16", backend=self.backend)

    def follow(self, other: Way) -> None:
        """Take the weights of the other one, so that what a step rounds does not add up."""
        with torch.no_grad():
            for mine, theirs in zip(self.parameters, other.parameters, strict=True):
                mine.copy_(theirs)

    def _total(self, model: Any, args: Any, kwargs: Any) -> Tensor:
        return total(using(self.row, model, args, kwargs))

    def call(self, number: int, call: tuple[Any, ...]) -> Seen:
        """Make a call."""
        row, seen = self.row, Seen()
        args, kwargs = arguments(call)
        eager = self.backend is None
        around = row.around() if not eager or row.around_both else contextlib.nullcontext()
        inner = torch.autocast("cpu", torch.bfloat16, enabled=eager and row.autocast, cache_enabled=False)
        seed(number)
        printed = io.StringIO()
        try:
            with around, contextlib.redirect_stdout(printed):
                seen.result, seen.gradients = self._called(args, kwargs, inner)
        except Exception as error:  # noqa: BLE001  # whatever eager raises, and what a door makes of it
            seen.error = getattr(error, "inner_exception", error)  # torch.compile wraps what a backend raises
        seen.printed = printed.getvalue()
        seen.drawn = torch.rand(2).tolist(), random.random(), float(np.random.rand())
        seen.state = state_of(self.model)
        seen.looked = row.look(self.model, seen.result)
        return seen

    def _called(self, args: Any, kwargs: Any, inner: Any) -> tuple[Any, list[Tensor]]:
        row, training = self.row, self.door != "inference"
        if self.door == "step":
            before = [p.detach().clone() for p in self.parameters]
            batch = args if row.loss else (args, kwargs)
            if self.backend is not None:
                result = self.run(*batch)
            else:
                self.optimizer.zero_grad()
                with inner:
                    built = self.loss(self.model, *batch)
                loss = built[0] if isinstance(built, tuple) else built
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                result = loss.detach() if loss is built else (loss.detach(), built[1])
            moved = [(b - p.detach().to(b.dtype)) / RATE for b, p in zip(before, self.parameters, strict=True)]
            return result, moved
        for parameter in self.parameters:
            parameter.grad = None
        METER.runs.clear()
        with torch.set_grad_enabled(training), inner:
            result = self.loss(self.run, *args) if row.loss else using(row, self.run, args, kwargs)
        self.ran = len(METER.runs)
        if training and row.loss is not None:
            (result[0] if isinstance(result, tuple) else result).backward()
        elif training and (loss := total(result)).requires_grad:
            loss.backward()
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        return result, [g.clone() for g in gradients] if training else []


@contextlib.contextmanager
def listening() -> Iterator[list[str]]:
    """What torch and the compiler log meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.extend(record.getMessage().splitlines())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("amp_compiler", "torch")]
    for one in loggers:
        one.addHandler(handler)
    try:
        yield said
    finally:
        for one in loggers:
            one.removeHandler(handler)


def run(row: Row, door: str, backend: str = "eager") -> Outcome:
    """Run a row through a door."""
    torch.compiler.reset()
    settings = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(), torch.get_rng_state()
    try:
        return contextvars.copy_context().run(_run, row, door, counted(backend))
    finally:
        torch.use_deterministic_algorithms(settings[0])
        torch.set_num_threads(settings[1])
        torch.set_rng_state(settings[2])


def _run(row: Row, door: str, backend: str) -> Outcome:
    outcome = Outcome(inside=row.inside)
    METER.builds.clear()
    eager, ours = Way(row, door, None), Way(row, door, backend)
    calls = [*row.calls, *row.calls[-1:] * 2]
    expected, actual = [], []
    with listening() as said:
        for number, call in enumerate(calls):
            if number < len(row.calls) and row.change is not None:
                row.change(eager.model, number)
                row.change(ours.model, number)
            expected.append(eager.call(number, call))
            METER.runs.clear()
            before, built = ours_before(ours), len(METER.builds)
            actual.append(ours.call(number, call))
            if expected[-1].error is None:
                outcome.runs.append(len(METER.runs) if door == "step" else getattr(ours, "ran", 0))
            eager.follow(ours)
            error = actual[-1].error
            if error is not None and expected[-1].error is None and isinstance(error, amp.AmpError):
                outcome.refused = str(error)
                if differ(state_of(ours.model), before, 0.0):
                    outcome.faults.append("a refused call changed the model")
                break
            outcome.faults += [f"call {number}: {fault}" for fault in faults(row, actual[-1], expected[-1])]
            if error is not None and expected[-1].error is None:
                break
            if number == len(calls) - 1 and len(METER.builds) > built and row.settles:
                outcome.faults.append("a call like the last one builds")
        outcome.faults += of_all(row, actual, expected, said)
    outcome.builds = len(METER.builds)
    most = row.builds if isinstance(row.builds, int) else row.builds[door]
    if outcome.builds > most:
        outcome.faults.append(f"{outcome.builds} builds, more than {most}")
    return outcome


def ours_before(way: Way) -> Any:
    """The state of a model, copied."""
    return {
        key: [one.clone() if isinstance(one, Tensor) else one for one in value]
        for key, value in state_of(way.model).items()
    }


def faults(row: Row, actual: Seen, expected: Seen) -> list[str]:
    """In what a call differs from eager's."""
    if actual.error is not None or expected.error is not None:
        return error_faults(actual.error, expected.error)
    result = {
        "result": differ(actual.result, expected.result, row.tolerance),
        "state": differ(actual.state, expected.state, row.tolerance),
        "look": differ(actual.looked, expected.looked, row.tolerance),
        "print": "" if actual.printed == expected.printed else f"{actual.printed!r}",
        "random numbers": "" if actual.drawn == expected.drawn or not row.draws else "others are drawn",
    }
    norm = sum(float(one.to_dense().double().square().sum()) for one in expected.gradients) ** 0.5
    for place, (mine, theirs) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        away = float((mine.to_dense().double() - theirs.to_dense().double()).norm())
        if not away <= GRADIENT_ERROR * norm + 1e-12:
            result[f"gradient {place}"] = f"off by {away / norm if norm else away:.2g}"
        if mine.is_sparse != theirs.is_sparse:
            result[f"gradient {place}"] = "of another layout"
    return [f"{name} {fault}" for name, fault in result.items() if fault]


def error_faults(actual: Exception | None, expected: Exception | None) -> list[str]:
    """In what an exception differs from eager's: it is of its type, or an `AmpError` with its words."""
    if actual is None:
        return [f"no {type(expected).__name__}"]
    words = " ".join(str(actual).split())[:160]
    if expected is None:
        return [f"raises {type(actual).__name__}: {words}"]
    if type(expected) is RuntimeError:  # torch's, whose words for shapes differ while it traces
        if isinstance(actual, amp.AmpError) or type(actual).__name__ in ("RuntimeError", "TorchRuntimeError"):
            return []
    elif str(expected) in str(actual) and isinstance(actual, (type(expected), amp.AmpError)):
        return []
    return [f"raises {type(actual).__name__}: {words}, not {type(expected).__name__}: {str(expected)[:60]}"]


def of_all(row: Row, actual: list[Seen], expected: list[Seen], said: list[str]) -> list[str]:
    """Faults of all calls together, and of the row itself."""
    result, good = [], [one for one in expected if one.error is None]
    if row.change is not None and not row.quiet and len(good) == len(expected) and row.calls[0] is row.calls[-1]:
        values = [torch.cat([one, *(g.to_dense().double().flatten() for g in seen.gradients)])
                  for one, seen in zip(numbers(good), good, strict=True)]  # fmt: skip
        moved = max(
            float((a - b).norm() / (b.norm() + 1e-9)) if a.shape == b.shape else 1.0
            for a, b in itertools.pairwise(values)
        )
        sides = {str(leaves([one.state, one.looked, one.printed])) for one in good}
        if moved < 5 * row.tolerance and len(sides) == 1:
            result.append("the row proves nothing: its change moves no value")
    done = [(a, b) for a, b in zip(actual, expected, strict=False) if a.error is None and b.error is None]
    same = [all(map(torch.equal, [*numbers([a]), *a.gradients], [*numbers([b]), *b.gradients])) for a, b in done]
    if any(same) and not row.fp32 and not row.autocast and not said:
        result.append("FP32 without a word")
    if len(said) > row.lines:
        result.append(f"{len(said)} lines are logged")
    return result
