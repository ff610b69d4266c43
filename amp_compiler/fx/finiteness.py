"""Whether the values of a graph are finite, and which of its nodes made the first that are not."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import canonical_op, neutral_dtype, node_tensor
from amp_compiler.fx.meta import Key
from amp_compiler.ir.nonfinite import ValueRange
from amp_compiler.ops.fp8 import FP8
from amp_compiler.ops.synchronized_norm import ALONE

_MASKS = frozenset({"aten.full", "aten.full_like", "aten.masked_fill", "aten.scalar_tensor", "aten.where"})
_CASTS = frozenset({"aten._to_copy", "aten.to"})
_TAKES = frozenset({"aten.slice", "aten.select"})  # zeros that are there already, as of a history that just began


def range_of(value: Tensor) -> ValueRange:
    """What a floating-point tensor holds."""
    wide = value.detach() if value.dtype is torch.float64 else value.detach().float()
    sizes = wide.abs().reshape(-1)
    finite = sizes[torch.isfinite(sizes)]
    numbers = finite[finite != 0]
    least, greatest = (float(numbers.min()), float(numbers.max())) if numbers.numel() else (0.0, 0.0)
    bad = int(torch.isinf(sizes).sum()), int(torch.isnan(sizes).sum())
    return ValueRange(least, greatest, *bad, neutral_dtype(value.dtype).short, finite.numel() - numbers.numel())


class Finiteness:
    """Whether the values of a graph's nodes are finite.

    Minus infinity that a mask puts in on purpose is told from an overflow by what comes of it.

    Args:
        is_forward: whether a node belongs to the forward: only there masks are put in.

    Attributes:
        ranges: of the values that were looked at.
    """

    def __init__(self, is_forward: Callable[[fx.Node], bool]) -> None:
        self._is_forward = is_forward
        self._looked, self._masked = set[fx.Node](), set[fx.Node]()  # all, and those with minus infinity on purpose
        self._bad: dict[fx.Node, None] = {}  # infinite or NaN
        self.ranges: dict[fx.Node, ValueRange] = {}

    def note(self, node: fx.Node, value: Any) -> None:
        """Look at the value of a node; those of its inputs come before it."""
        values = value if isinstance(value, (list, tuple)) else [value]
        items = [one.float() if isinstance(one, Tensor) and one.dtype in FP8 else one for one in values]
        first = next((one for one in items if isinstance(one, Tensor) and one.is_floating_point()), None)
        if first is not None:
            self.ranges[node] = range_of(first)
        bad = [item for item in items if isinstance(item, Tensor) and not bool(torch.isfinite(item).all())]
        self._looked.add(node)
        if bad and all(bool((item.isfinite() | item.isneginf()).all()) for item in bad) and self._may_mask(node):
            self._masked.add(node)
        elif bad:
            self._bad[node] = None

    def is_bad(self, node: fx.Node) -> bool:
        """Whether its value is infinite or NaN, and no mask."""
        return node in self._bad

    def origins(self, wanted: Iterable[fx.Node]) -> set[fx.Node]:
        """The nodes that made something bad of finite values, and that bad ones go back to.

        Args:
            wanted: the nodes to go back from.
        """
        origins: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        open_nodes = list(wanted)
        while open_nodes:
            node = open_nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if node not in self._looked and node.op == "call_function":  # a sum of gradients, which was not run
                open_nodes += node.all_input_nodes
            if not self.is_bad(node):
                continue
            causes = [source for source in node.all_input_nodes if self.is_bad(source)]
            open_nodes += causes
            if not causes:
                origins.add(node)
        return origins

    @property
    def bad(self) -> list[fx.Node]:
        """All nodes whose value is infinite or NaN, and no mask."""
        return [*self._bad]

    @property
    def vanished(self) -> list[fx.Node]:
        """All nodes that made zeros alone of inputs that hold other numbers."""
        zero = {node for node, one in self.ranges.items() if one.is_zero}
        zeros = (node for node in zero if node.op == "call_function" and not _means_zeros(node))
        return [
            node for node in zeros if zero.isdisjoint(read := node.all_input_nodes) and self.ranges.keys() & {*read}
        ]

    def is_zero(self, node: fx.Node) -> bool:
        """Whether its value holds zeros and nothing else."""
        return node in self.ranges and self.ranges[node].is_zero

    def _may_mask(self, node: fx.Node) -> bool:
        if node.op != "call_function" or node.target is operator.getitem:
            return node.op != "call_function" or node.args[0] in self._masked
        sources = node.all_input_nodes
        is_mask = canonical_op(node.target) in _MASKS or not self._masked.isdisjoint(sources)
        return self._is_forward(node) and is_mask and not any(map(self.is_bad, sources))


class Replay(fx.Interpreter):
    """Runs a graph node by node, but for its update, and notes of each value whether it is finite.

    Of several ranks this one is by itself: a `SyncBatchNorm` has the statistics of its own rows.

    Args:
        graph_module: the graph.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=True)
        self.source = graph_module.graph
        self.seen = Finiteness(is_forward)

    def run_again(self, values: Mapping[fx.Node, Any], device: torch.device) -> Finiteness:
        """Run up to the update; random numbers stay as they are.

        Args:
            values: the values of the placeholders; of those that only the update reads they may be missing.
            device: whose random numbers are drawn, beside the CPU's.
        """
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            for node, value in values.items():
                self._note(node, value)
            for node in self.source.nodes:
                if node.op in ("call_function", "get_attr") and node.meta.get(Key.PHASE) != "update":
                    self._note(node, self.run_node(node))
                    for done in self.user_to_last_uses.get(node, ()):
                        self.env.pop(done, None)
        return self.seen

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; a message is not sent."""
        return super().call_function(ALONE.get(target, target), args, kwargs)

    def _note(self, node: fx.Node, value: Any) -> None:
        self.env[node] = value
        self.seen.note(node, value)


def is_forward(node: fx.Node) -> bool:
    """Whether a node belongs to the forward, as every node does of a graph that has no other phase."""
    return bool(node.meta.get(Key.PHASE, "forward") == "forward")


def _means_zeros(node: fx.Node) -> bool:
    return (op := canonical_op(node.target)) in _TAKES or (op == "aten.mul" and 0 in node.args)


def rounds(node: fx.Node) -> bool:
    """Whether a node is a cast to a narrower type, or an input that is the rounded copy of another one."""
    if node.op == "placeholder":
        return Key.LOW in node.meta
    tensor = node_tensor(node)
    if node.op != "call_function" or tensor is None or canonical_op(node.target) not in _CASTS:
        return False
    source = node_tensor(node.all_input_nodes[0]) if node.all_input_nodes else None
    return source is not None and tensor.dtype.itemsize < source.dtype.itemsize


def planned_for(node: fx.Node, planned: Mapping[str, Any]) -> str:
    """The node of the plan that a node of a graph was made for, or the input of the model whose copy it is.

    A cast that nobody planned belongs to what makes the value that it casts.

    Args:
        node: of a rewritten forward, or of the joint graph of forward and backward.
        planned: the nodes of the plan, by name.
    """
    while node.op == "call_function":
        name = str(node.meta.get(Key.PLANNED, node.name))
        if name in planned:
            return name
        if not node.all_input_nodes:
            return ""
        node = node.all_input_nodes[0]
    low = node.meta.get(Key.LOW)
    return str(low[0]) if low else node.name
