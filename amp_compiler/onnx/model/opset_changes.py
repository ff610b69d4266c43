"""What means something else in a later opset, which ONNX's version converter leaves as it is written.

| op | from opset | what changed |
|---|---|---|
| `Resize`, `Upsample` | 11 | where an element of the result lies in the input, and which neighbour is nearest |
| `Hardmax` | 13 | the axis is one dimension; before, all dimensions from it on were one |
| `GroupNormalization` | 21 | scale and bias have a number for each channel; before, one for each group |

Seen in onnx 1.23: the models load and compute other numbers, or ONNX Runtime refuses them. What is resized is
kept here, the other two are refused.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.walk import all_nodes, node_place, proto_graphs

_RESIZE = 11  # the opset
_REFUSED = {"Hardmax": 13, "GroupNormalization": 21}
_HINT = "export the model with a later opset, or give raise_opset=False (--no-raise-opset)"


def keep_meaning(before: onnx.ModelProto, after: onnx.ModelProto, versions: tuple[int, int]) -> None:
    """Write into a converted model what the ops meant in the opset that it comes from. Changes `after`.

    Args:
        before: the model before ONNX's converter, without large data.
        after: the model behind it.
        versions: the opset before, and behind.

    Raises:
        OnnxError: the later opset has no attribute for what an op meant, or it depends on what is not stored.
    """
    present, version = versions
    for node in all_nodes(before):
        since = _REFUSED.get(node.op_type, 0)
        if present < since <= version:
            raise OnnxError(
                f"{node.op_type} means something else from opset {since} on", where=node_place(node), hint=_HINT
            )
    resizes = {"Resize", "Upsample"} if present < _RESIZE <= version else set()
    if not any(node.op_type in resizes for node in all_nodes(before)):
        return
    outer = before.graph
    for old, new in zip(proto_graphs(before.graph), proto_graphs(after.graph), strict=True):
        for node, was in _pairs(old, new, resizes):
            _set(node, "coordinate_transformation_mode", "asymmetric")
            if _text(was, "mode") == "nearest":
                _set(node, "nearest_mode", _nearest(was, (old, outer)))


def _pairs(
    old: onnx.GraphProto, new: onnx.GraphProto, ops: set[str]
) -> Iterator[tuple[onnx.NodeProto, onnx.NodeProto]]:
    """The nodes of some ops behind the converter and before: it keeps their order, but not always their names."""
    before, after = ([node for node in graph.node if node.op_type in ops] for graph in (old, new))
    if len(before) != len(after):
        raise OnnxError(f"the converter makes {len(after)} of {len(before)} nodes of {sorted(ops)}", hint=_HINT)
    yield from zip(after, before, strict=True)


def _nearest(node: onnx.NodeProto, graphs: tuple[onnx.GraphProto, ...]) -> str:
    """Which neighbour is taken: ONNX Runtime's rule for opsets before 11, the one below, or above where it shrinks."""
    if node.op_type == "Upsample":
        return "floor"
    scales = _stored(node.input[1], graphs) if len(node.input) > 1 else None
    if scales is not None and (scales >= 1).all():
        return "floor"
    if scales is not None and (scales <= 1).all():
        return "ceil"
    what = "it shrinks and grows at once" if scales is not None else "its scales are computed"
    raise OnnxError(
        f"{what}, and which neighbour is nearest in such a Resize of opset 10 no later opset can say",
        where=node_place(node), hint=_HINT,
    )  # fmt: skip


def _text(node: onnx.NodeProto, name: str) -> str:
    """A text among the attributes; `nearest` is the default of the one that is asked for."""
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), "nearest")


def _set(node: onnx.NodeProto, name: str, value: str) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    attributes: list[AttributeProto] = [*kept, helper.make_attribute(name, value)]
    node.ClearField("attribute")
    node.attribute.extend(attributes)


def _stored(name: str, graphs: tuple[onnx.GraphProto, ...]) -> np.ndarray | None:
    """The numbers stored under a name; `None` where they are computed."""
    for graph in graphs:
        for tensor in graph.initializer:
            if tensor.name == name:
                return numpy_helper.to_array(tensor)
        for node in graph.node:
            if node.op_type == "Constant" and node.output[0] == name:
                held = next((one for one in node.attribute if one.name == "value"), None)
                return None if held is None else numpy_helper.to_array(held.t)
    return None
