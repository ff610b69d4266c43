"""Types of maps, as a `ZipMap` makes, which are left out while a model is worked on: `onnx_ir` has none for them."""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from amp_compiler.onnx.model.walk import proto_graphs


def without_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model in which what holds maps has no declared type."""
    if not any(_holds_map(info.type) for graph in proto_graphs(proto.graph) for info in _declared(graph)):
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for graph in proto_graphs(copy.graph):
        for info in _declared(graph):
            if _holds_map(info.type):
                info.ClearField("type")
    return copy


def restore_maps(proto: onnx.ModelProto, original: onnx.ModelProto) -> bool:
    """Declare the types of outputs again that `without_maps` took away, in place; false where it took none."""
    maps = [info.type if _holds_map(info.type) else None for info in original.graph.output]
    for info, kind in zip(proto.graph.output, maps, strict=True):
        if kind is not None:
            info.type.CopyFrom(kind)
    return any(maps)


def _declared(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)


def _holds_map(kind: onnx.TypeProto) -> bool:
    while kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    return bool(kind.HasField("map_type"))
