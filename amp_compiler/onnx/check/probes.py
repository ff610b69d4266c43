"""Inputs for a verification without data: small ones, long and odd ones, and ids at the end of their range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.batches import required_inputs
from amp_compiler.onnx.check.memory import MEMORY, MemoryLimitError, limit_text
from amp_compiler.onnx.check.run import FLOAT_TYPES, open_to_run
from amp_compiler.onnx.model.infer import is_open
from amp_compiler.onnx.model.model import Source

SMALL = 2  # of every open dimension in the first batch
LENGTHS = (
    2003,
    499,
    127,
    31,
)  # of one open dimension beside the batch; the next where the model refuses the one before
SIDES = ((301, 403, 37), (149, 199, 19), (75, 101, 11), (31, 37, 7))  # of the sides of an image
STEPS = 1000  # time steps and positions without a table go up to here at least
_DRAWN = 12  # bytes of an element while it is drawn: in FP64, and in its own type
_WORK = 2e12  # multiplications that the long batch may cost: of a large model the length is less
_MOVES = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Expand", "Clip"})
_COMPARISONS = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_MASKS = ("mask", "type")
_TIMES = ("time", "step", "pos", "sigma")


class Probes:
    """Batches drawn for one model: iterate, and call `refuse` on a batch that the original cannot run.

    The first batch is small: open dimensions of 2, standard normal numbers, ids of 0 and 1. The second is long and odd:
    one open dimension beside the batch is a length of 2,003, two are the sides of an image (301 and 403). Whole numbers
    go through the range of the table that they pick rows of, else through 0 to 999 or as many as there are, time steps
    up to 1,000, and numbers that the model compares an input with are among it. In the third batch the whole numbers
    are at the end of their range. Where the original refuses a batch, or a run takes more than `memory.MEMORY`, a
    smaller one takes its place; that the first one is refused is an error. They are the same every time.

    Args:
        source: the model, its path, or what `open_model` gave.

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

    def __init__(self, source: Source) -> None:
        proto = open_to_run(source).proto
        self.label = ""
        self._generator = np.random.default_rng(0)
        self._inputs = required_inputs(proto)
        for name, kind in self._inputs.items():
            _check_drawable(name, kind)
        tables = _Tables(proto.graph)
        rows = {name: list(tables.rows(name)) for name, kind in self._inputs.items() if _is_whole(kind)}
        self._limits = {name: min(numbers) for name, numbers in rows.items() if numbers and min(numbers) > 0}
        self._bounds = {name: sorted(set(tables.bounds(name))) for name in self._inputs}
        self._open = {name: list(_open_dimensions(kind)) for name, kind in self._inputs.items()}
        weights = sum(int(np.prod(tensor.dims, dtype=np.int64)) for tensor in proto.graph.initializer)
        affordable = [number for number, length in enumerate(LENGTHS) if weights * length * 4 <= _WORK]
        self._first = affordable[0] if affordable else len(LENGTHS) - 1
        self._refused: OnnxError | None = None
        self._largest = ""
        self._refusals: list[str] = []

    def refuse(self, why: OnnxError) -> None:
        """Say that a model does not run on the batch that was given last."""
        self._refused = why

    def __iter__(self) -> Iterator[dict[str, Any]]:
        small = self._sizes(None)
        yield from self._give("small", small, "small")
        if self._refused:
            raise OnnxError(f"it does not run on random inputs: {self._refused.what}", hint="give batches of inputs")
        opened = any(self._open.values())
        counted = any(map(self._counts, self._inputs))
        numbers = range(self._first, len(LENGTHS)) if opened else range(int(counted or bool(self._limits)))
        for number in numbers:
            sizes = self._sizes(number)
            for ids in ("all", "small")[: 1 + counted]:
                yield from self._give("long and odd", sizes, ids)
                if not self._refused or isinstance(self._refused, MemoryLimitError):
                    break
            if self._refused:
                self._refusals.append(f"{_sizes_text(self._open, sizes) or 'all ids'} ({self._refusal_text()})")
            if not self._refused:
                self._largest = _sizes_text(self._open, {key: max(size, small[key]) for key, size in sizes.items()})
                break
        if self._limits:
            yield from self._give("end of the ids", small, "last")
            if self._refused:
                self._refusals.append(f"the end of the ids ({self._refusal_text()})")

    def _give(self, label: str, sizes: Mapping[tuple[str, int], int], ids: str) -> Iterator[dict[str, Any]]:
        """One batch, unless its inputs alone would take more than a run may."""
        self.label, self._refused = label, None
        if sum(math.prod(self._shape(name, sizes)) for name in self._inputs) * _DRAWN > MEMORY:
            self._refused = MemoryLimitError(f"its inputs take more than {limit_text()}")
        else:
            yield self._draw(sizes, ids)

    def _refusal_text(self) -> str:
        limited = isinstance(self._refused, MemoryLimitError)
        return f"more than {limit_text()} of memory" if limited else "the original does not run on it"

    def _counts(self, name: str) -> bool:
        """True for whole numbers that no table tells the range of, and that are no mask."""
        return _is_whole(self._inputs[name]) and name not in self._limits and not _is_named(name, _MASKS)

    def untried(self) -> list[str]:
        """What the batches did not hold, in a few words each; known once they were all given."""
        messages = list(self._refusals)
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

    def _sizes(self, number: int | None) -> dict[tuple[str, int], int]:
        """The size of each open dimension, by input and axis; those of one name are equal."""
        sizes: dict[tuple[str, int], int] = {}
        known: dict[str, int] = {}
        places = [(name, axis, symbol) for name, dimensions in self._open.items() for axis, symbol in dimensions]
        inner = {name: [axis for axis, _ in self._open[name] if axis or self._rank(name) == 1] for name in self._open}
        # A name that is a length anywhere is one everywhere.
        for name, axis, symbol in sorted(places, key=lambda place: place[1] not in inner[place[0]]):
            if number is None:
                size = SMALL
            elif axis not in inner[name]:
                flat = LENGTHS[number] if self._rank(name) <= 2 else SIDES[number][2]
                size = 1 if any(inner.values()) else flat
            else:
                sides = SIDES[number]
                size = LENGTHS[number] if len(inner[name]) == 1 else sides[inner[name].index(axis) % len(sides)]
            sizes[name, axis] = known.setdefault(symbol, size) if symbol else size
        for name, axis, symbol in places:
            sizes[name, axis] = _sum_of(symbol, known) or sizes[name, axis]
        return sizes

    def _rank(self, name: str) -> int:
        return len(self._inputs[name].tensor_type.shape.dim)

    def _shape(self, name: str, sizes: Mapping[tuple[str, int], int]) -> list[int]:
        dims = self._inputs[name].tensor_type.shape.dim
        return [sizes.get((name, axis), dim.dim_value) for axis, dim in enumerate(dims)]

    # ---- numbers

    def _draw(self, sizes: Mapping[tuple[str, int], int], ids: str) -> dict[str, Any]:
        """One batch; `ids` is `small` (0 and 1), `all` (all that there are) or `last` (the end of the range)."""
        batch = {}
        for name, kind in self._inputs.items():
            shape = self._shape(name, sizes)
            dtype = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
            draw = self._whole if _is_whole(kind) else self._real
            truth = kind.tensor_type.elem_type == TensorProto.BOOL
            batch[name] = (self._generator.integers(0, 2, shape) if truth else draw(name, shape, ids)).astype(dtype)
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
    """The first of the batches that `Probes` draws: small, and always the same.

    Args:
        model: whose inputs.

    Raises:
        OnnxError: an input is no tensor of numbers.
    """
    return next(iter(Probes(model)))


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


def _sizes_text(opened: Mapping[str, list[tuple[int, str]]], sizes: Mapping[tuple[str, int], int]) -> str:
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


class _Tables:
    """What the main graph looks up with an input, and compares it with."""

    def __init__(self, graph: onnx.GraphProto) -> None:
        self._stored = {tensor.name: tensor for tensor in graph.initializer}
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
            value = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
            if node.op_type == "Constant" and value is not None:
                self._stored[node.output[0]] = value

    def rows(self, value: str) -> Iterator[int]:
        """The rows of each table that a value picks rows of, less a stored offset that is added to it before."""
        for name, offset in self._moved(value, 0.0):
            for node in self._readers.get(name, ()):
                if node.op_type == "Gather" and node.input[1] == name and node.input[0] in self._stored:
                    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
                    yield self._stored[node.input[0]].dims[axis] - int(offset)

    def bounds(self, value: str) -> Iterator[float]:
        """The stored numbers that a value is compared with, as they are before the offset is added."""
        for name, offset in self._moved(value, 0.0):
            for node in self._readers.get(name, ()):
                if node.op_type in _COMPARISONS:
                    number = self._number(node.input[1] if node.input[0] == name else node.input[0])
                    if number is not None:
                        yield number - offset

    def _moved(self, value: str, offset: float) -> Iterator[tuple[str, float]]:
        """The value, and what casts, moves and stored offsets make of it, each with its offset."""
        pending, seen = [(value, offset)], {value}
        while pending:
            name, offset = pending.pop()
            yield name, offset
            for node in self._readers.get(name, ()):
                step: float | None = None
                if node.op_type in _MOVES and node.input[0] == name:
                    step = 0.0
                elif node.op_type == "Add" or (node.op_type == "Sub" and node.input[0] == name):
                    step = self._number(node.input[1] if node.input[0] == name else node.input[0])
                if step is not None and node.output[0] not in seen:
                    seen.add(node.output[0])
                    pending.append((node.output[0], offset + (step if node.op_type != "Sub" else -step)))

    def _number(self, name: str) -> float | None:
        """The number that is stored under a name; `None` where there is none, or more than one."""
        tensor = self._stored.get(name)
        if tensor is None or tensor.data_location != TensorProto.DEFAULT or np.prod(tensor.dims, dtype=int) != 1:
            return None
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])
