"""Writing an ONNX model: to a message, or to a file that nobody sees half of."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.model import OnnxModel, all_graphs

_INLINE_LIMIT = 1_900_000_000  # bytes; a protobuf message ends at 2 GiB
_EXTERNAL_FROM = 1024  # bytes from which a tensor goes to the data file


def to_proto(model: OnnxModel) -> onnx.ModelProto:
    """The model as a message, all data in it."""
    model.restore_text()
    return ir.serde.serialize_model(model.ir)


def save(model: OnnxModel, path: Path, check: Callable[[onnx.ModelProto, Path], None]) -> None:
    """Write a model so that a reader sees the old file or the new one, tensor by tensor.

    Data go to a file of their own, `<name>.data`, where the model that was read keeps its data so, or where a message
    would be too large. Of the two files the data are put in place first.

    Args:
        model: the model.
        path: the file to write.
        check: is given what is about to be put in place, with the folder that its data lie in; it may raise.

    Raises:
        OnnxError: the file is the input, or one of its data files; or it cannot be written.
    """
    path = Path(path)
    data = path.with_name(path.name + ".data")
    external = bool(model.external) or _size(model) > _INLINE_LIMIT
    for kept in sorted({str(tensor.path) for tensor in model.external}):
        if _same(Path(kept), path) or (external and _same(Path(kept), data)):
            raise OnnxError(
                "a data file of the input would be overwritten", where=kept, mend="name another output file"
            )
    model.restore_text()
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            made = Path(folder) / path.name
            if external:
                ir.save(model.ir, made, external_data=data.name, size_threshold_bytes=_EXTERNAL_FROM)
                check(onnx.load(made, load_external_data=False), made.parent)
                _publish(Path(folder) / data.name, data)
            else:
                proto = ir.serde.serialize_model(model.ir)
                check(proto, path.parent)
                made.write_bytes(proto.SerializeToString(deterministic=True))
            _publish(made, path)
    except OSError as cause:
        raise OnnxError(
            f"cannot write there: {cause.strerror or cause}",
            where=str(path),
            mend="name a file in a folder that can be written",
        ) from cause


def _publish(made: Path, target: Path) -> None:
    if not made.exists():  # no tensor was large enough for the data file
        return
    umask = os.umask(0)
    os.umask(umask)
    made.chmod(0o666 & ~umask)
    made.replace(target)


def _tensors(model: OnnxModel) -> Iterator[ir.TensorProtocol]:
    for graph in all_graphs(model.ir.graph):
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR:
                    yield attribute.value


def _size(model: OnnxModel) -> int:
    return sum(tensor.nbytes for tensor in _tensors(model))


def _same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return first.absolute() == second.absolute()
