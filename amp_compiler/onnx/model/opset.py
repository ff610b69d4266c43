"""Raising the opset of a model, where only a later one admits the low type."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnx.inliner
import onnx.version_converter

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.contrib import CONTRIB, as_contrib
from amp_compiler.onnx.model.infer import is_sound, stripped, with_small_data
from amp_compiler.onnx.model.model import OnnxFile
from amp_compiler.onnx.model.validate import raised_as_onnx
from amp_compiler.onnx.model.walk import DEFAULT, all_nodes, node_place, opset_of, proto_graphs

_CHANGED = {"Resize": 11, "Upsample": 11, "Hardmax": 13, "GroupNormalization": 21}
"""The opset from which an op means something else, and is left as it is written by ONNX's converter (seen in 1.23)."""


def raise_opset(opened: OnnxFile, version: int, why: str) -> OnnxFile:
    """The model in a later opset of the default domain, by ONNX's own converter.

    The converter is given the model without the data of large initializers, which are put back afterwards. What it
    drops of nodes that it leaves alone (names, doc strings, metadata) is put back too.

    Args:
        opened: the model; it is not changed.
        version: the opset version wanted.
        why: what needs it, for the message.

    Returns:
        The same file with a new message; tensors are shared with the old one as far as possible.

    Raises:
        OnnxError: the converter cannot do it, or an op means something else in the later opset.
    """
    proto, folder = opened.proto, opened.folder
    present = opset_of(proto)
    hint = (
        f"export the model with opset {version} or later, use dtype='fp16', or give raise_opset=False"
        " (--no-raise-opset), which keeps such nodes in FP32"
    )
    if proto.functions:  # they are written out where they are called anyway
        with raised_as_onnx(opened.name, "its graph is malformed"):
            proto = onnx.inliner.inline_local_functions(proto)
    for node in all_nodes(proto):
        since = _CHANGED.get(node.op_type, 0) if node.domain in DEFAULT else 0
        if present < since <= version:
            what = f"{why}, and {node.op_type} means something else from opset {since} on"
            raise OnnxError(what, where=node_place(node), hint=hint)
    light = stripped(with_small_data(proto, folder))
    try:
        raised = onnx.version_converter.convert_version(as_contrib(light), version)
    except Exception as cause:
        raise OnnxError(
            f"{why}, and onnx's version converter cannot raise the model from {present}: {str(cause)[:300]}", hint=hint
        ) from cause
    _restore(proto, raised)
    if is_sound(proto, folder) and not is_sound(raised, folder):
        raise OnnxError(f"{why}, and onnx's version converter makes an invalid model of it", hint=hint)
    for left, right in ((proto.graph.input, raised.graph.input), (proto.graph.output, raised.graph.output)):
        if [info.name for info in left] != [info.name for info in right]:
            raise OnnxError(f"{why}, and onnx's version converter changes its inputs or outputs", hint=hint)
    return replace(opened, proto=raised)


def _restore(proto: onnx.ModelProto, raised: onnx.ModelProto) -> None:
    """Put back data, and the domain and text of nodes that make the same values by the same op."""
    imported = {entry.domain: entry for entry in raised.opset_import}
    if CONTRIB not in {entry.domain for entry in proto.opset_import}:
        imported.pop(CONTRIB, None)
    del raised.opset_import[:]
    raised.opset_import.extend(imported.values())
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        setattr(raised, name, getattr(proto, name))
    del raised.metadata_props[:]
    raised.metadata_props.extend(proto.metadata_props)
    raised.ir_version = max(raised.ir_version, proto.ir_version)
    raised.graph.doc_string = proto.graph.doc_string
    for before, after in zip(proto_graphs(proto.graph), proto_graphs(raised.graph), strict=False):
        data = {tensor.name: tensor for tensor in before.initializer}
        for tensor in after.initializer:
            if tensor.name in data:
                tensor.CopyFrom(data[tensor.name])
        nodes = {(node.op_type, *node.output): node for node in before.node}
        for node in after.node:
            known = nodes.get((node.op_type, *node.output))
            if known is None:
                continue
            node.name, node.domain, node.doc_string, node.overload = (
                known.name, known.domain, known.doc_string, known.overload,
            )  # fmt: skip
            del node.metadata_props[:]
            node.metadata_props.extend(known.metadata_props)
    for kind in ("input", "output"):
        known_info = {info.name: info for info in getattr(proto.graph, kind)}
        for info in getattr(raised.graph, kind):
            if info.name in known_info:
                info.CopyFrom(known_info[info.name])
