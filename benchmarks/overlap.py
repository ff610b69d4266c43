"""How much of a step's messages hides behind its products: an alpha-beta model of links, a roofline of a chip.

A step is a list of events on two queues: products and updates on one, messages on the other, each in order. A message
starts when it is sent and the one before it has arrived; who waits for it stands still. Only products (at half of the
chip's peak) and updates (at its memory's rate) take time, so what else a step computes would hide more than is said.

Sources: ring bandwidth and the logarithmic latency of trees as in NCCL's own estimate (nccl-tests, PERFORMANCE.md);
an H200 with 989 TFLOP/s of dense BF16 and 4.8 TB/s, NVLink 4 with 450 GB/s each way, eight InfiniBand ports of 400
Gb/s a node (NVIDIA's data sheets); latencies of 3 and 8 microseconds a hop. No figure of it is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

FLOPS, MEMORY = 989e12 / 2, 4.8e12  # a second: of products, half of the peak; of bytes
NODE = 8  # ranks
INSIDE, BETWEEN = (3e-6, 450e9), (8e-6, 400e9)  # seconds a hop, bytes a second; between nodes, of all ports together
BUCKET = 25e6  # bytes, of DistributedDataParallel
ADAM = 28  # bytes that an update of AdamW moves per element of a master with a 16-bit gradient and copy
PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # op: place of the first factor


@dataclass(frozen=True)
class Compute:
    """Work on the chip, in seconds: products, or updates."""

    seconds: float
    updates: bool = False


@dataclass(frozen=True)
class Send:
    """A message of `size` bytes in all; `kind` is `all_reduce`, `reduce_scatter`, `all_gather` or `broadcast`."""

    kind: str
    size: float
    name: object


@dataclass(frozen=True)
class Wait:
    """Stands still until a message has arrived."""

    name: object


Events = list[Compute | Send | Wait]


@dataclass(frozen=True)
class Prediction:
    """Of one step of one rank.

    Args:
        seconds: the whole.
        computing: of products and updates.
        sending: of messages, as if each were alone.
        sent: bytes that a rank sends.
        messages: number of messages.
    """

    seconds: float
    computing: float
    sending: float
    sent: float
    messages: int


def seconds_of(kind: str, size: float, ranks: int) -> float:
    """How long a message takes on links that nobody else uses.

    Args:
        kind: as of `Send`.
        size: bytes of the whole.
        ranks: that take part, eight a node.
    """
    alpha, beta = INSIDE if ranks <= NODE else BETWEEN
    hops = math.log2(min(ranks, NODE)) * INSIDE[0] + math.log2(max(ranks / NODE, 1)) * alpha
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * (hops + (ranks - 1) / ranks * size / beta)


def predict(events: Events, ranks: int) -> Prediction:
    """Run the two queues.

    Args:
        events: of one rank; all ranks are alike.
        ranks: their number.
    """
    now = line = computing = sending = sent = 0.0
    arrived: dict[object, float] = {}
    for event in events:
        if isinstance(event, Compute):
            now += event.seconds
            computing += event.seconds
        elif isinstance(event, Send):
            took = seconds_of(event.kind, event.size, ranks)
            line = arrived[event.name] = max(now, line) + took
            sending += took
            sent += event.size * (ranks - 1) / ranks * (2 if event.kind == "all_reduce" else 1)
        else:
            now = max(now, arrived[event.name])
    return Prediction(max(now, line), computing, sending, sent, len(arrived))


def events_of(graph: fx.Graph, ranks: int) -> Events:
    """Those of a step's graph.

    Args:
        graph: with collectives, on meta or fake tensors.
        ranks: their number.
    """
    found: Events = []
    for node in graph.nodes:
        name = str(node.target).partition(".default")[0]
        short = name.rpartition(".")[2]
        if "_c10d_functional" in name and short == "wait_tensor":
            found.append(Wait(_source(node.args[0])))
        elif "_c10d_functional" in name:
            size = node.args[0].meta["val"].numel() * node.args[0].meta["val"].dtype.itemsize
            kind = short.removesuffix("_tensor").removesuffix("_into")
            found.append(Send(kind, size * ranks if kind == "all_gather" else size, node))
        elif name.startswith("aten.") and short in PRODUCTS:
            left, right = (node.args[PRODUCTS[short] + place].meta["val"] for place in (0, 1))
            found.append(Compute(2 * left.numel() * right.shape[-1] / FLOPS))
        elif name.endswith("_update"):
            found.append(Compute(sum(one.meta["val"].numel() for one in node.args[0]) * ADAM / MEMORY, True))
    return found


def _source(node: fx.Node) -> fx.Node:
    while "_c10d_functional" not in str(node.target):
        node = node.args[0]
    return node


@dataclass(frozen=True)
class Unit:
    """A layer: its elements, and the seconds of its products in the forward; the backward takes twice as long."""

    elements: int
    seconds: float


def units_of(model: torch.nn.Sequential, forward: float) -> list[Unit]:
    """The layers of a model, among which the seconds of the forward are divided as their matrices are.

    Args:
        model: of layers; an embedding has no product.
        forward: seconds of all products of the forward.
    """
    elements = [sum(one.numel() for one in layer.parameters()) for layer in model]
    weights = [0 if isinstance(layer, torch.nn.Embedding) else n for layer, n in zip(model, elements, strict=True)]
    return [Unit(n, forward * weight / sum(weights)) for n, weight in zip(elements, weights, strict=True)]


def data_parallel(units: Sequence[Unit], ranks: int, width: int = 4, zero: bool = False) -> Events:
    """DistributedDataParallel under autocast: all-reduces in buckets during the backward, and a whole update.

    Args:
        units: the layers.
        ranks: their number.
        width: bytes of a gradient as it is sent: 4, or 2 with `bf16_compress_hook`.
        zero: `ZeroRedundancyOptimizer`, whose ranks update a part of the FP32 weights each, and broadcast it.
    """
    found: Events = [Compute(sum(unit.seconds for unit in units))]
    for place, unit in reversed(list(enumerate(units))):
        parts = max(round(unit.elements * width / BUCKET), 1)
        for part in range(parts):
            found += [
                Compute(2 * unit.seconds / parts),
                Send("all_reduce", unit.elements * width / parts, (place, part)),
            ]
    total = sum(unit.elements for unit in units)
    found += _awaited(found)
    found.append(Compute(total * ADAM / MEMORY / (ranks if zero else 1), True))
    return [*found, Send("broadcast", total * 4, "weights"), Wait("weights")] if zero else found


def fully_sharded(units: Sequence[Unit], ranks: int) -> Events:
    """FSDP2 with BF16 parameters and gradients: each layer is gathered for the forward, and again for the backward.

    The next layer is asked for before the work on one begins, and gradients are scattered behind each layer.

    Args:
        units: the layers.
        ranks: their number.
    """
    found: Events = []
    order = [("forward", place) for place in range(len(units))]
    order += [("backward", place) for place in reversed(range(len(units)))]
    for turn, (way, place) in enumerate(order):
        for ahead in order[0 if turn == 0 else turn + 1 : turn + 2]:
            found.append(Send("all_gather", units[ahead[1]].elements * 2, ahead))
        found.append(Wait((way, place)))
        found.append(Compute(units[place].seconds * (1 if way == "forward" else 2)))
        if way == "backward":
            found.append(Send("reduce_scatter", units[place].elements * 2, ("gradient", place)))
    total = sum(unit.elements for unit in units)
    return [
        *found,
        *(Wait(("gradient", place)) for place in range(len(units))),
        Compute(total * ADAM / MEMORY / ranks, True),
    ]


def _awaited(events: Events) -> Iterator[Wait]:
    return (Wait(event.name) for event in list(events) if isinstance(event, Send))
