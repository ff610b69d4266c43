"""Inputs for a verification without data: small ones, long and odd ones, and ids at the end of their range."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check import memory as limits
from amp_compiler.onnx.check.batches import required_inputs
from amp_compiler.onnx.check.cost import Cost, stride_of
from amp_compiler.onnx.check.memory import LimitError, Limits, memory_text
from amp_compiler.onnx.check.run import FLOAT_TYPES, Runner, open_to_run
from amp_compiler.onnx.check.tables import Tables
from amp_compiler.onnx.model.infer import is_open
from amp_compiler.onnx.model.model import Source

SMALL = 2  # of every open dimension in the first batch
LENGTHS = (2003, 499, 127, 31, 7)  # of one open dimension beside the batch; the next where one costs too much
SIDES = ((301, 403), (149, 199), (75, 101), (31, 37), (13, 17))  # of the sides of an image
ROWS = (37, 19, 11, 7, 3)  # of the batch where nothing else is open
ROUND = 32  # networks that halve an image five times want multiples of it
MULTIPLES = (1, 2, 4, 8, 16, 18, 32, 128, 512)  # of it that are tried where a model does not run on 2 of everything
WINDOW = 499  # what a sequence has at least that a `Scan` goes over: ONNX Runtime ends the process at one over nothing
STEPS = 1000  # time steps and positions without a table go up to here at least
_DRAWN = 12  # bytes of an element while it is drawn: in FP64, and in its own type
Sizes = dict[tuple[str, int], int]  # of open dimensions, by input and axis
_MASKS = ("mask", "type")
_TIMES = ("time", "step", "pos", "sigma")


@dataclass(frozen=True)
class _Want:
    """Sizes that open dimensions shall have."""

    batch: int  # 0 where nothing but the batch is open: it is as long as a length then, or as `rows`
    length: int  # of one dimension beside the batch
    sides: tuple[int, ...]  # of two
    rows: int  # of a third, and of the batch of what has more than two dimensions

    def rounded(self, step: int) -> _Want:
        """With lengths and sides that are multiples of a number."""
        length, *sides = (-(-size // step) * step for size in (self.length, *self.sides))
        return _Want(self.batch, length, tuple(sides), self.rows)


class Probes:
    """Batches drawn for one model: iterate, and call `refuse` on a batch that the original cannot run.

    The first batch is small: open dimensions of 2, standard normal numbers, ids of 0 and 1. The second is long and odd:
    one open dimension beside the batch is a length of 2,003, two are the sides of an image (301 and 403). Whole numbers
    go through the range of the table that they pick rows of, else through 0 to 999 or as many as there are, time steps
    up to 1,000, and numbers that the model compares an input with are among it. In the third batch the whole numbers
    are at the end of their range. Two more are for masks: rows that are masked whole, and padded on either side. They
    are the same every time.

    What a batch costs is estimated from the shapes of the model, and sizes are as large as the limits allow. Where the
    original refuses a batch, multiples of 32 and of the strides take the place of its sizes, then smaller ones. Where
    it runs on none at all, `untried` says so.

    Args:
        source: the model, its path, or what `open_model` gave.
        memory: bytes that a run may take beside the weights: 1 GB by default.
        seconds: that a batch may take, by estimate: 10 by default.

    Raises:
        OnnxError: an input is no tensor of numbers.

    Example:
        >>> probes = Probes("m.onnx")
        >>> for batch in probes:
        ...     print(probes.label, {name: array.shape for name, array in batch.items()})
        small {'ids': (2, 2)}
        long and odd {'ids': (1, 2003)}
        end of the ids {'ids': (2, 2)}
    """

    def __init__(self, source: Source, memory: float | None = None, seconds: float | None = None) -> None:
        opened = open_to_run(source)
        proto = opened.proto
        self.label = ""
        self.limits = Limits(
            limits.MEMORY if memory is None else memory, limits.SECONDS if seconds is None else seconds
        )
        self._generator = np.random.default_rng(0)
        self._inputs = required_inputs(proto)
        for name, kind in self._inputs.items():
            _check_drawable(name, kind)
        tables = Tables(proto.graph)
        rows = {name: list(tables.rows(name)) for name, kind in self._inputs.items() if _is_whole(kind)}
        self._limits = {name: min(numbers) for name, numbers in rows.items() if numbers and min(numbers) > 0}
        self._bounds = {name: sorted(set(tables.bounds(name))) for name in self._inputs}
        self._open = {name: list(_open_dimensions(kind)) for name, kind in self._inputs.items()}
        self._cost = Cost(proto)
        self._step = math.lcm(ROUND, stride_of(proto))
        self._least = WINDOW if any(node.op_type == "Scan" for node in proto.graph.node) else SMALL
        self._second = False  # whether the second dimension of an input is the batch, where it alone is open
        self._refused: OnnxError | None = None
        self._why = ""  # the first refusal, for where nothing ran
        self._ran = False
        self._largest = ""
        self._refusals: list[str] = []

    def refuse(self, why: OnnxError) -> None:
        """Say that a model does not run on the batch that was given last."""
        self._refused = why

    def __iter__(self) -> Iterator[dict[str, Any]]:
        opened = any(self._open.values())
        small = yield from self._first("small", self._small_sizes() if opened else iter([{}]), ("small",))
        counted = any(map(self._counts, self._inputs))
        ids = ("all", "small")[: 1 + counted]
        sizes = small
        if opened:
            sizes = yield from self._first("long and odd", self._long_sizes(), ids)
        elif counted or self._limits:
            yield from self._first("long and odd", iter([{}]), ids)
        if opened and (small is not None or sizes is not None):
            known = [one for one in (small, sizes) if one is not None]
            self._largest = _sizes_text(self._open, {key: max(one[key] for one in known) for key in known[0]})
        base = sizes if small is None else small
        if base is None:
            return
        if self._limits:
            yield from self._first("end of the ids", iter([base]), ("last",))
        if any(map(self._is_mask, self._inputs)):
            for label, shift in (("rows that are masked whole", 1), ("rows that are padded", 2)):
                yield from self._first(label, iter([base]), ("small",), shift)

    def _first(
        self, label: str, options: Iterator[Sizes], ids: tuple[str, ...], shift: int | None = None
    ) -> Generator[dict[str, Any], None, Sizes | None]:
        """The first batch that the original runs, and its sizes; what was tried before it is told as untried."""
        refusals: list[str] = []
        for sizes in options:
            self._refused = self._too_much(sizes)
            for kind in ids if self._refused is None else ():
                self.label, self._refused = label, None
                yield self._draw(sizes, kind, shift)
                if self._refused is None:
                    self._ran = True
                    self._refusals += refusals if label != "small" else ()
                    return sizes
                if isinstance(self._refused, LimitError):
                    break
            reason = self._refused.what if self._refused is not None else ""
            why = reason if isinstance(self._refused, LimitError) else "the original does not run on it"
            self._why = self._why or reason
            refusals.append(f"{_sizes_text(self._open, sizes) or label} ({why})")
        self._refusals += refusals
        return None

    def _too_much(self, sizes: Sizes) -> LimitError | None:
        """Why a batch is not even drawn."""
        shapes = {name: self._shape(name, sizes) for name in self._inputs}
        memory, seconds = self._cost.of(shapes)
        if memory + sum(map(math.prod, shapes.values())) * _DRAWN > self.limits.memory:
            return LimitError(f"more than {memory_text(self.limits.memory)}")
        return LimitError(f"more than {self.limits.seconds:g} s") if seconds > self.limits.seconds else None

    def _is_mask(self, name: str) -> bool:
        kind = self._inputs[name].tensor_type.elem_type
        return _is_named(name, _MASKS[:1]) and (_is_whole(self._inputs[name]) or kind == TensorProto.BOOL)

    def _counts(self, name: str) -> bool:
        """True for whole numbers that no table tells the range of, and that are no mask."""
        return _is_whole(self._inputs[name]) and name not in self._limits and not _is_named(name, _MASKS)

    def untried(self) -> list[str]:
        """What the batches did not hold, in a few words each; known once they were all given."""
        messages = list(self._refusals)
        if not self._ran:
            messages.insert(0, f"anything at all: the original runs on nothing that was drawn ({self._why})")
        if self._largest:
            messages.append(f"sizes above {self._largest}")
        for name, kind in self._inputs.items():
            if _is_whole(kind) and name not in self._limits:
                message = "numbers whose range no table tells" if self._counts(name) else "anything but 0 and 1"
                messages.append(f"{message} in '{name}'")
            elif kind.tensor_type.elem_type in FLOAT_TYPES:
                messages.append(f"other than standard normal numbers in '{name}'")
        return messages

    # ---- sizes

    def _small_sizes(self) -> Iterator[Sizes]:
        """2 of everything; where the original does not run on it, multiples of what strides imply, and one row."""
        steps = (SMALL, *(self._step * factor for factor in MULTIPLES))
        return self._each(_Want(batch, size, (size, size), batch) for size in steps for batch in (SMALL, 1))

    def _long_sizes(self) -> Iterator[Sizes]:
        """Odd sizes, each followed by multiples of what strides imply, the largest first."""
        flat = any(self._inner(name) for name in self._open)
        wants = [_Want(1 if flat else 0, *sizes) for sizes in zip(LENGTHS, SIDES, ROWS, strict=True)]
        return self._each(each for want in wants for each in (want, want.rounded(self._step))[: 1 + flat])

    def _each(self, wants: Iterable[_Want]) -> Iterator[Sizes]:
        """The sizes that are wanted, those that differ."""
        tried: list[Sizes] = []
        for want in wants:
            if want.length < self._least:
                continue
            for self._second in (False, True):
                sizes = self._sizes(want)
                if sizes not in tried:
                    tried.append(sizes)
                    yield sizes

    def _inner(self, name: str) -> list[int]:
        """The open axes of an input that are no batch; of a state, which has layers in front, the second is one."""
        second = [1] if self._second and self._rank(name) == 3 and self._open[name][:1] == self._open[name][-1:] else []
        return [
            axis
            for axis, symbol in self._open[name]
            if (axis or self._rank(name) == 1) and axis not in second and "batch" not in symbol.lower()
        ]

    def _sizes(self, want: _Want) -> Sizes:
        """The size of each open dimension, by input and axis; those of one name are equal."""
        sizes: Sizes = {}
        known: dict[str, int] = {}
        places = [(name, axis, symbol) for name, dimensions in self._open.items() for axis, symbol in dimensions]
        inner = {name: self._inner(name) for name in self._open}
        # A name that is a length anywhere is one everywhere.
        for name, axis, symbol in sorted(places, key=lambda place: place[1] not in inner[place[0]]):
            if axis not in inner[name]:
                size = want.batch or (want.length if self._rank(name) <= 2 else want.rows)
            else:
                sides = (*want.sides, want.rows)
                size = want.length if len(inner[name]) == 1 else sides[inner[name].index(axis) % len(sides)]
            sizes[name, axis] = known.setdefault(symbol, size) if symbol else size
        for name, axis, symbol in places:
            sizes[name, axis] = _sum_of(symbol, known) or sizes[name, axis]
        return sizes

    def _rank(self, name: str) -> int:
        return len(self._inputs[name].tensor_type.shape.dim)

    def _shape(self, name: str, sizes: Sizes) -> list[int]:
        dims = self._inputs[name].tensor_type.shape.dim
        return [sizes.get((name, axis), dim.dim_value) for axis, dim in enumerate(dims)]

    # ---- numbers

    def _draw(self, sizes: Sizes, ids: str, shift: int | None) -> dict[str, Any]:
        """One batch; `ids` is `small` (0 and 1), `all` (all that there are) or `last` (the end of the range).

        Args:
            sizes: of the open dimensions.
            ids: which whole numbers.
            shift: the first of the patterns that the rows of a mask go through; `None` for masks of random numbers.
        """
        batch = {}
        for name, kind in self._inputs.items():
            shape = self._shape(name, sizes)
            dtype = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
            draw = self._whole if _is_whole(kind) else self._real
            truth = kind.tensor_type.elem_type == TensorProto.BOOL
            if shift is not None and shape and self._is_mask(name):
                drawn = _mask(shape, shift)
            else:
                drawn = self._generator.integers(0, 2, shape) if truth else draw(name, shape, ids)
            batch[name] = drawn.astype(dtype)
        return batch

    def _real(self, name: str, shape: list[int], ids: str) -> np.ndarray:
        if ids != "small" and len(shape) <= 1 and _is_named(name, _TIMES):
            return np.asarray(self._generator.uniform(0, STEPS, shape))
        drawn = np.asarray(self._generator.standard_normal(shape))
        if ids != "small" and shape:
            bounds = [near for bound in self._bounds[name] for near in _around(bound)]
            drawn.flat[: len(bounds)] = bounds[: drawn.size]
        return drawn

    def _whole(self, name: str, shape: list[int], ids: str) -> np.ndarray:
        limit = self._limits.get(name)
        if ids == "small" or (limit is None and not self._counts(name)):
            drawn = np.asarray(self._generator.integers(0, 2, shape))
            if shape and _is_named(name, _MASKS[:1]):
                drawn[..., :1] = 1  # no row is masked whole
            return drawn
        length = max(shape, default=1)
        end = max(STEPS, length) if limit is None else limit
        if ids == "last":
            return self._generator.integers(max(end - max(end // 16, 1), 0), end, shape)
        row = np.round(np.linspace(0, end - 1, length)) if length > 1 else np.array([end - 1])
        axes = [1] * len(shape)
        if shape:
            axes[shape.index(length)] = length
        return np.broadcast_to(row.reshape(axes), shape)


def random_batch(model: Source) -> dict[str, Any]:
    """The first of the batches that `Probes` draws on which the model runs: small, and always the same.

    Args:
        model: whose inputs.

    Raises:
        OnnxError: an input is no tensor of numbers, or the model runs on none of the batches.
    """
    opened = open_to_run(model)
    probes = Probes(opened)
    runner = Runner(opened.proto, opened.folder, opened.name, limits=probes.limits)
    for batch in probes:
        try:
            runner.run(batch)
        except OnnxError as refused:
            probes.refuse(refused)
        else:
            return batch
    raise OnnxError(f"it does not run on random inputs: {'; '.join(probes.untried())}", hint="give batches of inputs")


def _mask(shape: list[int], shift: int) -> np.ndarray:
    """A mask whose rows are all ones, all zeros, padded on the left and on the right, from the pattern `shift` on."""
    length = shape[-1]
    half = np.arange(length) >= (length + 1) // 2
    patterns = np.stack([np.ones(length, bool), np.zeros(length, bool), half, ~half])
    rows = patterns[(np.arange(shape[0] if len(shape) > 1 else 1) + shift) % len(patterns)]
    return np.broadcast_to(
        rows.reshape([*shape[:1], *[1] * (len(shape) - 2), length] if len(shape) > 1 else shape), shape
    )


def _check_drawable(name: str, declared: onnx.TypeProto) -> None:
    if not declared.HasField("tensor_type") or not declared.tensor_type.HasField("shape"):
        raise OnnxError(f"no random values can be made for the input '{name}'", hint="give batches of inputs")
    dtype = helper.tensor_dtype_to_np_dtype(declared.tensor_type.elem_type)
    if dtype.kind not in "iub" and declared.tensor_type.elem_type not in FLOAT_TYPES:
        raise OnnxError(f"no random values can be made for the input '{name}' ({dtype})", hint="give batches of inputs")


def _open_dimensions(declared: onnx.TypeProto) -> Iterator[tuple[int, str]]:
    """Axis and name of the dimensions that a model leaves open."""
    for axis, dim in enumerate(declared.tensor_type.shape.dim):
        if is_open(dim):
            yield axis, dim.dim_param


def _is_whole(declared: onnx.TypeProto) -> bool:
    return helper.tensor_dtype_to_np_dtype(declared.tensor_type.elem_type).kind in "iu"


def _is_named(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name.lower() for word in words)


def _sum_of(symbol: str, known: Mapping[str, int]) -> int | None:
    """The size that a name such as `past + length` or `length + 1` says; `None` for a plain name."""
    parts = [part.strip() for part in symbol.split("+")]
    if len(parts) < 2 or not all(part.isdigit() or part in known for part in parts):
        return None
    return sum(int(part) if part.isdigit() else known[part] for part in parts)


def _sizes_text(opened: Mapping[str, list[tuple[int, str]]], sizes: Sizes) -> str:
    """The sizes by name, as `length = 2003, side = 301`."""
    by_name = {
        symbol or f"dimension {axis} of '{name}'": sizes[name, axis]
        for name, dimensions in opened.items()
        for axis, symbol in dimensions
    }
    return ", ".join(f"{name} = {size}" for name, size in by_name.items())


def _around(bound: float) -> tuple[np.float32, ...]:
    """A number and its two neighbours."""
    middle = np.float32(bound)
    return middle, np.nextafter(middle, np.float32(-np.inf)), np.nextafter(middle, np.float32(np.inf))
