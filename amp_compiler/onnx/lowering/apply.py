"""Carrying a plan back onto an ONNX model: casts as nodes, stored data rounded, idle casts of the model's own gone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from amp_compiler.errors import LoweringError
from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.plan import RETURN, PlannedCast, PrecisionPlan
from amp_compiler.onnx.lowering.lowered import EMPTY_LIST, Lowered, Site
from amp_compiler.onnx.lowering.scopes import Scopes
from amp_compiler.onnx.lowering.widen import widen_math
from amp_compiler.onnx.model.data import convert, tensor_of
from amp_compiler.onnx.model.edit import (
    KeptTypes,
    cast_node,
    graph_of,
    keeps,
    names_of,
    new_node,
    set_data,
    set_type,
    unique,
    with_data,
)
from amp_compiler.onnx.model.types import ir_type, neutral_type, signature_of

_CASTS = ("onnx.Cast", "onnx.CastLike")
_IR_WITH_FREE_INITIALIZERS = 4  # the first IR version in which initializers need not be inputs


def apply_plan(
    lowered: Lowered, plan: PrecisionPlan, *, floors: Mapping[str, float] | None = None, keep_io_types: KeptTypes = True
) -> bool:
    """Carry out a plan on the model that it was made for, in place.

    A cast stands right before its first reader, in the innermost graph that holds all of them, but never inside a loop
    that the value enters from outside. Stored data whose readers all want the low type are rounded where they stand;
    where some want FP32, there are two copies. An output of the graph keeps its name: what makes it is renamed. Where a
    rule says `math: fp32`, `widen_math` puts casts around the node.

    Args:
        lowered: the model and its neutral graph.
        plan: the plan of that graph.
        floors: by stored value, what its finite elements are raised to: the masks of attention.
        keep_io_types: which inputs keep their types; another one that is read in the low type alone becomes low.

    Returns:
        Whether anything was changed.

    Raises:
        LoweringError: the plan casts stored data that are not there.
    """
    writer = _Writer(lowered, plan, dict(floors or {}))
    changed = writer.run()
    if changed or lowered.held:
        _drop_idle_casts(lowered, plan)
    if keep_io_types is not True:
        changed |= writer.convert_inputs(keep_io_types)
    return widen_math(lowered, plan) or changed


class _Writer:
    def __init__(self, lowered: Lowered, plan: PrecisionPlan, floors: dict[str, float]) -> None:
        self.lowered, self.plan, self.floors = lowered, plan, floors
        self.main = lowered.model.ir.graph
        self.placed: dict[tuple[str, str, ir.Graph], ir.Value] = {}
        self.folded: dict[tuple[str, DType], tuple[ir.Value, list[Site]]] = {}
        self.retired: set[str] = set()
        self.outputs: dict[int, ir.Value] = {}
        self.scopes = Scopes(lowered.owners, {self.main: 0})
        self._homes: dict[ir.Value, ir.Graph] = {}
        self._orders: dict[ir.Graph, dict[ir.Node, int]] = {}
        self.value_names, self.node_names = names_of(lowered.model.graphs)
        for graph in lowered.model.graphs:
            self._homes.update(dict.fromkeys((*graph.inputs, *graph.initializers.values()), graph))
            if graph is not self.main:
                self.scopes.depth[graph] = self.scopes.depth[graph_of(lowered.owners[graph])] + 1

    def _home(self, value: ir.Value) -> ir.Graph:
        """The graph that a value is made in, or given to."""
        producer = value.producer()
        return self._homes[value] if producer is None else graph_of(producer)

    def _first(self, nodes: list[ir.Node], graph: ir.Graph) -> ir.Node:
        """The first of some nodes of a graph."""
        if len(nodes) == 1:
            return nodes[0]
        order = self._orders.get(graph)
        if order is None:
            order = self._orders[graph] = {node: index for index, node in enumerate(graph)}
        return min(nodes, key=order.__getitem__)

    def run(self) -> bool:
        """Retype what changed, place the casts, settle outputs and stored data."""
        changed = self._retype()
        for cast in self.plan.casts:
            if not cast.explicit:
                self._place(cast)
                changed = True
        self._settle_outputs()
        for (name, dtype), (new, sites) in self.folded.items():
            self._store(name, dtype, new, sites)
        for name, floor in self.floors.items():
            changed |= self._raise(name, floor)
        if changed:
            model = self.lowered.model.ir
            model.ir_version = max(model.ir_version, _IR_WITH_FREE_INITIALIZERS)
        return changed

    def _retype(self) -> bool:
        values = self.lowered.graph.values
        changed = [(name, dtype) for name, dtype in self.plan.types.items() if values[name].dtype is not dtype]
        for name, dtype in changed:
            set_type(self.lowered.values[name], dtype)
        return bool(changed)

    def _place(self, cast: PlannedCast) -> None:
        source = self.lowered.values[cast.value]
        dst = dtype_from_short(cast.dst)
        sites = list(self._sites(cast))
        returned = [index for name, index in cast.users if name == RETURN]
        if cast.src == cast.dst:
            new = source
        elif self.lowered.graph.is_folded(cast.value) and self._may_hold(source, dst):
            new, readers = self._fold(cast.value, dst)
            readers += [site for site in sites if site.body is None]
            sites = [site for site in sites if site.body is not None]
        else:
            new = self._cast(cast, source, dst, sites, bool(returned))
        for site in sites:
            if site.body is not None:
                self._set_result(site.body, site.index, new, cast.dst)
            else:
                site.node.replace_input_with(site.index, new)
        for index in returned:
            self.outputs[self.lowered.returned[index]] = new

    def _sites(self, cast: PlannedCast) -> Iterator[Site]:
        for name, index in cast.users:
            if name == RETURN:
                continue
            yield self.lowered.sites_of(name)[index]

    def _set_result(self, body: ir.Graph, index: int, new: ir.Value, short: str) -> None:
        old = body.outputs[index]
        if new.type is None and old.type is not None:
            new.type, new.shape = old.type, old.shape
            set_type(new, dtype_from_short(short))
        body.outputs[index] = new

    # ---- casts

    def _cast(self, cast: PlannedCast, source: ir.Value, dst: DType, sites: list[Site], returned: bool) -> ir.Value:
        graphs = [self.scopes.graph_of(site) for site in sites] + [self.main] * returned
        graph = self.scopes.common(graphs, self._home(source))
        key = (cast.value, cast.dst, graph)
        if key in self.placed:
            return self.placed[key]
        base = source.name or "value"
        names = unique(f"{base}_{cast.dst}", self.value_names), unique(f"{base}_to_{cast.dst}", self.node_names)
        node = cast_node(source, ir_type(dst), *names)
        anchors = [anchor for site in sites if (anchor := self.scopes.anchor(site, graph)) is not None]
        if anchors:
            graph.insert_before(self._first(anchors, graph), node)
        else:
            graph.append(node)
        self.placed[key] = node.outputs[0]
        return node.outputs[0]

    # ---- outputs of the graph

    def _settle_outputs(self) -> None:
        """Give each output that is now made by another value its name back."""
        casts = set(self.placed.values())
        types = (self.lowered.graph.values[name].dtype for name in self.lowered.graph.outputs)
        captured_types = dict(zip(self.lowered.returned, types, strict=True))
        settled: dict[ir.Value, ir.Value] = {}
        for index, new in self.outputs.items():
            old = self.main.outputs[index]
            if old in settled:
                self.main.outputs[index] = settled[old]
                continue
            if new not in casts or new.is_graph_output():
                new = self._identity(new)
            settled[old] = new
            self.main.outputs[index] = new
            name, captured = old.name or "output", captured_types[index]
            inner = old.dtype
            new.type, new.shape, new.doc_string = old.type, old.shape, old.doc_string
            set_type(new, captured)
            short = neutral_type(inner.value).short if inner is not None else "inner"
            old.name = unique(f"{name}_{short}", self.value_names)
            old.doc_string = None
            new.name = name

    def _identity(self, source: ir.Value) -> ir.Value:
        base = source.name or "value"
        names = unique(f"{base}_out", self.value_names), unique(f"{base}_to_output", self.node_names)
        node = new_node("Identity", [source], *names)
        self.main.append(node)
        return node.outputs[0]

    # ---- stored data

    def _may_hold(self, value: ir.Value, dst: DType) -> bool:
        """Whether what makes stored data may make them in a type: a `ConstantOfShape` makes BF16 from opset 20 on."""
        maker = value.producer()
        if maker is None or maker.op_type == EMPTY_LIST:
            return True
        signature = signature_of("", maker.op_type, maker.version or self.lowered.model.opset(""))
        formal = signature.output(0) if signature is not None else None
        return formal is None or dst in formal.allowed

    def _fold(self, name: str, dst: DType) -> tuple[ir.Value, list[Site]]:
        """What holds stored data in another type, and the inputs that are to read that; `_store` puts it in place."""
        known = self.folded.get((name, dst))
        if known is None:
            old, element = self.lowered.values[name], ir_type(dst)
            title = unique(f"{old.name}_{dst.short}", self.value_names)
            new = ir.Value(name=title, type=ir.TensorType(element), shape=old.shape)
            if name in self.lowered.graph.lists:
                new.type = ir.SequenceType(ir.TensorType(element))
            known = self.folded[name, dst] = new, []
        return known

    def _store(self, name: str, dst: DType, new: ir.Value, readers: list[Site]) -> None:
        """Round data where they stand, or beside them where others read them too."""
        old = self.lowered.values[name]
        held = ir.AttrInt64("dtype", ir_type(dst).value)  # of an empty list
        if name not in self.lowered.graph.lists:
            tensor = tensor_of(old)
            if tensor is None:
                raise LoweringError(f"'{name}' holds no data", hint="plan this model again")
            held = ir.AttrTensor("value", convert(tensor, dst, name=new.name or "", floor=self.floors.get(name)))
        maker = old.producer()
        if len(old.uses()) > len(readers) or old.is_graph_output():
            for site in readers:
                site.node.replace_input_with(site.index, new)
            if maker is None:
                new.const_value = held.value
                self._home(old).register_initializer(new)
            else:
                maker.prepend(with_data(maker, held, new, unique(f"{maker.name}_{dst.short}", self.node_names)))
            return
        self.retired.add(name)
        new.replace_all_uses_with(old, replace_graph_outputs=True)
        if maker is None:
            held.value.name = old.name
            old.const_value = held.value
        elif maker.op_type == EMPTY_LIST:
            maker.attributes["dtype"] = held
        else:
            set_data(maker, held.value)
        set_type(old, dst)

    def _raise(self, name: str, floor: float) -> bool:
        """Raise the FP32 copy of a mask, where there is one left."""
        value = self.lowered.values[name]
        if name in self.retired or not (value.uses() or value.is_graph_output()):
            return False
        tensor = tensor_of(value)
        if tensor is None:
            return False
        result = convert(tensor, self.lowered.graph.values[name].dtype, name=tensor.name or "", floor=floor)
        node = value.producer()
        if node is None:
            value.const_value = result
        else:
            set_data(node, result)
        return True

    # ---- inputs of the graph

    def convert_inputs(self, kept: KeptTypes) -> bool:
        """Let each other FP32 input that is read in the low type alone be an input of the low type."""
        changed = False
        casts = set(self.placed.values())
        for value in list(self.main.inputs):
            readers = [node for node, _ in value.uses()]
            if keeps(kept, value) or not readers or value.is_initializer() or value.is_graph_output():
                continue
            casting = [node for node in readers if node.op_type == "Cast"]
            ours = [node for node in casting if node.outputs[0] in casts and not node.outputs[0].is_graph_output()]
            if len(ours) < len(readers) or value.dtype is not ir.DataType.FLOAT:
                continue
            value.dtype = ir_type(self.lowered.low)
            for node in ours:
                node.outputs[0].replace_all_uses_with(value)
                graph_of(node).remove(node, safe=True)
            changed = True
        return changed


def _drop_idle_casts(lowered: Lowered, plan: PrecisionPlan) -> None:
    """Take out casts of the model that the plan made idle, in place. What was idle before stays,
    but for what an export has kept for the plan (`Lowered.held`).

    A cast whose input has come to have its type is read past; where it makes an output of a graph it becomes an
    `Identity`. One that nobody reads any more, since all its readers have its input cast to the low type, goes too.

    Args:
        lowered: the model, on which the plan has been carried out.
        plan: the plan.
    """
    own = [neutral for neutral in lowered.graph.nodes.values() if neutral.op in _CASTS]
    planned_types = plan.types if own else {}
    for neutral in own:
        node = lowered.nodes[neutral.name]
        source, result = neutral.inputs[0].value, neutral.outputs[0]
        captured = lowered.graph.values[source].dtype
        was = captured is lowered.graph.values[result].dtype
        idle = planned_types.get(source, captured) is planned_types.get(result, lowered.graph.values[result].dtype)
        idle &= not was or neutral.name in lowered.held
        if idle:
            _pass_on(node)
        unread = not any(out.uses() or out.is_graph_output() for out in node.outputs)
        if unread and (lowered.graph.users(result) or idle):
            graph_of(node).remove(node, safe=True)


def _pass_on(node: ir.Node) -> None:
    source, result = node.inputs[0], node.outputs[0]
    if source is None:
        return
    if result.is_graph_output():
        node.attributes.clear()
        node.op_type = "Identity"
        node.resize_inputs(1)
    else:
        result.replace_all_uses_with(source)
