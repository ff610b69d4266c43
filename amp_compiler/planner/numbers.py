"""Sizes, indices, positions and angles that are computed in floating point, and are not to be rounded.

The rounding of a 16-bit type is small beside data. A size of 803 that becomes 804, or an angle of 2,000 radians that is
off by four, is another number. Where such numbers come from nothing but what the model is given to every bit (inputs,
sizes, positions, stored numbers), they are computed as they were captured.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from amp_compiler.ir.dtypes import FLOATS, INTEGERS, DType
from amp_compiler.ir.graph import Node, PrecisionGraph, Value, ValueKind
from amp_compiler.policy.reduction_size import reduction_size
from amp_compiler.policy.rules import OpInfo, OpTable, RuleSet

_BODIES = frozenset({"onnx.If", "onnx.Loop", "onnx.Scan"})
_DIFFERENCES = frozenset({"onnx.Sub", "aten.sub", "aten.subtract", "aten.rsub", "onnx.Add", "aten.add"})
_COUNTING = frozenset({"matmul", "convolution", "pooling"})
_COORDINATES = 4  # a product that sums up to this many numbers makes other coordinates of them


class Origin(enum.IntEnum):
    """What a value is made of; of several operands the largest counts."""

    STORED = 0  # stored numbers and truth values
    POSITION = 1  # whole numbers beside them: sizes, positions, ranges
    GIVEN = 2  # floating-point inputs of the graph beside them, and what a sine or another bounded function gave
    DATA = 3  # something that went through a product, a norm or the like


@dataclass
class Numbers:
    """What the analysis found.

    Args:
        kept: by node, why it computes as it was captured.
        widest: by node, why it runs in the widest type of its inputs and in no narrower one.
    """

    kept: dict[str, str] = field(default_factory=dict)
    widest: dict[str, str] = field(default_factory=dict)


def find_numbers(graph: PrecisionGraph, rules: RuleSet) -> Numbers:
    """The nodes that compute sizes, indices and angles.

    An analysis forward says of each value what it is made of (`Origin`). Backward from what makes whole numbers, sizes,
    indices and coordinates, from comparisons and rounding, from sines, and from any curve that positions go through,
    the nodes are collected that nothing but numbers known to every bit went into. So are differences of positions.
    Products, norms, softmax and pooling end that; a product that sums next to nothing, as that of positions or
    coordinates with frequencies, does not, nor does one that counts: a product or mean of given numbers that becomes
    whole numbers. What has been data before it becomes such a number is computed in the widest type of its inputs; the
    phase of a sine may be a long sum of data.

    Args:
        graph: the captured graph.
        rules: their op table says what an op does, their section `keep` what is looked for.

    Example:
        >>> from amp_compiler.ir.graph import Operand
        >>> from amp_compiler.policy.loader import load_rules
        >>> graph = PrecisionGraph()
        >>> graph.add_value(Value("x", DType.FLOAT32, (2,), 2, ValueKind.INPUT))
        >>> for name, op, read, written in (("double", "onnx.Mul", "x", "y"), ("sine", "onnx.Sin", "y", "z")):
        ...     node = Node(name, op, (Operand(read, "input"),), (written,))
        ...     graph.add_node(node, [Value(written, DType.FLOAT32, (2,), 2)])
        >>> list(find_numbers(graph, load_rules("default")).kept)
        ['sine', 'double']
    """
    analysis = _Analysis(graph, rules.ops)
    sizes, angles = rules.keeps("sizes"), rules.keeps("angles")
    looks: tuple[tuple[bool, _Look, _Asks], ...] = (  # in this order, so that the reason is the weightiest one
        (sizes, analysis.sizes, lambda op, info: info.casts or bool(info.indices)),
        (sizes, analysis.steps, lambda op, info: info.steps or info.casts),
        (angles, analysis.angles, analysis.may_be_curved),
    )
    for wanted, look, asks in looks:
        asking = {op for op, info in analysis.infos.items() if asks(op, info)} if wanted else ()
        for node in [node for node in graph.nodes.values() if node.op in asking] if asking else ():
            look(node, analysis.infos[node.op])
    return analysis.numbers


_Look = Callable[[Node, OpInfo], None]
_Asks = Callable[[str, OpInfo], bool]


class _Analysis:
    def __init__(self, graph: PrecisionGraph, ops: OpTable) -> None:
        self.graph, self.numbers = graph, Numbers()
        self.infos: dict[str, OpInfo] = {}
        self.origins: dict[str, Origin] = {}
        for value in graph.values.values():
            if value.kind is not ValueKind.RESULT:
                self.origins[value.name] = _by_kind(value)
        for node in graph.nodes.values():
            info = self.infos.get(node.op) or self.infos.setdefault(node.op, ops.info(node.op))
            origin: Origin | None = None
            for name in node.outputs:
                dtype = graph.values[name].dtype
                if dtype not in FLOATS:
                    self.origins[name] = _by_type(dtype)
                else:
                    origin = self.origins[name] = self._made_by(node, info) if origin is None else origin

    def may_be_curved(self, op: str, info: OpInfo) -> bool:
        """Whether `angles` may find something at an op: at curves but for sines, only where there are positions."""
        curved = (info.squashes or info.family == "transcendental") and Origin.POSITION in self.origins.values()
        return info.periodic or curved or op in _DIFFERENCES

    def _made_by(self, node: Node, info: OpInfo) -> Origin:
        """What a floating-point result of a node is made of."""
        if info.positions:
            return Origin.POSITION
        if info.family == "factory":
            return Origin.STORED
        if info.family == "random":
            return Origin.GIVEN
        if not (info.plain or node.op in _BODIES or _sums_little(self.graph, node, info)):
            return Origin.DATA
        # Elsewhere whole numbers are axes, sizes and indices, which say where an element goes and not what it is.
        counting, origin_of_all = info.casts or info.carries, Origin.STORED
        for operand in node.inputs:
            origin = self.origins[operand.value]
            if origin > origin_of_all and (counting or self.graph.values[operand.value].dtype in FLOATS):
                origin_of_all = origin
        return max(origin_of_all, Origin.GIVEN) if info.periodic or info.squashes else origin_of_all

    def _operands(self, node: Node) -> Iterator[str]:
        """The floating-point operands."""
        for operand in node.inputs:
            if self.graph.values[operand.value].dtype in FLOATS:
                yield operand.value

    def _origin(self, node: Node) -> Origin:
        """What the operands of a node are made of."""
        return max((self.origins[name] for name in self._operands(node)), default=Origin.DATA)

    # ---- what asks for such numbers

    def sizes(self, node: Node, info: OpInfo) -> None:
        """Casts to whole numbers, sizes, indices and coordinates."""
        if info.casts and all(self.graph.values[name].dtype in INTEGERS for name in node.outputs):  # none: `item`
            # What reads the bits of a number (no `any`) counts nothing.
            self._back(node, f"{_label(node)} makes whole numbers of what is made of it", counted=bool(info.any))
        for operand in node.inputs if info.indices else ():
            if operand.slot in info.indices:
                reason = f"what is made of it is a size or a coordinate of {_label(node)}"
                self._back_from([operand.value], reason, places=True)

    def steps(self, node: Node, info: OpInfo) -> None:
        """Comparisons, rounding, and casts to truth values, which compare with zero."""
        if info.steps and self._origin(node) < Origin.DATA:
            self.numbers.kept.setdefault(node.name, "it compares or rounds numbers that are known to every bit")
        elif info.steps:
            self.numbers.widest.setdefault(node.name, "it compares or rounds")
        if info.steps or (info.casts and _makes(self.graph, node, DType.BOOL)):
            self._back(node, f"{_label(node)} compares or rounds what is made of it")

    def angles(self, node: Node, info: OpInfo) -> None:
        """Sines of what is known to every bit, curves that positions go through, differences of places."""
        if node.op in _DIFFERENCES:
            self._difference(node)
            return
        if info.periodic:
            kept = self.numbers.kept if self._origin(node) < Origin.DATA else self.numbers.widest
            kept.setdefault(node.name, "its operand is an angle, of which the whole turns do not count")
            self._back(node, f"{_label(node)} takes the angles that are made of it")
        elif (info.squashes or info.family == "transcendental") and self._origin(node) is Origin.POSITION:
            self.numbers.kept.setdefault(node.name, "its operand is made of positions alone")
            self._back(node, f"positions go through it to {_label(node)}")

    def _difference(self, node: Node) -> None:
        """Neighbours that are far from the start are one number in 16 bits; so are a place and the cell it is in."""
        read = list(self._operands(node))
        origins = [self.origins[name] for name in read]
        if len(read) != 2 or not all(origin in (Origin.POSITION, Origin.GIVEN) for origin in origins):
            return
        adds = node.op.endswith(".Add") or node.op.endswith(".add")
        if all(origin is Origin.POSITION for origin in origins):
            what = "a sum or difference of positions" if adds else "a difference of positions"
        elif not adds and any(self._is_whole(name) for name in read):
            what = "a difference to a whole number"
        else:
            return
        self.numbers.kept.setdefault(node.name, f"it is {what}")
        self._back(node, f"{_label(node)} is {what}")

    def _is_whole(self, name: str) -> bool:
        """True for what is made of whole numbers alone, and for what was rounded to one."""
        maker = self.graph.producer(name)
        return self.origins[name] is Origin.POSITION or (maker is not None and self.infos[maker.op].steps)

    def _back(self, node: Node, reason: str, *, counted: bool = False) -> None:
        """`_back_from` the floating-point operands of a node."""
        self._back_from(list(self._operands(node)), reason, counted=counted)

    def _back_from(self, pending: list[str], reason: str, *, counted: bool = False, places: bool = False) -> None:
        """Keep what makes some values, as far as they are known to every bit, and behind that what is computed plainly.

        What data went into runs in the widest type of its inputs, back to the product that made it.

        Args:
            pending: the values.
            reason: why.
            counted: the values become whole numbers, so that a product or mean of given numbers counts, and is kept.
            places: the values are coordinates, so that an offset that data make is added to a stored place as captured.
        """
        while pending:
            name = pending.pop()
            maker = self.graph.producer(name)
            if maker is None or maker.name in self.numbers.kept:
                continue
            exact = self.origins[name] < Origin.DATA or (counted and self._counts(maker))
            if exact or (places and self._moves_place(maker)):
                self.numbers.kept[maker.name] = reason
            elif maker.name in self.numbers.widest or not self._is_plain(maker):
                continue
            else:
                self.numbers.widest[maker.name] = reason
            pending += self._operands(maker)

    def _is_plain(self, node: Node) -> bool:
        """True for what computes element by element, moves elements, adds them up or interpolates between them."""
        info = self.infos[node.op]
        return info.plain or info.family == "resample"

    def _counts(self, node: Node) -> bool:
        """True for a product, convolution or mean of numbers that are known to every bit."""
        return (
            self.infos[node.op].family in _COUNTING
            and not _is_learned(self.graph, node)
            and self._origin(node) < Origin.DATA
        )

    def _moves_place(self, node: Node) -> bool:
        """True for a sum of data and many stored numbers, whose rounding a plan takes to cost nothing."""
        return node.op in _DIFFERENCES and any(
            self.origins[name] is Origin.STORED and self.graph.values[name].numel != 1 for name in self._operands(node)
        )


def _label(node: Node) -> str:
    return f"'{node.name}' ({node.op})"


def _makes(graph: PrecisionGraph, node: Node, dtype: DType) -> bool:
    """True where the first result of a node has a type."""
    return bool(node.outputs) and graph.values[node.outputs[0]].dtype is dtype


def _by_kind(value: Value) -> Origin:
    """What an input, parameter, buffer or constant is made of."""
    if not value.dtype.is_float:
        return _by_type(value.dtype)
    return Origin.GIVEN if value.kind is ValueKind.INPUT else Origin.STORED


def _by_type(dtype: DType) -> Origin:
    """What a value that is no real floating-point number says by its type."""
    if dtype in INTEGERS:
        return Origin.POSITION
    return Origin.STORED if dtype is DType.BOOL else Origin.DATA


def _sums_little(graph: PrecisionGraph, node: Node, info: OpInfo) -> bool:
    """True for a product of positions or coordinates: the outer one of two vectors, or one that sums few numbers.

    A layer, whose weight was learned, is none, however narrow it is.
    """
    size: int | None
    equation = node.attrs.get("equation")
    if isinstance(equation, str):
        size = _summed_by_einsum(graph, node, equation)
    elif info.family in ("matmul", "convolution") and not _is_learned(graph, node):
        size = reduction_size(graph, node, info.sums)
    else:
        size = None
    return size is not None and size <= _COORDINATES


def _is_learned(graph: PrecisionGraph, node: Node) -> bool:
    """True for a layer with a parameter, where parameters are known to be learned."""
    return not graph.execution.weights_unknown and any(
        graph.values[operand.value].kind is ValueKind.PARAMETER for operand in node.inputs
    )


def _summed_by_einsum(graph: PrecisionGraph, node: Node, equation: str) -> int | None:
    """How many products one element of an einsum sums, `None` where that is unknown."""
    read, arrow, result = equation.replace(" ", "").partition("->")
    summed = set(read) - {",", "."} - set(result)
    if not arrow:
        return None
    sizes: dict[str, int] = {}
    values = [value for _, value in graph.operands(node) if value.dtype.is_float]
    for term, value in zip(read.split(","), values, strict=False):
        before, _, behind = term.partition("...")
        shape = value.shape or ()
        for label, size in (*zip(before, shape, strict=False), *zip(behind[::-1], shape[::-1], strict=False)):
            if isinstance(size, int):
                sizes[label] = size
    return math.prod(sizes[label] for label in summed) if summed <= sizes.keys() else None
