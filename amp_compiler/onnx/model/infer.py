"""ONNX's own inference of types and shapes, on a copy of the model that holds no large data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import onnx

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.contrib import infer_shapes
from amp_compiler.onnx.model.external import is_external, with_data
from amp_compiler.onnx.model.validate import refused
from amp_compiler.onnx.model.walk import all_inner_tensors, all_tensors

_SMALL = 1024  # elements up to which inference is given the data of an initializer
_LITTLE = 1 << 20  # bytes of all initializers up to which a model is no heavier than a copy without them


def stripped(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy for inference, in which large initializers, and those in files of their own, have no data.

    Args:
        proto: the model, as `with_small_data` gives it where shapes follow from small external data; it is not changed.
    """
    light = onnx.ModelProto(ir_version=proto.ir_version)
    light.opset_import.extend(proto.opset_import)
    light.functions.extend(proto.functions)
    graph = proto.graph
    light.graph.name = graph.name
    for kind in ("node", "input", "output", "value_info"):
        getattr(light.graph, kind).extend(getattr(graph, kind))
    for tensor in graph.initializer:
        if math.prod(tensor.dims) > _SMALL or is_external(tensor):
            tensor = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        light.graph.initializer.append(tensor)
    return light


def light_of(proto: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """What `stripped` gives, or the model itself where it holds little data; to be read only.

    Args:
        proto: the model.
        folder: where external data lie.

    Raises:
        OnnxError: small external data cannot be read.
    """
    outside = any(map(is_external, all_tensors(proto)))
    small = not outside and sum(tensor.ByteSize() for tensor in proto.graph.initializer) <= _LITTLE
    return proto if small else stripped(with_small_data(proto, folder))


def with_small_data(proto: onnx.ModelProto, folder: Path | None) -> onnx.ModelProto:
    """The model, or a copy that holds what small tensors and attributes have in files of their own.

    ONNX Runtime wants to see the numbers that shapes follow from, and no attribute elsewhere.

    Args:
        proto: the model; it is not changed.
        folder: where it is.

    Raises:
        OnnxError: the data cannot be read.
    """
    if not _small_outside(proto):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for tensor in _small_outside(result):
        tensor.CopyFrom(with_data(tensor, folder))
    return result


def _small_outside(proto: onnx.ModelProto) -> list[onnx.TensorProto]:
    small = (tensor for tensor in proto.graph.initializer if math.prod(tensor.dims) <= _SMALL)
    return [tensor for tensor in (*small, *all_inner_tensors(proto)) if is_external(tensor)]


def is_open(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Whether a model leaves a dimension open: it has no size, or a negative one, as some exporters write it."""
    return not dim.HasField("dim_value") or dim.dim_value < 0


def infer(light: onnx.ModelProto, *, strict: bool = False, data_prop: bool = True) -> onnx.ModelProto:
    """ONNX's own shape and type inference.

    Args:
        light: a model made by `stripped`.
        strict: every disagreement of types is an error.
        data_prop: numbers that shapes follow from are computed.

    Raises:
        OnnxError: inference found the model inconsistent.
    """
    try:
        return infer_shapes(light, check_type=strict, strict_mode=strict, data_prop=data_prop)
    except Exception as cause:
        raise refused(cause, light.graph.name, "ONNX's own inference finds it inconsistent") from cause


def is_sound(proto: onnx.ModelProto, folder: Path | None) -> bool:
    """Whether inference finds no disagreement of types in a model."""
    try:
        infer(light_of(proto, folder), strict=True)
    except OnnxError:
        return False
    return True


Sizes = Mapping[str | tuple[str, int], int]
"""Sizes of the dimensions that a model leaves open: by name, and by (input, axis) for one without a name."""


def infer_sized(light: onnx.ModelProto, inferred: onnx.ModelProto, sizes: Sizes) -> onnx.ModelProto:
    """What is inferred of a model where its inputs have certain sizes.

    Args:
        light: a model made by `stripped`.
        inferred: what is inferred without the sizes.
        sizes: sizes of open dimensions.

    Returns:
        The model with the shapes that follow from the sizes; `inferred` where they do not fit.
    """
    sized = onnx.ModelProto()
    sized.CopyFrom(light)
    for info in sized.graph.input:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            size = sizes.get(dim.dim_param or (info.name, axis))
            if size is not None and not dim.HasField("dim_value"):
                dim.dim_value = size
    try:
        return infer(sized, strict=True)
    except OnnxError:
        return inferred


def infer_checked(light: onnx.ModelProto) -> onnx.ModelProto:
    """ONNX's own shape and type inference of a model that its full checker takes.

    Args:
        light: a model made by `stripped`.

    Raises:
        OnnxError: the full checker refuses the model.
    """
    try:
        return infer(light, strict=True)
    except OnnxError:  # the checker does not propagate data
        infer(light, strict=True, data_prop=False)
    return infer(light)


def replace_contradicted(proto: onnx.ModelProto, light: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """The model with the inferred shapes of results and outputs where inference contradicts the declared ones.

    Args:
        proto: the model; it is not changed.
        light: what `stripped` makes of it.

    Returns:
        The model, and the names of the values; the model itself where what is wrong is something else.
    """
    bare = onnx.ModelProto()
    bare.CopyFrom(light)
    for info in (*bare.graph.value_info, *bare.graph.output):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.ClearField("shape")
    try:
        inferred = infer_checked(bare).graph
    except OnnxError:
        return proto, []
    known = {info.name: info.type.tensor_type for info in (*inferred.value_info, *inferred.output)}
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    names = []
    for info in (*result.graph.value_info, *result.graph.output):
        declared = info.type.tensor_type
        if declared.HasField("shape") and info.name in known and _contradicts(declared, known[info.name]):
            declared.shape.CopyFrom(known[info.name].shape)
            names.append(info.name)
    return result, names


def _contradicts(declared: onnx.TypeProto.Tensor, inferred: onnx.TypeProto.Tensor) -> bool:
    if not inferred.HasField("shape"):
        return False
    pairs = list(zip(declared.shape.dim, inferred.shape.dim, strict=False))
    if len(declared.shape.dim) != len(inferred.shape.dim):
        return True
    both = (pair for pair in pairs if all(dim.HasField("dim_value") for dim in pair))
    return any(one.dim_value != other.dim_value for one, other in both)
