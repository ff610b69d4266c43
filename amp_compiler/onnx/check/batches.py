"""Batches of inputs for an ONNX model: from dicts or npz files, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from onnx_ir.tensor_adapters import TorchTensor

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.run import Batch
from amp_compiler.onnx.model.infer import is_open
from amp_compiler.onnx.model.model import OnnxFile
from amp_compiler.policy.marks import nearest

Batches = Iterable[Batch] | str | Path
NAMES = "the names of a file are those that onnx.load(path).graph lists"


def required_inputs(proto: onnx.ModelProto) -> dict[str, onnx.TypeProto]:
    """The declared inputs that have no initializer as default, with their types."""
    defaults = {tensor.name for tensor in proto.graph.initializer}
    return {value.name: value.type for value in proto.graph.input if value.name not in defaults}


def iterate_batches(batches: Batches, model: OnnxFile) -> Iterator[dict[str, Any]]:
    """The batches one by one, each checked against the model's inputs.

    Args:
        batches: dicts of arrays by input name; or an npz file (one batch); or a folder of npz files, read by name.
        model: whose inputs they are.

    Raises:
        OnnxError: a missing or unknown input, or one of the wrong type or shape; no batch at all.
    """
    types = {value.name: value.type for value in model.proto.graph.input}
    required = required_inputs(model.proto)
    where = ""
    for where, batch in _named_batches(batches):
        _check_batch(batch, types, set(required), where)
        yield dict(batch)
    if not where:
        place = str(batches) if isinstance(batches, str | Path) else "batches"
        raise OnnxError("there is no batch in it", where=place, hint="give at least one batch of inputs")


def check_batches(batches: Any, name: str, hint: str = "give a list of dicts: [inputs]", one: Any = Mapping) -> None:
    """Raise OnnxError, which says `name`, of an argument that is `one` batch, or none."""
    if isinstance(batches, one) or not isinstance(batches, Iterable | Path):
        raise OnnxError(f"it is a {type(batches).__name__}", where=name, hint=hint)


def noting_sizes(
    batches: Batches, model: OnnxFile, sizes: dict[str | tuple[str, int], int]
) -> Iterator[dict[str, Any]]:
    """The batches, as `iterate_batches` gives them.

    Args:
        batches: as for `iterate_batches`.
        model: whose inputs they are.
        sizes: is filled with the largest size of each dimension that the model leaves open, by the name of the
            dimension, and by (input, axis) for one without a name.
    """
    types = required_inputs(model.proto)
    for batch in iterate_batches(batches, model):
        for name, kind in types.items():
            if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
                continue
            for axis, (dim, size) in enumerate(zip(kind.tensor_type.shape.dim, np.shape(batch[name]), strict=True)):
                if is_open(dim):
                    key = dim.dim_param or (name, axis)
                    sizes[key] = max(sizes.get(key, 0), size)
        yield batch


def sizes_of(model: OnnxFile, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str | tuple[str, int], int]:
    """The sizes of open dimensions that the inputs of one call have, as `noting_sizes` fills them.

    Args:
        model: the model.
        args: tensors for the first of its inputs.
        kwargs: tensors by name.

    Raises:
        OnnxError: as for `iterate_batches`, or there are too many.
    """
    names = required_inputs(model.proto)
    if len(args) > len(names):
        what = f"{len(args)} example_args, and the model takes {len(names)}"
        raise OnnxError(what, where=model.name, hint=f"pass {', '.join(names)}")
    feeds = dict(zip(names, args, strict=False)) | dict(kwargs)
    arrays = {
        name: TorchTensor(one.detach()).numpy() if isinstance(one, torch.Tensor) else one for name, one in feeds.items()
    }
    sizes: dict[str | tuple[str, int], int] = {}
    (_,) = noting_sizes([arrays], model, sizes)
    return sizes


def count_batches(batches: Batches) -> int | None:
    """How many batches there are, where that is known without reading them."""
    if isinstance(batches, str | Path):
        return len(_npz_files(Path(batches)))
    return len(batches) if isinstance(batches, Sized) else None


def _npz_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.glob("*.npz") if file.is_file())  # a pipe would be waited for
    if path.is_file():
        return [path]
    raise OnnxError("no such file or folder", where=str(path), hint="name an npz file or a folder of npz files")


def _named_batches(batches: Batches) -> Iterator[tuple[str, Batch]]:
    if isinstance(batches, str | Path):
        for file in _npz_files(Path(batches)):
            try:
                with np.load(file, allow_pickle=False) as data:
                    arrays = {name: data[name] for name in data.files}
            except Exception as cause:
                raise OnnxError(
                    f"it cannot be read as an npz file: {cause}",
                    where=str(file),
                    hint="write it with numpy.savez(path, **inputs)",
                ) from cause
            yield str(file), arrays
        return
    check_batches(batches, "batches")
    for index, batch in enumerate(batches):
        if not isinstance(batch, Mapping):
            raise OnnxError(
                f"it is a {type(batch).__name__}, not a dict", where=f"batch {index}", hint="give {input name: array}"
            )
        yield f"batch {index}", batch


def _check_batch(batch: Batch, types: Mapping[str, onnx.TypeProto], required: set[str], where: str) -> None:
    missing = sorted(required - set(batch))
    if missing:
        raise OnnxError(
            f"the input '{missing[0]}' is missing",
            where=where,
            hint=f"give all of {', '.join(sorted(required))}",
        )
    for name, value in batch.items():
        if name not in types:
            raise OnnxError(f"the model has no input '{name}'", where=where, hint=nearest(name, sorted(types), NAMES))
        if types[name].HasField("tensor_type"):
            _check_tensor(name, value, types[name].tensor_type, where)


def _check_tensor(name: str, value: Any, declared: onnx.TypeProto.Tensor, where: str) -> None:
    if not isinstance(value, np.ndarray | np.generic):
        raise OnnxError(
            f"the input '{name}' is a {type(value).__name__}", where=where, hint="give a numpy.ndarray for it"
        )
    wanted = helper.tensor_dtype_to_np_dtype(declared.elem_type)
    text = declared.elem_type == TensorProto.STRING and value.dtype.kind in "OUS"
    if value.dtype != wanted and not text:
        raise OnnxError(
            f"the input '{name}' is {value.dtype}, and the model takes {wanted}",
            where=where,
            hint=f"convert it: array.astype('{wanted}')",
        )
    if not declared.HasField("shape"):
        return
    dims = declared.shape.dim
    fits = len(dims) == value.ndim and all(
        is_open(dim) or dim.dim_value == size for dim, size in zip(dims, value.shape, strict=True)
    )
    if not fits:
        shown = ", ".join(dim.dim_param or "?" if is_open(dim) else str(dim.dim_value) for dim in dims)
        raise OnnxError(
            f"the input '{name}' has the shape {list(value.shape)}, and the model takes [{shown}]",
            where=where,
            hint="give it that shape",
        )
