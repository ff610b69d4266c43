"""Writing an ONNX model: to a message, or to a file that nobody sees half of, with the data that belong to it."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from amp_compiler.errors import OnnxError
from amp_compiler.ir.files import alone, output_file, publish, workspace
from amp_compiler.onnx.model.external import external_files
from amp_compiler.onnx.model.model import OnnxModel
from amp_compiler.onnx.model.walk import proto_graphs, restore_maps

INLINE_LIMIT = 1_900_000_000
"""Bytes of data up to which a model is one message; a protobuf message ends at 2 GiB."""
_EXTERNAL_FROM = 1024  # bytes from which a tensor goes to the data file
_DIGITS = 12  # of the digest that names the data of a model which takes the place of another one

Check = Callable[[onnx.ModelProto, Path], None]


def to_proto(model: OnnxModel) -> onnx.ModelProto:
    """The model as a message, all data in it.

    Raises:
        OnnxError: that would be more than a message can hold.
    """
    if _size(model) > INLINE_LIMIT:
        raise OnnxError(
            f"it holds {_size(model)} bytes of data, more than one message can", hint="name a file to write: output="
        )
    model.restore_text()
    _load_attributes(model)
    ir.external_data.load_to_model(model.ir)
    return serialized(model)


def serialized(model: OnnxModel) -> onnx.ModelProto:
    """The model as a message, with the types of maps."""
    proto = ir.serde.serialize_model(model.ir)
    restore_maps(proto, model.proto)
    return proto


def save(model: OnnxModel, path: Path, check: Check) -> None:
    """Write a model so that a reader sees the old one or the new one, whole, whenever the run is killed.

    Data go to a file of their own where the model that was read keeps its data so, or where a message would be too
    large. They are put in place first, under a name that the old model does not use: `<name>.data` for a new model,
    `<name>.<digest>.data` where there is a model or such a file already. Then one rename puts the model in place, which
    names its data. Then the data of the old model go, and what a killed run has left.

    Args:
        model: the model.
        path: the file to write; a symbolic link stays, and what it leads to is written.
        check: is given what is about to be put in place, with the folder that its data lie in; it may raise.

    Raises:
        OnnxError: the file is a data file of the input, or no regular file; or it cannot be written.
    """
    target = output_file(path, OnnxError)
    external = bool(model.external) or _size(model) > INLINE_LIMIT
    for kept in model.external:
        if _same(Path(kept.path), target):
            raise OnnxError(
                "a data file of the input would be overwritten", where=str(kept.path), hint="name another output file"
            )
    if external and target.parent != Path(path).parent.resolve():
        raise OnnxError(
            f"it is a symbolic link to another folder ({target}), and data beside the model would be found by one of"
            " the two names alone",
            where=str(path),
            hint="name the file itself",
        )
    model.restore_text()
    _load_attributes(model)
    try:
        with workspace(target.parent) as folder:
            draft, data = folder / target.name, folder / f"{target.name}.data"
            if external:
                proto = _write_with_data(model, draft, data, check)
            else:
                proto = serialized(model)
                check(proto, target.parent)
                _write(proto, draft)
            with alone(target.parent) as locked:
                taken = not locked or target.exists() or target.with_name(data.name).exists()
                if data.exists() and taken:
                    name = f"{target.name}.{_digest(data)}.data"
                    _rename_data(proto, data.name, name)
                    _write(proto, draft)
                    data = data.replace(data.with_name(name))
                _replace(draft, target, data if data.exists() else None, model, locked)
    except OSError as cause:
        raise OnnxError(
            f"cannot write there: {cause.strerror or cause}",
            where=str(path),
            hint="name a file in a folder that can be written",
        ) from cause


def _load_attributes(model: OnnxModel) -> None:
    """Let attributes hold their data, which only initializers may have in a file of their own."""
    for graph in model.graphs:
        for node in graph:
            for name, attribute in list(node.attributes.data.items()):
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    (loaded,) = ir.external_data.convert_tensors_from_external([attribute.value])
                    node.attributes[name] = ir.AttrTensor(name, loaded)


def _write_with_data(model: OnnxModel, draft: Path, data: Path, check: Check) -> onnx.ModelProto:
    """Write a model, and beside it its data, as far as a tensor is large enough for that."""
    ir.save(model.ir, draft, external_data=data.name, size_threshold_bytes=_EXTERNAL_FROM)
    proto = onnx.load(draft, load_external_data=False)
    if restore_maps(proto, model.proto):
        _write(proto, draft)
    check(proto, draft.parent)
    if data.exists():
        data.chmod(draft.stat().st_mode)
    return proto


def _write(proto: onnx.ModelProto, path: Path) -> None:
    """Write a message in the form that the file's name asks for: protobuf, or one of ONNX's texts."""
    form = onnx.serialization.registry.get_format_from_file_extension(path.suffix)
    if form in (None, "protobuf"):
        path.write_bytes(proto.SerializeToString(deterministic=True))
    else:
        onnx.save(proto, path, format=form)


def _replace(draft: Path, target: Path, data: Path | None, model: OnnxModel, locked: bool) -> None:
    """Put data and model in place, and remove the data that nobody reads any more."""
    old = _old_data(target)
    if data is not None:
        if target.exists():
            data.chmod(target.stat().st_mode)
        data.replace(target.with_name(data.name))
    publish(draft, target)
    kept = [Path(tensor.path) for tensor in model.external]
    if data is not None:
        kept.append(target.with_name(data.name))
    for path in old if locked else ():
        if not any(_same(path, one) for one in kept):
            with contextlib.suppress(OSError):
                path.unlink()


def _old_data(target: Path) -> list[Path]:
    """The data files that belong to a model about to be replaced: those it reads, and what killed runs have left.

    A file belongs to the model by its name, which `save` gave it. Others that the model reads are left alone: other
    models may read them too.
    """
    plain = target.with_name(f"{target.name}.data")
    pattern = re.compile(rf"{re.escape(target.name)}\.[0-9a-f]{{{_DIGITS}}}\.data")
    named = sorted(path for path in target.parent.iterdir() if pattern.fullmatch(path.name))
    if not named and not plain.exists():
        return []
    read = _locations(target)
    by_us = not read.isdisjoint({plain.name, *(path.name for path in named)})
    return [*named, *([plain] if by_us and plain.exists() else [])]


def _locations(path: Path) -> set[str]:
    """Names of the data files that a model reads; none where it cannot be read."""
    try:
        proto = onnx.load(path, load_external_data=False)
        return {str(file) for file in external_files(proto, Path())}
    except Exception:  # noqa: BLE001  whatever stands there is about to be replaced
        return set()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGITS]


def _rename_data(proto: onnx.ModelProto, before: str, after: str) -> None:
    for graph in proto_graphs(proto.graph):
        for tensor in graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location" and entry.value == before:
                    entry.value = after


def _tensors(model: OnnxModel) -> Iterator[ir.TensorProtocol]:
    for graph in model.graphs:
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
        for node in graph:
            for attribute in node.attributes.data.values():
                if attribute.type == ir.AttributeType.TENSOR:
                    yield attribute.value


def _size(model: OnnxModel) -> int:
    return sum(tensor.nbytes for tensor in _tensors(model))


def _same(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return first.absolute() == second.absolute()
