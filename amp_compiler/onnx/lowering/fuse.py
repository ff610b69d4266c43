"""Writing a norm or GELU that stands in parts as the one op that ONNX has for it, where that is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.lowering.compounds import GELU, LAYER_NORM, RMS_NORM, Compound, find_compounds
from amp_compiler.onnx.model.data import array_of, tensor_of
from amp_compiler.onnx.model.edit import drop_unread, graph_of, names_of, unique
from amp_compiler.onnx.model.model import OnnxModel, ValueType
from amp_compiler.onnx.model.terms import numbers_of, scalar_of
from amp_compiler.onnx.model.types import neutral_type

OPS = {LAYER_NORM: ("LayerNormalization", 17), RMS_NORM: ("RMSNormalization", 23), GELU: ("Gelu", 20)}
"""By kind, the op that is the same, with its first opset."""

_STORING = ("Constant", "Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze")  # goes where nothing reads it
_LISTED = 3  # nodes that a reason names


@dataclass
class Fusion:
    """What was fused, and what was not.

    Args:
        fused_nodes: by the node that took the place of others, what it was written out in.
        left: by the last node of what stays in parts, why it does.
        late: how many of each op, with its first opset, would be fused in a later opset.
    """

    fused_nodes: dict[ir.Node, str] = field(default_factory=dict)
    left: dict[ir.Node, str] = field(default_factory=dict)
    late: Counter[tuple[str, int]] = field(default_factory=Counter)

    @property
    def fused(self) -> Counter[str]:
        """How many there are of each op."""
        return Counter(node.op_type for node in self.fused_nodes)


@dataclass(frozen=True)
class _Norm:
    """What the one op is given: epsilon, the operands behind the data, and the sizes that it is taken over."""

    epsilon: float
    operands: tuple[ir.Value, ...]
    sizes: tuple[int, ...]


class _Unfit(Exception):
    """Why a compound is not what the one op computes."""


def fuse(model: OnnxModel) -> Fusion:
    """Write each norm and GELU as `LayerNormalization`, `RMSNormalization` or `Gelu`, where that computes the same.

    The result keeps its name, and the node that of the last one that it replaces. Stored data that nothing reads any
    more go. No opset is raised: what it has no op for stays in parts. Changes the model.

    Args:
        model: as `read_model` gives it.

    Example:
        ```python
        model = read_model(open_model("m.onnx"))
        print(fuse(model).fused)        # Counter({'LayerNormalization': 5})
        ```
    """
    done = Fusion()
    fuser = _Fuser(model)
    for ways in list(find_compounds(model)):
        if any(node in fuser.gone or node in done.fused_nodes for node in ways[0].nodes):
            continue
        op, since = OPS[ways[0].kind]
        why = ""
        for way in ways:
            try:
                norm = None if way.kind == GELU else fuser.norm(way)
                fuser.check(way)
            except _Unfit as unfit:
                why = why or str(unfit)
                continue
            op, since = OPS[way.kind]
            if model.opset("") < since:
                done.late[op, since] += 1
                why = f"{op} comes with opset {since}, and the opset is {model.opset('')}"
                break
            fuser.write(way, norm)
            done.fused_nodes[way.last] = f"it was written out in {len(way.nodes)} nodes ({_listed(way)})"
            break
        if ways[0].last not in done.fused_nodes:
            done.left.setdefault(ways[0].last, f"not fused to one {op}: {why}")
    return done


def _listed(way: Compound) -> str:
    names = [f"'{node.name}'" for node in reversed(way.nodes)]
    return ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")


class _Fuser:
    def __init__(self, model: OnnxModel) -> None:
        self.model = model
        self.gone: set[ir.Node] = set()

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
        data, result = (self.model.type_of(value) for value in (way.values["x"], way.last.outputs[0]))
        if data.dtype is not result.dtype:
            raise _Unfit(f"it reads {_short_name(data.dtype)} and makes {_short_name(result.dtype)}")
        for node in way.nodes:
            dtype = self.model.type_of(node.outputs[0]).dtype
            if node.op_type in ("ReduceMean", "Erf", "Tanh") and dtype is not DType.FLOAT32:
                raise _Unfit(f"it computes in {_short_name(dtype)}")
            self._widens(node, own, way.values["x"])

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
        values = way.values
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
        return _Norm(self._epsilon(values.get("epsilon"), data), operands, sizes)

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
            raise _Unfit(f"it reads {_short_name(data.dtype)}, and '{value.name}' is {_short_name(known.dtype)}")
        shape = known.shape
        if shape is None or len(shape) > len(data.shape or ()) or set(shape[: -len(sizes)]) - {1}:
            raise _Unfit(f"'{value.name}' differs along other dimensions than the norm is taken over")
        tail = shape[-len(sizes) :]
        if any(one not in (1, size) for one, size in zip(reversed(tail), reversed(sizes), strict=False)):
            raise _Unfit(f"'{value.name}' has the shape {list(shape)}, and the norm is taken over {list(sizes)}")
        if tuple(shape) != sizes and tensor_of(value) is None:
            raise _Unfit(f"'{value.name}' is not stored in the shape {list(sizes)}")

    # ---- writing it

    def write(self, way: Compound, norm: _Norm | None) -> None:
        """Make the last node the one op, and take the others away."""
        last = way.last
        before = {value: None for node in way.nodes for value in node.inputs if value is not None}
        data, op = way.values["x"], OPS[way.kind][0]
        if norm is None:
            by_tanh = any(node.op_type == "Tanh" for node in way.nodes)
            _become(last, op, [data], [ir.AttrString("approximate", "tanh" if by_tanh else "none")])
        else:
            operands = [self._shaped(value, norm.sizes) for value in norm.operands]
            settings = [
                ir.AttrInt64("axis", -len(norm.sizes)),
                ir.AttrFloat32("epsilon", norm.epsilon),
                ir.AttrInt64("stash_type", int(ir.DataType.FLOAT)),
            ]
            _become(last, op, [data, *operands], settings)
        others = [node for node in way.nodes if node is not last]
        graph_of(last).remove(others, safe=True)
        self.gone.update(others)
        for value in before:
            drop_unread(value, _STORING)

    def _shaped(self, value: ir.Value, sizes: tuple[int, ...]) -> ir.Value:
        """Stored data in the shape that the norm is taken over."""
        tensor = tensor_of(value)
        if self.model.type_of(value).shape == sizes or tensor is None:
            return value
        stored = array_of(tensor)
        whole = np.broadcast_to(stored.reshape(stored.shape[-len(sizes) :]), sizes).copy()
        name = unique(f"{value.name}_whole", self._taken)
        result = ir.val(name, const_value=ir.Tensor(whole, dtype=tensor.dtype, name=name))
        self.model.types[result] = ValueType(neutral_type(tensor.dtype.value), sizes)
        self.model.ir.graph.register_initializer(result)
        return result

    @cached_property
    def _taken(self) -> set[str]:
        return set.union(*names_of(self.model.graphs))


def _become(node: ir.Node, op: str, inputs: list[ir.Value], attributes: list[ir.Attr]) -> None:
    """Make a node another op."""
    node.op_type = op
    node.attributes.clear()
    for attribute in attributes:
        node.attributes[attribute.name] = attribute
    node.resize_inputs(len(inputs))
    for index, value in enumerate(inputs):
        node.replace_input_with(index, value)


def _axes_of(node: ir.Node) -> tuple[int, ...]:
    attribute = node.attributes.get("axes")
    if attribute is not None:
        return tuple(attribute.value)
    held = numbers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return () if held is None else tuple(int(axis) for axis in held)


def _short_name(dtype: DType | None) -> str:
    return "an unknown type" if dtype is None else dtype.short


def fusion_messages(fusion: Fusion, opset: int) -> Iterator[str]:
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
