"""Sparse initializers, which are dense while a model is worked on, and types of maps, which are left out."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.external import bytes_of, is_external
from amp_compiler.onnx.model.walk import Contents, contents_of, proto_graphs

_MOST = 1_900_000_000  # bytes of a dense tensor that one message can hold


def dense(proto: onnx.ModelProto, contents: Contents | None = None) -> onnx.ModelProto:
    """A model without sparse initializers: itself where it has none, else a copy in which they are dense.

    Args:
        proto: the model.
        contents: what it holds, for those who know.

    Raises:
        OnnxError: one is malformed, or too large to be dense.
    """
    if not (contents or contents_of(proto)).sparse:
        return proto
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for graph in proto_graphs(copy.graph):
        graph.initializer.extend(_dense(sparse) for sparse in graph.sparse_initializer)
        del graph.sparse_initializer[:]
    return copy


def make_sparse(proto: onnx.ModelProto, names: frozenset[str]) -> None:
    """Store initializers of these names as sparse ones again, or copies of them in the low type, in place.

    Args:
        proto: a model with its data in it.
        names: of the sparse initializers of the model that it was made of.
    """
    for graph in proto_graphs(proto.graph) if names else ():
        inputs = {info.name for info in graph.input}
        kept = []
        for tensor in graph.initializer:
            origin = tensor.name if tensor.name in names else tensor.name.rpartition("_")[0]
            if origin in names and tensor.name not in inputs and not is_external(tensor):
                graph.sparse_initializer.append(_sparse(tensor))
            else:
                kept.append(TensorProto.FromString(tensor.SerializeToString()))
        del graph.initializer[:]
        graph.initializer.extend(kept)


def _dense(sparse: onnx.SparseTensorProto) -> TensorProto:
    name, dims = sparse.values.name, tuple(sparse.dims)
    whole = TensorProto(name=name, data_type=sparse.values.data_type, dims=dims)
    if any(dim < 0 for dim in dims) or bytes_of(whole) > _MOST:
        raise _wrong(name, f"its shape is {list(dims)}, too large to be made dense", "convert a model without it")
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    count = values.size
    if values.ndim != 1 or indices.dtype != np.int64 or indices.shape not in ((count,), (count, len(dims))):
        raise _wrong(name, "its indices do not fit its values", "export the model again")
    if indices.ndim == 2:
        if count and not ((indices >= 0) & (indices < np.asarray(dims, np.int64))).all():
            raise _wrong(name, "an index of it is outside its shape", "export the model again")
        indices = np.ravel_multi_index(tuple(indices.T), dims) if dims else np.zeros(count, np.int64)
    size = math.prod(dims)
    if count and not ((indices >= 0) & (indices < size)).all():
        raise _wrong(name, "an index of it is outside its shape", "export the model again")
    data = np.zeros(size, values.dtype)
    data[indices] = values
    return numpy_helper.from_array(data.reshape(dims), name)


def _sparse(tensor: TensorProto) -> onnx.SparseTensorProto:
    data = numpy_helper.to_array(tensor).reshape(-1)
    bits = data.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[data.itemsize])
    places = np.flatnonzero(bits)  # by their bits, so that -0.0 stays
    values = numpy_helper.from_array(data[places], tensor.name)
    indices = numpy_helper.from_array(places.astype(np.int64), f"{tensor.name}_indices")
    return onnx.helper.make_sparse_tensor(values, indices, list(tensor.dims))


def _wrong(name: str, what: str, hint: str) -> OnnxError:
    return OnnxError(what, where=f"sparse initializer '{name}'", hint=hint)


# ---- maps


def without_maps(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model in which what holds maps (as a `ZipMap` makes) has no declared type, for which `onnx_ir` has none."""
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
    for info, kind in zip(proto.graph.output, maps, strict=False):  # an export has no original
        if kind is not None:
            info.type.CopyFrom(kind)
    return any(maps)


def _declared(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto]:
    yield from (*graph.input, *graph.output, *graph.value_info)


def _holds_map(kind: onnx.TypeProto) -> bool:
    while kind.HasField("sequence_type"):
        kind = kind.sequence_type.elem_type
    return bool(kind.HasField("map_type"))
