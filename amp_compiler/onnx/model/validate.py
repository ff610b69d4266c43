"""Whether a message is a model at all: what must hold before ONNX's own libraries may be let near it.

Those raise errors of many kinds on a damaged model, loop for ever on functions that call one another, wait for a pipe
that is given as data, or read what is not there. What is found here is an `OnnxError` that names the place. Then ONNX's
checker looks (`check_fully`), which knows what each op takes and gives.
"""

from __future__ import annotations

import contextlib
import graphlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
from onnx import AttributeProto, TensorProto

from amp_compiler.errors import AmpError, OnnxError
from amp_compiler.onnx.model.contrib import as_contrib
from amp_compiler.onnx.model.external import bytes_of, check_external, is_external
from amp_compiler.onnx.model.types import canonical_domain
from amp_compiler.onnx.model.walk import attribute_tensors, function_nodes, node_place, proto_graphs

DEEPEST = 30
"""Bodies that may stand in one another; a file cannot hold many more."""
MOST_NODES = 20_000_000
"""Nodes that a model may have once its functions are written out."""
_EXPORT = "export the model again"
_CHECK = f"run onnx.checker.check_model(model, full_check=True) on it, and {_EXPORT}"
_ELEMENTS = frozenset(one.value for one in onnx_ir.DataType) & frozenset(TensorProto.DataType.values())
_TYPE_ATTRIBUTES = frozenset({"to", "dtype", "output_dtype"})
_FIELDS: dict[int, str] = {
    TensorProto.FLOAT: "float_data", TensorProto.COMPLEX64: "float_data",
    TensorProto.DOUBLE: "double_data", TensorProto.COMPLEX128: "double_data",
    TensorProto.INT64: "int64_data", TensorProto.UINT32: "uint64_data", TensorProto.UINT64: "uint64_data",
    TensorProto.STRING: "string_data",
}  # fmt: skip
_COMPLEX = (TensorProto.COMPLEX64, TensorProto.COMPLEX128)
_PLACES = (
    re.compile(r"Name:[ ]*(?P<name>\S*)[ ]+OpType:[ ]*(?P<op>\w*)"),
    re.compile(r"op_type:[ ]*(?P<op>\w+)(, node name: (?P<name>[^)]*))?\)"),
    re.compile(r"Node ?\((?P<name>[^)]*)\) with schema\((?P<op>[^)]*)\)"),
    re.compile(r"calling _deserialize_node with: (?P<op>[^/\s]*)/(?P<name>\S*)"),
)
_TENSOR = re.compile(r"tensor name: ([^)\s]+)")


def check_structure(proto: onnx.ModelProto, folder: Path | None) -> None:
    """Refuse a message that no library should be given.

    Args:
        proto: the message, whose external data are not loaded.
        folder: where external data lie; `None` for a model in memory.

    Raises:
        OnnxError: names that are no text, element types that nobody knows, tensors with too little data or too much,
            external data that are missing or no file of the model's folder, functions that call themselves, and so on.
    """
    _check_names("the model", (entry.domain for entry in proto.opset_import))
    for entry in proto.opset_import:
        if not 0 < entry.version < 2**31:
            raise OnnxError(f"it imports version {entry.version} of the domain '{entry.domain}'", hint=_EXPORT)
        latest = onnx.defs.onnx_opset_version()
        if entry.domain in ("", "ai.onnx") and entry.version > latest:
            raise OnnxError(
                f"its opset is {entry.version}, and the installed onnx knows opsets up to {latest}",
                hint="install a newer onnx, or export the model with an earlier opset",
            )
    _check_functions(proto)
    _Checker(folder).graph(proto.graph, "the graph")
    for function in proto.functions:
        _Checker(folder).nodes(function.node, f"function '{function.name}'", 0)


def _check_names(place: str, names: Iterator[Any]) -> None:
    for name in names:
        if not isinstance(name, str):  # protobuf gives the bytes of what is no text
            raise OnnxError(f"a name in it is no UTF-8 text: {name[:60]!r}", where=place, hint=_EXPORT)


class _Checker:
    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def graph(self, graph: onnx.GraphProto, place: str, depth: int = 0) -> None:
        """A graph and all in it."""
        _check_names(place, (name for name in (graph.name,)))
        for kind in ("input", "output", "value_info"):
            for info in getattr(graph, kind):
                if not isinstance(info.name, str) or (kind != "value_info" and not info.name):
                    raise OnnxError(f"an {kind} of it has no name", where=place, hint=_EXPORT)
                _check_type(info.type, f"value '{info.name}'")
        seen: set[str] = set()
        for tensor in graph.initializer:
            where = f"initializer '{tensor.name}'"
            self.tensor(tensor, where)
            if tensor.name in seen:
                raise OnnxError("there are two of that name", where=where, hint=_EXPORT)
            seen.add(tensor.name)
        for sparse in graph.sparse_initializer:
            where = f"sparse initializer '{sparse.values.name}'"
            raise OnnxError("it is stored as a sparse tensor", where=where, hint="store it as a dense one")
        self.nodes(graph.node, place, depth)

    def nodes(self, nodes: Sequence[onnx.NodeProto], place: str, depth: int) -> None:
        """Nodes with their attributes and bodies."""
        if depth > DEEPEST:
            raise OnnxError(f"its bodies stand more than {DEEPEST} deep in one another", where=place, hint=_EXPORT)
        for node in nodes:
            names = (node.name, node.op_type, node.domain, node.overload, *node.input, *node.output)
            try:
                "".join(names)
            except TypeError:
                _check_names(node_place(node), iter(names))
            if not node.op_type:
                raise OnnxError("it names no op", where=node_place(node), hint=_EXPORT)
            for attribute in node.attribute:
                self.attribute(attribute, node, depth)

    def attribute(self, attribute: AttributeProto, node: onnx.NodeProto, depth: int) -> None:
        """An attribute: what it names, the tensors and the bodies in it."""
        kind = attribute.type
        if type(attribute.name) is not str or type(attribute.ref_attr_name) is not str:
            raise OnnxError("an attribute's name is no UTF-8 text", where=node_place(node), hint=_EXPORT)
        if kind == AttributeProto.INT:
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i not in _ELEMENTS and not attribute.ref_attr_name:
                raise OnnxError(
                    f"its attribute '{attribute.name}' is {attribute.i}, which is no element type",
                    where=node_place(node),
                    hint="use a newer onnx, or " + _EXPORT,
                )
            return
        if kind in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
            for body in [attribute.g] if kind == AttributeProto.GRAPH else attribute.graphs:
                self.graph(body, f"{attribute.name} of {node_place(node)}", depth + 1)
        elif kind == AttributeProto.TYPE_PROTO:
            _check_type(attribute.tp, node_place(node))
        elif attribute.ref_attr_name == "":
            for tensor in attribute_tensors(attribute):
                self.tensor(tensor, f"'{attribute.name}' of {node_place(node)}")

    def tensor(self, tensor: TensorProto, where: str) -> None:
        """A tensor: its type, its shape, and that it has the data that these ask for."""
        _check_names(where, (name for name in (tensor.name,)))
        _check_element(tensor.data_type, where)
        dims = tuple(tensor.dims)
        size = math.prod(dims)
        if size < 0 or any(dim < 0 for dim in dims) or size >= 2**60:
            raise OnnxError(f"its shape is {list(dims)}, which no tensor has", where=where, hint=_EXPORT)
        bits = onnx_ir.DataType(tensor.data_type).bitwidth if tensor.data_type != TensorProto.STRING else 0
        needed = bytes_of(tensor)
        if is_external(tensor):
            check_external(tensor, needed, self.folder)
            return
        held, needed_count, unit = _held(tensor, size, needed, bits)
        if held != needed_count:
            raise OnnxError(
                f"it holds {held} {unit} of data, and its type and shape ask for {needed_count}",
                where=where,
                hint=_EXPORT,
            )


def _held(tensor: TensorProto, size: int, needed: int, bits: int) -> tuple[int, int, str]:
    """What a tensor holds, what it should hold, and in what that is counted."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data), needed, "bytes"
    held = len(getattr(tensor, _FIELDS.get(tensor.data_type, "int32_data")))
    if tensor.data_type in _COMPLEX:
        return held, 2 * size, "numbers"
    per_entry = 8 // bits if 0 < bits < 8 and 8 % bits == 0 else 1
    return held, -(-size // per_entry), "entries"


def _check_element(element: int, where: str) -> None:
    if element not in _ELEMENTS or element == TensorProto.UNDEFINED:
        raise OnnxError(
            f"its element type is number {element}, which nobody knows",
            where=where,
            hint="use a newer onnx, or " + _EXPORT,
        )


def _check_type(proto: onnx.TypeProto, where: str) -> None:
    """A declared type; an element type of 0 says nothing, which is allowed."""
    for _ in range(DEEPEST):
        kind = proto.WhichOneof("value")
        if kind in ("tensor_type", "sparse_tensor_type"):
            tensor = getattr(proto, kind)
            if tensor.elem_type:
                _check_element(tensor.elem_type, where)
            for dim in tensor.shape.dim:
                if not isinstance(dim.dim_param, str):
                    raise OnnxError("a dimension's name is no UTF-8 text", where=where, hint=_EXPORT)
            return
        if kind in ("sequence_type", "optional_type"):
            proto = getattr(proto, kind).elem_type
        elif kind == "map_type":
            _check_element(proto.map_type.key_type, where)
            proto = proto.map_type.value_type
        else:
            return
    raise OnnxError(f"its type is nested more than {DEEPEST} deep", where=where, hint=_EXPORT)


# ---- functions


def _check_functions(proto: onnx.ModelProto) -> None:
    """Refuse two functions of one name, functions that call themselves, and those that would fill the memory."""
    functions: dict[tuple[str, str, str], onnx.FunctionProto] = {}
    for function in proto.functions:
        names = (function.domain, function.name, function.overload, *function.input, *function.output)
        _check_names("a function", iter(names))
        key = (canonical_domain(function.domain), function.name, function.overload)
        if key in functions:
            raise OnnxError(
                "there are two functions of that name", where=_function_label(key), hint="remove one, or " + _EXPORT
            )
        functions[key] = function
    if not functions:
        return
    calls = {
        key: [called for node in function_nodes(one) if (called := _called(node)) in functions]
        for key, one in functions.items()
    }
    sizes: dict[tuple[str, str, str], int] = {}
    try:
        order = list(graphlib.TopologicalSorter(calls).static_order())
    except graphlib.CycleError as cause:
        raise OnnxError(
            "it calls itself", where=_function_label(cause.args[1][0]), hint="export the model without functions"
        ) from cause
    for key in order:
        own = sum(1 for _ in function_nodes(functions[key]))
        sizes[key] = own + sum(sizes[called] for called in calls[key])
    nodes = (node for graph in proto_graphs(proto.graph) for node in graph.node)
    total = sum(sizes[called] for node in nodes if (called := _called(node)) in sizes)
    if total > MOST_NODES:
        raise OnnxError(
            f"its functions make {total} nodes once they are written out where they are called",
            hint="export the model without functions",
        )


def _called(node: onnx.NodeProto) -> tuple[str, str, str]:
    return canonical_domain(node.domain), node.op_type, node.overload


def _function_label(key: tuple[str, str, str]) -> str:
    return f"function '{'.'.join(part for part in key if part)}'"


# ---- what the libraries say


def check_fully(light: onnx.ModelProto, name: str) -> None:
    """Refuse what ONNX's own checker refuses.

    Args:
        light: the model as `infer.stripped` makes it; large initializers have no data there.
        name: what messages call the model.

    Raises:
        OnnxError: with the node and what the checker says.
    """
    checked = as_contrib(light)
    checked.graph.name = checked.graph.name or "graph"  # ONNX Runtime runs a model without it, and without shapes
    for info in (*checked.graph.input, *checked.graph.output):
        if info.type.HasField("tensor_type"):
            info.type.tensor_type.shape.SetInParent()
    make_inputs_of_stubs(checked.graph)
    try:
        onnx.checker.check_model(checked)
    except Exception as cause:
        raise refused(cause, name, "ONNX's checker refuses it") from cause


def make_inputs_of_stubs(graph: onnx.GraphProto) -> None:
    """Initializers without data, which the checker would refuse, become inputs of their type and shape."""
    inputs = {info.name for info in graph.input}
    kept = []
    for tensor in graph.initializer:
        if not _is_stub(tensor):
            kept.append(onnx.TensorProto.FromString(tensor.SerializeToString()))
        elif tensor.name not in inputs:
            graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    del graph.initializer[:]
    graph.initializer.extend(kept)


def _is_stub(tensor: TensorProto) -> bool:
    if is_external(tensor):
        return True
    field = _FIELDS.get(tensor.data_type, "int32_data")
    return not tensor.HasField("raw_data") and not len(getattr(tensor, field)) and 0 not in tensor.dims


def refused(cause: BaseException, name: str, what: str, hint: str = _CHECK) -> OnnxError:
    """An error of another library as an `OnnxError` that names the node, as far as the text tells it.

    Args:
        cause: what was raised.
        name: what messages call the model.
        what: what went wrong.
        hint: what to do.
    """
    inner, text = cause, str(cause)
    while inner.__cause__ is not None:
        inner = inner.__cause__
        text = f"{text}\n{inner}"
    said = " ".join(str(inner).split()) or type(inner).__name__
    if isinstance(inner, KeyError | IndexError | AttributeError | TypeError | AssertionError):
        said = f"{type(inner).__name__}: {said}"
    return OnnxError(f"{what}: {said[:400]}", where=_place_in(text) or name, hint=hint)


def _place_in(text: str) -> str:
    for pattern in _PLACES:
        match = pattern.search(text)
        if match is not None and (match["name"] or match["op"]):
            op = re.sub(r"^:*|:.*$", "", match["op"])
            return f"node '{match['name'] or ''}' ({op})" if match["name"] else f"a node ({op})"
    tensor = _TENSOR.search(text)
    return f"tensor '{tensor[1]}'" if tensor is not None else ""


@contextlib.contextmanager
def raised_as_onnx(name: str, what: str) -> Iterator[None]:
    """Whatever a library raises within the block becomes an `OnnxError`; ours stay as they are.

    Args:
        name: what messages call the model.
        what: what was being done, as `it cannot be read`.
    """
    try:
        yield
    except AmpError:
        raise
    except MemoryError:
        raise  # the machine's fault, and no model's
    except Exception as cause:
        raise refused(cause, name, what) from cause
