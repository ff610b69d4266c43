"""Writing a norm or GELU that stands in parts as the one op that ONNX has for it, where that is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.lowering.compounds import GELU, LAYER_NORM, RMS_NORM, Compound, find_compounds
from amp_compiler.onnx.model.data import array_of, release, tensor_of
from amp_compiler.onnx.model.edit import unique
from amp_compiler.onnx.model.model import OnnxModel, ValueType
from amp_compiler.onnx.model.terms import is_op, numbers_of, scalar_of
from amp_compiler.onnx.model.types import ir_type, neutral_type

_OPS = {LAYER_NORM: ("LayerNormalization", 17), RMS_NORM: ("RMSNormalization", 23), GELU: ("Gelu", 20)}
FIRST_OPSET = 17  # from which on a norm can be written so: an RMSNorm before 23 by a LayerNorm
_STORING = ("Constant", "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze")  # goes where nothing reads it
_MADE_ONE = frozenset({"Pow", "ReduceMean", "Add", "Sqrt", "Div"})  # an RMSNorm that ONNX Runtime makes one kernel
_LISTED = 3  # nodes that a reason names


@dataclass
class Fusion:
    """What was fused, and what was not.

    Args:
        made: by the node that took the place of others, what it was written out in.
        left: by the last node of what stays in parts, why it does.
        fused: how many there are of each op.
        late: how many of each op, with its first opset, would be fused in a later opset.
        kinds: by the norm or GELU that took the place of others, its kind.
        like: by the name of a value that was added, that of the one whose magnitudes it has.
    """

    made: dict[ir.Node, str] = field(default_factory=dict)
    left: dict[ir.Node, str] = field(default_factory=dict)
    fused: Counter[str] = field(default_factory=Counter)
    late: Counter[tuple[str, int]] = field(default_factory=Counter)
    kinds: dict[ir.Node, str] = field(default_factory=dict)
    like: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Norm:
    """What the one op is given: the first axis of the norm from behind, epsilon, and the operands behind the data."""

    axis: int
    epsilon: float
    operands: tuple[ir.Value, ...]
    sizes: tuple[int, ...]


class _Unfit(Exception):
    """Why a compound is not what the one op computes."""


def fuse(model: OnnxModel, only: Collection[str] | None = None) -> Fusion:
    """Write each norm and GELU as `LayerNormalization`, `RMSNormalization` or `Gelu`, where that computes the same.

    The result keeps its name, and the node that of the last one that it replaces. Stored data that nothing reads any
    more go. No opset is raised: from 17 on, where there is no `RMSNormalization` yet, an RMSNorm of `x` is the first
    half of the `LayerNormalization` of `x` beside `-x`, whose mean is zero. Changes the model.

    Args:
        model: as `read_model` gives it.
        only: the names of the results of what is to be written so; all by default.

    Example:
        ```python
        model = read_model(open_model("m.onnx"))
        print(fuse(model).fused)        # Counter({'LayerNormalization': 5})
        ```
    """
    done = Fusion()
    fuser = _Fuser(model, done)
    for ways in list(find_compounds(model.ir.graph)):
        if only is not None and ways[0].last.outputs[0].name not in only:
            continue
        if any(node in fuser.gone or node in done.made for node in ways[0].nodes):
            continue
        op, since = _OPS[ways[0].kind]
        why = ""
        for way in ways:
            try:
                norm = None if way.kind == GELU else fuser.norm(way)
                fuser.check(way)
            except _Unfit as unfit:
                why = why or str(unfit)
                continue
            op, since = _OPS[way.kind]
            if model.opset("") < since:
                done.late[op, since] += 1
                why = f"{op} comes with opset {since}, and the opset is {model.opset('')}"
                if way.kind != RMS_NORM or norm is None or not fuser.doubles(way, norm, unasked=only is not None):
                    break
                op = _OPS[LAYER_NORM][0]
            told = f"it was written out in {len(way.nodes)} nodes ({_listed(way)})"
            done.made.update(dict.fromkeys(fuser.write(way, norm), told))
            done.fused[op] += 1
            break
        if ways[0].last not in done.made:
            done.left.setdefault(ways[0].last, f"not fused to one {op}: {why}")
    return done


def _listed(way: Compound) -> str:
    names = [f"'{node.name}'" for node in reversed(way.nodes)]
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


class _Fuser:
    def __init__(self, model: OnnxModel, done: Fusion) -> None:
        self.model, self.done = model, done
        self.gone: set[ir.Node] = set()
        self._names: set[str] = set()
        self._node_names: set[str] = set()
        self._stored: dict[tuple[object, ...], ir.Value] = {}

    # ---- whether it is the same

    def check(self, way: Compound) -> None:
        """Types and surroundings.

        Raises:
            _Unfit: they do not allow it.
        """
        own = set(way.nodes)
        for node in way.nodes:
            value = node.outputs[0]
            if node is way.last:
                continue
            if value.is_graph_output():
                raise _Unfit(f"'{value.name}' within it is an output of the model")
            if any(user not in own for user, _ in value.uses()):
                raise _Unfit(f"'{value.name}' within it is read elsewhere too")
        data, result = (self.model.type_of(value) for value in (way.found.values["x"], way.last.outputs[0]))
        if data.dtype is not result.dtype:
            raise _Unfit(f"it reads {_told(data.dtype)} and makes {_told(result.dtype)}")
        for node in way.nodes:
            made = self.model.type_of(node.outputs[0]).dtype
            if node.op_type in ("ReduceMean", "Erf", "Tanh") and made is not DType.FLOAT32:
                raise _Unfit(f"it computes in {_told(made)}")
            self._widens(node, own, way.found.values["x"])

    def _widens(self, node: ir.Node, own: set[ir.Node], data: ir.Value) -> None:
        """Whether what a node reads beside the data has more dimensions than these, so that its result has too."""
        shape = self.model.type_of(data).shape
        for index, value in enumerate(node.inputs):
            if value is None or value is data or value.producer() in own or (node.op_type == "ReduceMean" and index):
                continue
            read = self.model.type_of(value).shape
            if read is None or len(read) > len(shape or ()):
                raise _Unfit(f"'{value.name}' may have more dimensions than its input")

    def norm(self, way: Compound) -> _Norm:
        """What the op is given that stands for a norm.

        Raises:
            _Unfit: there is no such.
        """
        values = way.found.values
        data = self.model.type_of(values["x"])
        count = self._axes(way, data)
        sizes = tuple(size for size in (data.shape or ())[-count:] if isinstance(size, int))
        if len(sizes) != count:
            raise _Unfit("the sizes that it is taken over are not known")
        if "scale" not in values:
            raise _Unfit("it has no stored scale")
        operands = tuple(values[name] for name in ("scale", "bias") if name in values)
        for value in operands:
            self._fits(value, data, sizes)
        return _Norm(-count, self._epsilon(values.get("epsilon"), data), operands, sizes)

    def _axes(self, way: Compound, data: ValueType) -> int:
        """Over how many of the last dimensions the means are taken."""
        rank = None if data.shape is None else len(data.shape)
        counts = set()
        for node in way.nodes:
            if node.op_type != "ReduceMean":
                continue
            axes = _axes_of(node)
            kept = node.attributes.get("keepdims")
            if rank is None or not axes or (kept is not None and kept.value != 1):
                raise _Unfit("its means drop the dimensions, or name none, or the rank is unknown")
            if {axis % rank for axis in axes} != set(range(rank - len(axes), rank)):
                raise _Unfit("its means are not over the last dimensions")
            counts.add(len(axes))
        if len(counts) != 1:
            raise _Unfit("its means are over different dimensions")
        return counts.pop()

    def _epsilon(self, value: ir.Value | None, data: ValueType) -> float:
        if value is None:
            return 0.0
        number = scalar_of(value)
        shape = self.model.type_of(value).shape
        if number is None or shape is None or len(shape) > len(data.shape or ()):
            raise _Unfit(f"its epsilon '{value.name}' is not one stored number")
        if not np.isfinite(number.astype(np.float64)) or float(number) < 0:
            raise _Unfit(f"its epsilon is {float(number):g}")
        return float(number)

    def _fits(self, value: ir.Value, data: ValueType, sizes: tuple[int, ...]) -> None:
        """Whether stored data are one number for each of those that the norm is taken over."""
        known = self.model.type_of(value)
        if known.dtype is not data.dtype:
            raise _Unfit(f"it reads {_told(data.dtype)}, and '{value.name}' is {_told(known.dtype)}")
        shape = known.shape
        if shape is None or len(shape) > len(data.shape or ()) or set(shape[: -len(sizes)]) - {1}:
            raise _Unfit(f"'{value.name}' differs along other dimensions than the norm is taken over")
        tail = shape[-len(sizes) :]
        if any(one not in (1, size) for one, size in zip(reversed(tail), reversed(sizes), strict=False)):
            raise _Unfit(f"'{value.name}' has the shape {list(shape)}, and the norm is taken over {list(sizes)}")
        if tuple(shape) != sizes and tensor_of(value) is None:
            raise _Unfit(f"'{value.name}' is not stored in the shape {list(sizes)}")

    def doubles(self, way: Compound, norm: _Norm, *, unasked: bool) -> bool:
        """Whether an RMSNorm is to be written by a LayerNorm: the opset has it, and the scale is stored.

        Unasked it is not where a runtime makes one kernel of the parts, with the casts before and behind it.
        """
        if unasked and _MADE_ONE.issubset(node.op_type for node in way.nodes):
            return False
        return self.model.opset("") >= FIRST_OPSET and tensor_of(norm.operands[0]) is not None

    # ---- writing it

    def write(self, way: Compound, norm: _Norm | None) -> list[ir.Node]:
        """Make the last node the one op, and take the others away.

        Returns:
            The nodes that stand for them now.
        """
        last = way.last
        before = {value: None for node in way.nodes for value in node.inputs if value is not None}
        data = way.found.values["x"]
        added: list[ir.Node] = []
        if norm is None:
            by_tanh = any(node.op_type == "Tanh" for node in way.nodes)
            _become(last, _OPS[way.kind][0], [data], [ir.AttrString("approximate", "tanh" if by_tanh else "none")])
        elif way.kind == RMS_NORM and self.model.opset("") < _OPS[RMS_NORM][1]:
            added = self._doubled(last, data, norm)
        else:
            operands = [self._shaped(value, norm.sizes) for value in norm.operands]
            _become(last, _OPS[way.kind][0], [data, *operands], _settings(norm))
        others = [node for node in way.nodes if node is not last]
        if isinstance(last.graph, ir.Graph):
            last.graph.remove(others, safe=True)
            last.graph.insert_before(last, added)
        self.gone.update(others)
        for value in before:
            self._drop(value)
        self.done.kinds[added[-1] if added else last] = way.kind
        return [*added, last]

    def _doubled(self, last: ir.Node, data: ir.Value, norm: _Norm) -> list[ir.Node]:
        """Make the last node of an RMSNorm the first half of the LayerNorm of its data beside their negative.

        The mean of those is zero, to the rounding of FP32, and their variance the mean of the squares.
        """
        whole = self.model.type_of(data)
        sizes = list(whole.shape or ())
        sizes[norm.axis] = 2 * norm.sizes[0]
        twice = ValueType(whole.dtype, tuple(sizes))
        negative = self._node(last, "Neg", [data], whole)
        both = self._node(last, "Concat", [data, negative.outputs[0]], twice, ir.AttrInt64("axis", norm.axis))
        self.done.like.update({one.outputs[0].name or "": data.name or "" for one in (negative, both)})
        scale = self._scale_twice(norm)
        normal = self._node(last, _OPS[LAYER_NORM][0], [both.outputs[0], scale], twice, *_settings(norm))
        bounds = [self._indices(name, at) for name, at in (("start", 0), ("end", norm.sizes[0]), ("axis", norm.axis))]
        _become(last, "Slice", [normal.outputs[0], *bounds], [])
        return [negative, both, normal]

    def _node(self, last: ir.Node, op: str, inputs: list[ir.Value], made: ValueType, *attributes: ir.Attr) -> ir.Node:
        """A node in front of the last one of a norm, which is where the model says that this stands."""
        if not self._node_names:
            self._node_names = {node.name or "" for graph in self.model.graphs() for node in graph}
        value = self._value(f"{last.outputs[0].name}_{op.lower()}", made, ir_type(made.dtype or DType.FLOAT32))
        name = unique(f"{last.name}_{op.lower()}", self._node_names)
        return ir.Node("", op, inputs, attributes, outputs=[value], name=name, metadata_props=dict(last.metadata_props))

    def _value(self, name: str, known: ValueType, kind: ir.DataType) -> ir.Value:
        shape = None if known.shape is None else ir.Shape(known.shape)
        made = ir.Value(name=unique(name, self._taken()), type=ir.TensorType(kind), shape=shape)
        self.model.types[made] = known
        return made

    def _scale_twice(self, norm: _Norm) -> ir.Value:
        """The scale of an RMSNorm, once for each half."""
        scale = norm.operands[0]
        key = (scale, norm.sizes)
        tensor = tensor_of(scale)
        if key not in self._stored and tensor is not None:
            stored = np.asarray(array_of(tensor))
            whole = np.broadcast_to(stored.reshape(stored.shape[-len(norm.sizes) :]), norm.sizes)
            self._stored[key] = self._store(f"{scale.name}_twice", np.concatenate([whole, whole]), tensor.dtype)
            release(tensor)
        return self._stored[key]

    def _indices(self, name: str, index: int) -> ir.Value:
        """A stored index of a `Slice`."""
        key = (name, index)
        if key not in self._stored:
            self._stored[key] = self._store(f"half_{name}", np.array([index], np.int64), ir.DataType.INT64)
        return self._stored[key]

    def _store(self, name: str, data: np.ndarray, dtype: ir.DataType) -> ir.Value:
        made = self._value(name, ValueType(neutral_type(dtype.value), data.shape), dtype)
        made.const_value = ir.Tensor(data, dtype=dtype, name=made.name or "")
        self.model.ir.graph.register_initializer(made)
        return made

    def _shaped(self, value: ir.Value, sizes: tuple[int, ...]) -> ir.Value:
        """Stored data in the shape that the norm is taken over."""
        tensor = tensor_of(value)
        if self.model.type_of(value).shape == sizes or tensor is None:
            return value
        stored = np.asarray(array_of(tensor))
        whole = np.broadcast_to(stored.reshape(stored.shape[-len(sizes) :]), sizes).copy()
        release(tensor)
        return self._store(f"{value.name}_whole", whole, tensor.dtype)

    def _taken(self) -> set[str]:
        """The names of all values."""
        if not self._names:
            for graph in self.model.graphs():
                self._names |= {value.name or "" for value in (*graph.inputs, *graph.initializers.values())}
                self._names |= {value.name or "" for node in graph for value in node.outputs}
        return self._names

    def _drop(self, value: ir.Value) -> None:
        """Take stored data away that nothing reads."""
        if value.uses() or value.is_graph_output() or value.is_graph_input():
            return
        maker = value.producer()
        if maker is None:
            if value.graph is not None and value.is_initializer():
                value.graph.initializers.pop(value.name or "")
        elif maker.op_type in _STORING and is_op(maker, maker.op_type) and isinstance(maker.graph, ir.Graph):
            before = [one for one in maker.inputs if one is not None]
            maker.graph.remove(maker, safe=True)
            for one in before:
                self._drop(one)


def _become(node: ir.Node, op: str, inputs: list[ir.Value], attributes: list[ir.Attr]) -> None:
    """Make a node another op."""
    node.op_type = op
    node.attributes.clear()
    for attribute in attributes:
        node.attributes[attribute.name] = attribute
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def _settings(norm: _Norm) -> list[ir.Attr]:
    """The attributes of a norm that is one op."""
    epsilon, stash = ir.AttrFloat32("epsilon", norm.epsilon), ir.AttrInt64("stash_type", int(ir.DataType.FLOAT))
    return [ir.AttrInt64("axis", norm.axis), epsilon, stash]


def _axes_of(node: ir.Node) -> tuple[int, ...]:
    given = node.attributes.get("axes")
    if given is not None:
        return tuple(given.value)
    held = numbers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return () if held is None else tuple(int(axis) for axis in held)


def _told(dtype: DType | None) -> str:
    return "an unknown type" if dtype is None else dtype.short


def told_fusion(fusion: Fusion, opset: int) -> Iterator[str]:
    """What came of it, in a sentence each.

    Args:
        fusion: what `fuse` gave.
        opset: the model's opset.
    """
    if fusion.fused:
        listed = ", ".join(f"{count} {op}" for op, count in sorted(fusion.fused.items()))
        yield f"fused what was written out in parts: {listed}"
    if fusion.late:
        listed = ", ".join(f"{count} {op} (opset {since})" for (op, since), count in sorted(fusion.late.items()))
        needed = max(since for _, since in fusion.late)
        yield (
            f"what is written out in parts would be fused to one op each in a later opset than {opset}: {listed};"
            f" opset={needed} raises it"
        )
