"""Reading an ONNX model, once: its file, the `onnx_ir` model, and the type of each value by ONNX's own inference."""

from __future__ import annotations

import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import onnx.inliner
import onnx_ir

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Pin
from amp_compiler.onnx.model.external import refuse_pointer
from amp_compiler.onnx.model.infer import (
    Sizes,
    infer,
    infer_checked,
    infer_sized,
    light_of,
    replace_contradicted,
)
from amp_compiler.onnx.model.order import in_order
from amp_compiler.onnx.model.types import neutral_type
from amp_compiler.onnx.model.validate import check_fully, check_structure, raised_as_onnx
from amp_compiler.onnx.model.walk import proto_bodies, without_maps

SIZE_HINT = 64  # elements that a dimension of unknown size counts for


@dataclass(frozen=True)
class ValueType:
    """What is known of a value.

    Args:
        dtype: element type; `None` where inference could not tell.
        shape: dimensions, a string for a symbolic one, `None` for an unknown rank.
        tensor: it is a dense tensor, no sequence, optional or sparse one.
        item: the element type of the tensors of a sequence; `None` for what is none.

    Attributes:
        numel: elements; a dimension without a number counts as `SIZE_HINT`.
        kind: all but the shape.
    """

    dtype: DType | None
    shape: tuple[int | str, ...] | None = None
    tensor: bool = True
    item: DType | None = None

    numel: int = field(init=False, repr=False, compare=False)
    kind: tuple[DType | None, bool, DType | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shape = (SIZE_HINT, SIZE_HINT) if self.shape is None else self.shape
        numel = math.prod(size if isinstance(size, int) else SIZE_HINT for size in shape)
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "kind", (self.dtype, self.tensor, self.item))


UNKNOWN = ValueType(None)


@dataclass(frozen=True)
class OnnxFile:
    """A model as it was given: what `open_model` has read, once, for all who work on it.

    Args:
        proto: its message, external data not loaded; shared with a caller who gave a message, so never changed.
        path: its file; `None` for a model in memory.
        pins: by name of a node, what the text of the torch model demands of it that the file was exported from.
    """

    proto: onnx.ModelProto
    path: Path | None = None
    pins: Mapping[str, Pin] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """Where external data lie; `None` for a model in memory."""
        return None if self.path is None else self.path.parent

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path) if self.path is not None else self.proto.graph.name or "<model>"


Source = str | Path | onnx.ModelProto | OnnxFile


@dataclass
class OnnxModel:
    """A model that was read.

    Args:
        proto: the message that it was read from; it is never changed.
        ir: the model on `onnx_ir`, with external data not loaded.
        types: what is known of each value.
        folder: where external data lie, `None` for a model in memory.
        unnamed: nodes that had no name; `onnx_ir` gives them one, and `restore_text` takes it away again.
        described: initializers with an entry of their own in `value_info`.
        external: the data that lie in files of their own.
        reshaped: values whose declared shapes inference contradicts; they have the inferred ones here.
        graphs: its graph and all bodies in it, in the order of the nodes.
    """

    proto: onnx.ModelProto
    ir: onnx_ir.Model
    types: dict[onnx_ir.Value, ValueType] = field(default_factory=dict)
    folder: Path | None = None
    unnamed: set[onnx_ir.Node] = field(default_factory=set)
    described: set[onnx_ir.Value] = field(default_factory=set)
    external: list[onnx_ir.ExternalTensor] = field(default_factory=list)
    reshaped: tuple[str, ...] = ()
    graphs: list[onnx_ir.Graph] = field(default_factory=list)

    def type_of(self, value: onnx_ir.Value) -> ValueType:
        """What is known of a value."""
        return self.types.get(value, UNKNOWN)

    def opset(self, domain: str) -> int:
        """The opset version of a domain; 1 where the model does not import it."""
        known = self.ir.opset_imports.get(domain)
        if known is None and domain == "":
            known = self.ir.opset_imports.get("ai.onnx")
        return 1 if known is None else known

    def restore_text(self) -> None:
        """Take away what reading added: names of unnamed nodes, and descriptions of initializers."""
        for node in self.unnamed:
            node.name = None
        for graph in self.graphs:
            for value in graph.initializers.values():
                if value not in self.described and not value.is_graph_input() and not value.is_graph_output():
                    value.type = None
                    value.shape = None


def open_model(source: Source) -> OnnxFile:
    """Open a model: the one place where an ONNX file is read. The data of external tensors stay where they are.

    Args:
        source: a path; or a message, which is not changed; or a model that is open already. Of that a message in memory
            is read anew: it is shared with its owner, who may have changed it since.

    Raises:
        OnnxError: there is no such file, or it holds no ONNX model, or a damaged one.

    Example:
        ```python
        model = open_model("m.onnx")
        ranges = calibrate(model, batches)
        done = convert_onnx(model, "m.fp16.onnx")       # reads no file again
        ```
    """
    if isinstance(source, OnnxFile):
        return source if source.path is not None else _checked(source)
    if isinstance(source, onnx.ModelProto):
        return _checked(OnnxFile(source))
    if not isinstance(source, str | Path):
        raise OnnxError(
            f"amp_compiler cannot read a {type(source).__name__} as an ONNX model",
            hint="give a path or an onnx.ModelProto",
        )
    path = Path(source)
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for
            raise OnnxError("it is no regular file", where=str(path), hint="name an ONNX file")
        proto = onnx.load(path, load_external_data=False)
    except OnnxError:
        raise
    except OSError as cause:
        why = (cause.strerror or str(cause)).lower()
        raise OnnxError(f"cannot be read: {why}", where=str(path), hint="name an ONNX file") from cause
    except Exception as cause:  # protobuf and ONNX's readers of its text forms raise errors of their own
        refuse_pointer(path)
        raise OnnxError("this is no ONNX model, or a damaged one", where=str(path), hint="export it again") from cause
    return _checked(OnnxFile(proto, path))


def _checked(opened: OnnxFile) -> OnnxFile:
    """The model, if it is one."""
    proto = opened.proto
    if not proto.HasField("graph") or not proto.opset_import:
        raise OnnxError("this is no ONNX model: it has no graph or no opset", where=opened.name, hint="export it again")
    with raised_as_onnx(opened.name, "it is damaged"):
        check_structure(proto, opened.folder)
    return opened


def to_ir(model: OnnxFile, *, outside: bool = True) -> onnx_ir.Model:
    """The model on `onnx_ir`, its external data not loaded.

    Args:
        model: the model.
        outside: whether it may have external data.

    Raises:
        OnnxError: its graph is malformed.
    """
    with raised_as_onnx(model.name, "its graph is malformed"):
        result = onnx_ir.serde.deserialize_model(without_maps(model.proto))
    if outside and model.folder is not None:
        onnx_ir.external_data.set_base_dir(result.graph, model.folder)
    return result


def check_model(opened: OnnxFile) -> None:
    """Refuse what ONNX's full checker refuses.

    Raises:
        OnnxError: with the node.
    """
    with raised_as_onnx(opened.name, "its graph is malformed"):
        proto = in_order(opened.proto)
        light = light_of(proto, opened.folder)
        check_fully(light, opened.name)
        if proto.functions:  # whether a call fits its function shows only where it is written out
            light = light_of(onnx.inliner.inline_local_functions(proto), opened.folder)
            check_fully(light, opened.name)
        infer_checked(light)


def read_model(opened: OnnxFile, *, check: bool = True, sizes: Sizes | None = None) -> OnnxModel:
    """Read a model into `onnx_ir` and infer types. Model-local functions are written out where they are called.

    Args:
        opened: the model.
        check: refuse what ONNX's full checker refuses.
        sizes: sizes of the dimensions that the model leaves open: shapes are told for these. The file stays as open.

    Raises:
        OnnxError: the model holds what `onnx_ir` would lose, or its graph is malformed.
    """
    proto, folder = opened.proto, opened.folder
    if proto.training_info:
        raise OnnxError("the model carries training_info, which a conversion would lose", hint="remove it first")
    with raised_as_onnx(opened.name, "its graph is malformed"):
        proto = in_order(proto)
        light = light_of(proto, folder)
    reshaped: list[str] = []
    if check:
        check_fully(light, opened.name)
    with raised_as_onnx(opened.name, "its graph is malformed"):
        if proto.functions:
            proto = in_order(onnx.inliner.inline_local_functions(proto))
            light = light_of(proto, folder)
            if check:  # whether a call fits its function shows only now
                check_fully(light, opened.name)
        try:
            inferred = infer_checked(light) if check else infer(light)
        except OnnxError:
            proto, reshaped = replace_contradicted(proto, light)
            if not reshaped:
                raise
            light = light_of(proto, folder)
            inferred = infer_checked(light)
        model = to_ir(replace(opened, proto=proto), outside=light is not proto)
        result = OnnxModel(proto, model, folder=folder, reshaped=tuple(reshaped))
        if sizes:
            inferred = infer_sized(light, inferred, sizes)
        _Binder(result).bind(model.graph, proto.graph, inferred.graph)
    return result


def value_types(opened: OnnxFile) -> dict[str, DType]:
    """The element type of each tensor of the main graph by name, as far as ONNX's inference knows it."""
    model = read_model(opened, check=False)
    graph = model.ir.graph
    results = (value for node in graph for value in node.outputs)
    known = ((value, model.type_of(value)) for value in (*graph.inputs, *graph.initializers.values(), *results))
    return {value.name or "": one.dtype for value, one in known if one.tensor and one.dtype is not None}


def bodies(node: onnx_ir.Node) -> dict[str, onnx_ir.Graph]:
    """The bodies of a control-flow node by attribute name."""
    inner: dict[str, onnx_ir.Graph] = {}
    held = node.attributes.data  # a dict, where the mapping around it is written in Python
    if not held:
        return inner
    for name, attribute in held.items():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            inner[name] = attribute.as_graph()
        elif attribute.type == onnx_ir.AttributeType.GRAPHS:
            inner.update({f"{name}.{index}": body for index, body in enumerate(attribute.as_graphs())})
    return inner


@dataclass
class _Binder:
    """Walks the `onnx_ir` graph, the message and the inferred message side by side."""

    model: OnnxModel
    seen: dict[bytes, ValueType] = field(default_factory=dict)

    def bind(self, graph: onnx_ir.Graph, proto: onnx.GraphProto, inferred: onnx.GraphProto) -> None:
        """Fill `graphs`, `types`, `unnamed` and `described` for one graph and its bodies."""
        self.model.graphs.append(graph)
        known = self._known(inferred)
        described = {info.name for info in proto.value_info}
        types, unnamed = self.model.types, self.model.unnamed
        for value in graph.inputs:
            if value.name in known:
                types[value] = known[value.name]
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is not None:
                types[value] = ValueType(neutral_type(tensor.dtype.value), tuple(tensor.shape.numpy()))
            if isinstance(tensor, onnx_ir.ExternalTensor):
                self.model.external.append(tensor)
            if name in described:
                self.model.described.add(value)
        for place, (node, message) in enumerate(zip(graph, proto.node, strict=True)):
            if not message.name:
                unnamed.add(node)
            for value in node.outputs:
                value_type = known.get(value.name or "")
                if value_type is not None:
                    types[value] = value_type
            for name, body in bodies(node).items():
                self.bind(body, proto_bodies(message)[name], proto_bodies(inferred.node[place])[name])

    def _known(self, inferred: onnx.GraphProto) -> dict[str, ValueType]:
        """By name, what inference says. Few types are common to many values, so each is looked into once."""
        known = {}
        seen = self.seen
        for kind in ("value_info", "input", "output"):
            for info in getattr(inferred, kind):
                type_ = info.type
                text = type_.SerializeToString()
                value_type = seen.get(text)
                if value_type is None:
                    value_type = seen[text] = _value_type(type_)
                known[info.name] = value_type
        return known


def _value_type(proto: onnx.TypeProto) -> ValueType:
    kind = proto.WhichOneof("value")
    if kind is None:
        return UNKNOWN
    if kind == "sequence_type" and proto.sequence_type.elem_type.WhichOneof("value") == "tensor_type":
        element = proto.sequence_type.elem_type.tensor_type.elem_type
        return ValueType(DType.OTHER, None, tensor=False, item=neutral_type(element) if element else None)
    if kind != "tensor_type":
        return ValueType(DType.OTHER, None, tensor=False)
    tensor = proto.tensor_type
    dtype = neutral_type(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return ValueType(dtype)
    return ValueType(
        dtype,
        tuple(
            dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or f"?{index}"
            for index, dim in enumerate(tensor.shape.dim)
        ),
    )
