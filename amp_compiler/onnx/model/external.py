"""Data of an ONNX model that lie in files of their own: where they are, and whether they can be read."""

from __future__ import annotations

import math
import os
import stat
from pathlib import Path

import onnx
import onnx_ir
from onnx.external_data_helper import ExternalDataInfo

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.walk import all_tensors

_BESIDE = "keep the data files beside the model, and give the path of the model"
_POINTER = b"version https://git-lfs.github.com/spec/"
_POINTER_BYTES = 1024  # which no pointer reaches


def is_external(tensor: onnx.TensorProto) -> bool:
    """True for a tensor whose data lie in a file of their own."""
    return bool(tensor.data_location == onnx.TensorProto.EXTERNAL)


def place_of(tensor: onnx.TensorProto) -> ExternalDataInfo:
    """Where the data of an external tensor lie.

    Raises:
        OnnxError: it does not say, or what it says is no place.
    """
    try:
        place = ExternalDataInfo(tensor)
    except ValueError as cause:
        raise _wrong(tensor, f"it does not say where in its file its data lie: {cause}") from cause
    if not place.location or "\0" in place.location:
        raise _wrong(tensor, "it does not say which file its data lie in")
    return place


def check_external(tensor: onnx.TensorProto, needed: int, folder: Path | None) -> None:
    """Check that the data of an external tensor are there, and as many as its type and shape ask for.

    Args:
        tensor: the tensor.
        needed: the bytes that it holds.
        folder: where the model is; the working folder for one in memory, whose files may be elsewhere.

    Raises:
        OnnxError: the place is outside the folder, no regular file, too short, or a Git LFS pointer.
    """
    place = place_of(tensor)
    if place.length not in (None, needed):
        raise _wrong(tensor, f"it has {place.length} bytes of data, and its type and shape ask for {needed}")
    base = Path(folder or ".")
    path = _inside(tensor, place.location, base)
    try:
        status = path.stat()
    except OSError as cause:
        if folder is None:
            return
        reason = cause.strerror or cause
        raise _wrong(tensor, f"its data cannot be read from '{place.location}': {reason}", _BESIDE) from cause
    if not stat.S_ISREG(status.st_mode):
        raise _wrong(tensor, f"its data are said to lie in '{place.location}', which is no regular file", _BESIDE)
    if status.st_nlink > 1 and folder is not None:
        raise _wrong(
            tensor,
            f"its data lie in '{place.location}', a file with {status.st_nlink} names (hard links), which onnx refuses"
            " to read",
            "put a copy of the file beside the model",
        )
    if status.st_size < _POINTER_BYTES:
        refuse_pointer(path)
    end = (place.offset or 0) + needed
    if end > status.st_size:
        raise _wrong(
            tensor, f"its data end at byte {end} of '{place.location}', which has {status.st_size} bytes", _BESIDE
        )


def refuse_pointer(path: Path) -> None:
    """Refuse a file that only says where Git LFS has the one that is wanted.

    Raises:
        OnnxError: it is such a pointer.
    """
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise OnnxError(
                "it is a Git LFS pointer, without the data", where=str(path), hint="run 'git lfs pull' where it lies"
            )


def _inside(tensor: onnx.TensorProto, location: str, base: Path) -> Path:
    """The file, which must lie within the folder of the model, symbolic links followed."""
    outside = _wrong(
        tensor,
        f"its data are said to lie in '{location}', outside the folder of the model",
        "put the data file itself beside the model, and no symbolic link",
    )
    plain = os.path.normpath(location)
    if Path(location).is_absolute() or Path(plain).parts[:1] == (os.pardir,):
        raise outside
    path = base / plain
    try:
        if not path.resolve().is_relative_to(base.resolve()):
            raise outside
    except (OSError, RuntimeError) as cause:  # a circle of links, a name too long
        raise _wrong(tensor, f"its data cannot be read from '{location}': {cause}", _BESIDE) from cause
    return path


def with_data(tensor: onnx.TensorProto, folder: Path | None) -> onnx.TensorProto:
    """A copy of an external tensor that holds its data.

    Args:
        tensor: the tensor, which `check_external` has looked at.
        folder: where the model is; the working folder for one in memory.

    Raises:
        OnnxError: the data cannot be read.
    """
    place = place_of(tensor)
    loaded = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    loaded.doc_string = tensor.doc_string
    try:
        path = _inside(tensor, place.location, Path(folder or "."))
        if not stat.S_ISREG(path.stat().st_mode):
            raise _wrong(tensor, f"its data are said to lie in '{place.location}', which is no regular file", _BESIDE)
        with path.open("rb") as file:
            file.seek(place.offset or 0)
            loaded.raw_data = file.read(bytes_of(tensor))
    except OSError as cause:
        raise _wrong(
            tensor, f"its external data cannot be read from '{place.location}': {cause.strerror}", _BESIDE
        ) from cause
    return loaded


def bytes_of(tensor: onnx.TensorProto) -> int:
    """The bytes that a tensor of this type and shape takes up, as raw data."""
    bits = onnx_ir.DataType(tensor.data_type).bitwidth if tensor.data_type != onnx.TensorProto.STRING else 0
    size: int = -(-math.prod(tensor.dims) * bits // 8)
    return size


def external_files(proto: onnx.ModelProto, folder: Path) -> list[Path]:
    """The data files that a model reads, each once.

    Args:
        proto: the model.
        folder: where it is.
    """
    outside = (place_of(tensor).location for tensor in all_tensors(proto) if is_external(tensor))
    return [folder / name for name in dict.fromkeys(outside)]


def _wrong(tensor: onnx.TensorProto, what: str, hint: str = "export the model again") -> OnnxError:
    return OnnxError(what, where=f"tensor '{tensor.name}'", hint=hint)
