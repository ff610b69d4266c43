"""What a kernel costs by a model: its bytes, its floating-point operations and its launch; and a chip's figures.

The model is a roofline. A kernel takes the longer of the time in which the chip moves its bytes and the time in which
it does its arithmetic, and a launch more. It knows nothing of how well a kernel is written, of caches, of tails or of
kernels that overlap. So its figures are floors, for both sides of a comparison alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

FUSED, MATMUL, CONVOLUTION, ATTENTION, RECURRENCE, UPDATE, OTHER = CLASSES = (
    "fused loops", "matrix products", "convolutions", "attention", "recurrence", "update", "other",
)  # fmt: skip
PRODUCTS = (MATMUL, CONVOLUTION, ATTENTION, RECURRENCE)
PRECISION = {torch.bfloat16: "16 bits", torch.float16: "16 bits", torch.float32: "fp32", torch.float64: "fp64"}
TF32 = "tf32"
BRANCH, TRUNK = "branch", "trunk"
_SMALL = (10, 13)  # launches that a loss in chunks makes beside the chunks, without gradients and with them


@dataclass(frozen=True)
class Chip:
    """What a GPU can do.

    Args:
        name: of the GPU.
        bytes_per_second: of its memory.
        flops_per_second: of dense matrices, by the precision of their elements.
        graph_seconds: for each kernel of a CUDA graph.
        eager_seconds: for each kernel outside of one.
    """

    name: str
    bytes_per_second: float
    flops_per_second: Mapping[str, float]
    graph_seconds: float
    eager_seconds: float


H200 = Chip(
    name="NVIDIA H200",
    bytes_per_second=4.8e12,
    flops_per_second={"16 bits": 989e12, TF32: 494e12, "fp32": 67e12, "fp64": 67e12},
    graph_seconds=2.5e-6,
    eager_seconds=5e-6,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step, or some that belong together.

    Args:
        name: for people.
        kind: one of `CLASSES`.
        read: bytes that it reads.
        written: bytes that it writes.
        flops: floating-point operations of its matrix products; 0 for all else, which memory bounds.
        precision: of their elements, a key of `Chip.flops_per_second`.
        launches: number of kernels.
        in_graph: whether they are part of a CUDA graph.
        beside: `BRANCH` of what runs on a second branch of the graph, `TRUNK` of what runs at that time on the first.
    """

    name: str
    kind: str
    read: int
    written: int
    flops: int = 0
    precision: str = "16 bits"
    launches: int = 1
    in_graph: bool = True
    beside: str = ""

    @property
    def bytes(self) -> int:
        """Read and written."""
        return self.read + self.written

    def seconds(self, chip: Chip) -> float:
        """Floor of its time, see the head of this file."""
        launch = chip.graph_seconds if self.in_graph else chip.eager_seconds
        return self.busy(chip) + self.launches * launch

    def busy(self, chip: Chip) -> float:
        """The same without the launches."""
        return max(self.bytes / chip.bytes_per_second, self.flops / chip.flops_per_second[self.precision])


@dataclass(frozen=True)
class Cost:
    """What the kernels of a step cost together. Costs are added, and multiplied by numbers.

    Args:
        launches: number of kernels.
        eager_launches: those of them outside of a CUDA graph.
        bytes: read and written.
        flops: of matrix products.
        seconds: by class of kernel, with their launches.
        bytes_of: bytes by class of kernel.
        hidden: seconds of kernels on a second branch that the first branch's leave the memory idle for.
    """

    launches: float = 0.0
    eager_launches: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    bytes_of: Mapping[str, float] = field(default_factory=dict)
    hidden: float = 0.0

    @classmethod
    def of(cls, kernels: Iterable[Kernel], chip: Chip) -> Cost:
        """The sum over kernels, which run one after another but for those of a second branch.

        While the trunk's kernels wait for arithmetic, those of the branch have the memory for themselves: for so long
        they cost nothing but their launches.
        """
        total, branch, idle = cls(), 0.0, 0.0
        for one in kernels:
            outside = 0 if one.in_graph else one.launches
            time, moved = {one.kind: one.seconds(chip)}, {one.kind: one.bytes}
            total = total + cls(one.launches, outside, one.bytes, one.flops, time, moved)
            branch += one.busy(chip) if one.beside == BRANCH else 0.0
            idle += one.busy(chip) - one.bytes / chip.bytes_per_second if one.beside == TRUNK else 0.0
        return replace(total, hidden=min(branch, idle))

    @property
    def total_seconds(self) -> float:
        """Of all classes, without what is hidden."""
        return sum(self.seconds.values()) - self.hidden

    @property
    def product_seconds(self) -> float:
        """Of the kernels that multiply, which a step needs whoever writes its loops."""
        return sum(self.seconds.get(kind, 0.0) for kind in PRODUCTS)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.launches + other.launches,
            self.eager_launches + other.eager_launches,
            self.bytes + other.bytes,
            self.flops + other.flops,
            _added(self.seconds, other.seconds),
            _added(self.bytes_of, other.bytes_of),
            self.hidden + other.hidden,
        )

    def __mul__(self, factor: float) -> Cost:
        return Cost(
            self.launches * factor,
            self.eager_launches * factor,
            self.bytes * factor,
            self.flops * factor,
            {kind: value * factor for kind, value in self.seconds.items()},
            {kind: value * factor for kind, value in self.bytes_of.items()},
            self.hidden * factor,
        )

    def facts(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**asdict(self), "milliseconds": 1000 * self.total_seconds}


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    kinds = [kind for kind in CLASSES if kind in one or kind in other]
    return {kind: one.get(kind, 0.0) + other.get(kind, 0.0) for kind in kinds}


def at_depth(costs: Mapping[int, Cost], depth: int) -> Cost:
    """The cost at a depth: as it was counted, or from those of two depths, each layer costing what the ones between do.

    Args:
        costs: by number of layers.
        depth: number of layers.
    """
    if depth in costs:
        return costs[depth]
    (low, first), (high, second) = sorted(costs.items())
    return first + (second + first * -1.0) * ((depth - low) / (high - low))


def outside(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The same kernels, outside of a CUDA graph."""
    return [replace(one, in_graph=False) for one in kernels]


def classifier_loss_kernels(
    rows: int, features: int, classes: int, itemsize: int, at_once: int, gradients: bool, precision: str = "16 bits"
) -> list[Kernel]:
    """The kernels of a classifier's loss in chunks of rows, as `ops/classifier_loss.py` launches them on a GPU.

    Args:
        rows: of the classifier's input.
        features: of each.
        classes: that it tells apart.
        itemsize: bytes of an element.
        at_once: rows of a chunk.
        gradients: whether those of input and weight are made as well.
        precision: of the products.
    """
    weight, total = classes * features * itemsize, 4 * classes * features
    kernels = [Kernel("which rows count, and the mean", FUSED, 8 * rows, 4 * rows, launches=_SMALL[gradients])]
    for first in range(0, rows, at_once):
        count = min(at_once, rows - first)
        part, logits = count * features * itemsize, count * classes * itemsize
        product = {"kind": MATMUL, "flops": 2 * count * classes * features, "precision": precision}
        kernels.append(Kernel("logits", read=part + weight, written=logits, **product))  # type: ignore[arg-type]
        kernels.append(Kernel("cross_entropy", FUSED, logits, logits if gradients else 4 * count))
        if gradients:
            before = total if first else 0
            kernels.append(Kernel("of_x", read=logits + weight, written=part, **product))  # type: ignore[arg-type]
            kernels.append(
                Kernel("of_weight", read=logits + part + before, written=total, **product)  # type: ignore[arg-type]
            )
    if gradients and itemsize < 4:
        kernels.append(Kernel("rounded", FUSED, total, weight))
    return kernels


def foreach_launches(sizes: Sequence[int], columns: int) -> int:
    """Kernels of one call of torch's `multi_tensor_apply`, which takes a list of tensors in pieces of 65536 elements.

    Args:
        sizes: number of elements of each tensor.
        columns: lists that are walked over together.
    """
    most_tensors, most_blocks, chunk = (110, 64, 48, 36, 30)[min(columns, 5) - 1], 320, 65536
    launches = tensors = blocks = 0
    for size in sizes:
        tensors += 1
        for piece in range(pieces := -(-size // chunk)):
            blocks += 1
            last = piece == pieces - 1
            if (tensors == most_tensors and last) or blocks == most_blocks:
                launches += 1
                tensors, blocks = (0 if last else 1), 0
    return launches + (blocks > 0)
