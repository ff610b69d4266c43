"""A plain graph as an `onnx_ir` one of few nodes: runs of nodes that nothing changes stand in it as one node each.

Most nodes of a model leave a conversion as they came. As objects of `onnx_ir` they would be read and written one by
one; here their messages are copied. A run reads what its nodes read from without, and makes what is read without.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Mapping, Sequence

import onnx
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.model.edit import set_type
from amp_compiler.onnx.model.plain import PlainGraph

_TEXTS = {  # what text of a node may be empty, and how it is written then
    one.name: bytes([one.number << 3 | 2, 0]) for one in onnx.NodeProto.DESCRIPTOR.fields
    if one.name in ("name", "doc_string", "domain", "overload")
}  # fmt: skip
_NODES = bytes([onnx.GraphProto.DESCRIPTOR.fields_by_name["node"].number << 3 | 2])
_DOMAIN, _OP = "amp_compiler.runs", "Run"


class Condensed:
    """A model of which some nodes are objects.

    Args:
        proto: the message of the model; it is not changed.
        graph: its graph.
        kept: the indices of the nodes that are objects.

    Attributes:
        model: the `onnx_ir` model.
        nodes: by index, the nodes that are objects.
        values: by name, the values that these read and make, and what runs read from without.
        described: the values that the model says types of, by name.
    """

    def __init__(self, proto: onnx.ModelProto, graph: PlainGraph, kept: Collection[int]) -> None:
        self.proto, self.graph = proto, graph
        self.described = {info.name: info for info in proto.graph.value_info}
        self._runs = _runs(len(graph.texts), sorted(kept))
        self.model = ir.serde.deserialize_model(self._short(set(kept)))
        made = self.model.graph
        for name, value in made.initializers.items():
            value.const_value = graph.initializers[name].const_value
        self.nodes = dict(zip(sorted(kept), (node for node in made if node.domain != _DOMAIN), strict=True))
        self.values = {value.name or "": value for value in (*made.inputs, *made.initializers.values())}
        self.values.update((value.name or "", value) for node in made for value in node.outputs)
        self._types: Mapping[str, DType] = {}

    def retype(self, types: Mapping[str, DType]) -> None:
        """Give what lies within runs, or is made by one, other types.

        Args:
            types: by name of the value.
        """
        self._types = types

    def _short(self, kept: set[int]) -> onnx.ModelProto:
        """The message with a node for each run. Initializers have no data in it."""
        proto, graph = self.proto, self.graph
        short = onnx.ModelProto(ir_version=proto.ir_version, graph=onnx.GraphProto())
        for kind in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
            if proto.HasField(kind):
                setattr(short, kind, getattr(proto, kind))
        short.opset_import.extend(proto.opset_import)
        short.metadata_props.extend(proto.metadata_props)
        for kind in ("name", "doc_string"):
            if proto.graph.HasField(kind):
                setattr(short.graph, kind, getattr(proto.graph, kind))
        short.graph.metadata_props.extend(proto.graph.metadata_props)
        short.graph.input.extend(proto.graph.input)
        short.graph.output.extend(proto.graph.output)
        for tensor in proto.graph.initializer:
            short.graph.initializer.add(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        made: list[onnx.NodeProto] = []
        wanted: dict[str, None] = {}  # what is made in a run and read outside of it
        start = 0
        for begin, end in self._runs:
            made += self._objects(start, begin, wanted)
            made.append(self._run(begin, end, wanted))
            start = end
        made += self._objects(start, len(graph.texts), wanted)
        wanted.update((info.name, None) for info in proto.graph.output)
        self._give([node for node in made if node.domain == _DOMAIN], wanted)
        short.graph.node.extend(made)
        described = {*graph.initializers, *(name for index in kept for name in graph.texts[index].outputs)}
        infos = self.described
        short.graph.value_info.extend(infos[name] for name in infos if name in described)
        return short

    def _objects(self, begin: int, end: int, wanted: dict[str, None]) -> list[onnx.NodeProto]:
        wanted.update((name, None) for text in self.graph.texts[begin:end] for name in text.inputs if name)
        found: list[onnx.NodeProto] = self.graph.proto.node[begin:end]
        return found

    def _run(self, begin: int, end: int, wanted: dict[str, None]) -> onnx.NodeProto:
        makers = self.graph.makers
        named = dict.fromkeys([name for text in self.graph.texts[begin:end] for name in text[3]])
        named.pop("", None)
        read = [name for name in named if makers[name] < begin]
        wanted.update(dict.fromkeys(read))
        return onnx.NodeProto(domain=_DOMAIN, op_type=_OP, name=f"{begin}", input=read)

    def _give(self, runs: Sequence[onnx.NodeProto], wanted: Collection[str]) -> None:
        """Let each run make what is wanted of it, in the order of the nodes in it."""
        makers, texts = self.graph.makers, self.graph.texts
        made = [(maker, name) for name in wanted if (maker := makers[name]) >= 0]
        places = sorted((maker, texts[maker].outputs.index(name), name) for maker, name in made)
        for (begin, end), run in zip(self._runs, runs, strict=True):
            first, last = bisect.bisect_left(places, (begin,)), bisect.bisect_left(places, (end,))
            run.output.extend([name for _, _, name in places[first:last]])

    def expand(self, proto: onnx.ModelProto) -> None:
        """Put the nodes of the runs in the place of the runs, and describe their values, in place.

        Args:
            proto: what `model` was written as.
        """
        graph = proto.graph
        written = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
        described = {info.name: onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in graph.value_info}
        del graph.node[:]
        runs = iter(self._runs)
        for node in written:
            if node.domain == _DOMAIN:
                begin, end = next(runs)
                graph.MergeFromString(self._written(begin, end))
            else:
                graph.node.append(node)
        if self.described:
            self._describe(graph, written, described)

    def _written(self, begin: int, end: int) -> bytes:
        """The nodes of a run as they are written in a graph, without fields that are empty.

        `onnx_ir` does not write those. Bytes are put together in a third of the time in which messages are copied.
        """
        texts = [node.SerializeToString() for node in self.graph.proto.node[begin:end]]
        written: bytes = b"".join([part for text in texts for part in (_head(len(text)), text)])
        kinds = [kind for kind, field in _TEXTS.items() if field in written]
        if not kinds:
            return written
        made = onnx.GraphProto.FromString(written)
        for node in made.node:
            for kind in kinds:
                if not getattr(node, kind):
                    node.ClearField(kind)
        written = made.SerializeToString()
        return written

    def _describe(
        self, graph: onnx.GraphProto, written: list[onnx.NodeProto], described: dict[str, onnx.ValueInfoProto]
    ) -> None:
        """Say the types of values in the order in which they are made."""
        runs, returned = iter(self._runs), self.graph.returned
        made = {name for node in written if node.domain != _DOMAIN for name in node.output}
        infos = [info for name, info in described.items() if name not in made]
        for node in written:
            if node.domain != _DOMAIN:
                infos += [described[name] for name in node.output if name in described]
                continue
            begin, end = next(runs)
            for text in self.graph.texts[begin:end]:
                infos += [self._info(name) for name in text.outputs if name in self.described and name not in returned]
        del graph.value_info[:]
        graph.value_info.extend(infos)

    def _info(self, name: str) -> onnx.ValueInfoProto:
        value = ir.serde.deserialize_value_info_proto(self.described[name], None)
        if name in self._types:
            set_type(value, self._types[name])
        return ir.serde.serialize_value(value)


@functools.cache
def _head(size: int) -> bytes:
    """What stands before a node of so many bytes: the number of the field, and the size in groups of seven bits."""
    groups = bytearray(_NODES)
    while size > 127:
        groups.append(size & 127 | 128)
        size >>= 7
    return bytes([*groups, size])


def _runs(count: int, kept: list[int]) -> list[tuple[int, int]]:
    """The runs of nodes between those that are kept, each with its first place and the one behind its last."""
    ends = [*kept, count]
    begins = [0, *(place + 1 for place in kept)]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end]
