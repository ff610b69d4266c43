"""The FX frontend: an ATen graph is lowered to a `PrecisionGraph`, and a plan is carried back onto it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from amp_compiler.errors import LoweringError
from amp_compiler.fx.alias import VOLATILE
from amp_compiler.fx.capture import Captured, Source
from amp_compiler.fx.graph import (
    CAST,
    canonical_op,
    flat_arguments,
    hint,
    module_of,
    neutral_attribute,
    neutral_dtype,
    node_tensor,
    refresh,
    replace_operand,
    tensor_operands,
    torch_dtype,
    user_source,
)
from amp_compiler.fx.meta import BACKWARD_MATH, MATH, PIN
from amp_compiler.ir.dtypes import dtype_from_short
from amp_compiler.ir.graph import LOSS_FUNCTION, Node, Operand, Pin, PrecisionGraph, Value, ValueKind
from amp_compiler.ir.plan import RETURN, PrecisionPlan

_KINDS = {
    Source.PARAMETER: ValueKind.PARAMETER,
    Source.BUFFER: ValueKind.BUFFER,
    Source.CONSTANT: ValueKind.CONSTANT,
    Source.USER: ValueKind.INPUT,
}


def lower(captured: Captured) -> PrecisionGraph:
    """Lower a captured graph in normal form.

    Args:
        captured: as `fx_capture` makes it, after `fx_normalize.normalize`.

    Returns:
        The neutral graph. Value names are the names of the FX nodes that make them.
    """
    return lower_graph(captured.graph_module, {entry.name: _KINDS[entry.source] for entry in captured.inputs})


def lower_graph(graph_module: fx.GraphModule, kinds: Mapping[str, ValueKind]) -> PrecisionGraph:
    """Lower an FX graph whose nodes carry their fake tensors in `meta["val"]`.

    Args:
        graph_module: flat ATen graph in normal form.
        kinds: kind of each placeholder by name; `INPUT` where it is missing.
    """
    graph = PrecisionGraph(_device(graph_module.graph))
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            made = node_tensor(node)
            if made is not None:
                graph.add_value(_value(node.name, node, made, kinds.get(node.name, ValueKind.INPUT)))
        elif node.op == "get_attr":
            made = node_tensor(node)
            if made is not None:
                kind = ValueKind.PARAMETER if isinstance(made, torch.nn.Parameter) else ValueKind.CONSTANT
                graph.add_value(_value(node.name, node, made, kind))
        elif node.op == "call_function" and node.target is not operator.getitem and _is_tensor_op(node):
            _add_node(graph, node)
        elif node.op == "output":
            graph.outputs = [item.name for item in _returned_tensors(node)]
    graph.verify()
    return graph


def _device(graph: fx.Graph) -> str:
    kinds = {tensor.device.type for node in graph.nodes if (tensor := node_tensor(node)) is not None}
    accelerators = sorted(kinds - {"cpu", "meta"})
    return accelerators[0] if accelerators else "cpu"


def _is_tensor_op(node: fx.Node) -> bool:
    # Size queries and arithmetic on sizes have no element type: they are no part of the neutral graph.
    return bool(_made_tensors(node)) or (bool(tensor_operands(node)) and canonical_op(node.target) != "aten.sym_size")


def _made_tensors(node: fx.Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _returned_tensors(output: fx.Node) -> list[fx.Node]:
    results = output.args[0]
    flat = results if isinstance(results, (list, tuple)) else [results]
    return [item for item in flat if isinstance(item, fx.Node) and node_tensor(item) is not None]


def _value(name: str, node: fx.Node, tensor: torch.Tensor, kind: ValueKind = ValueKind.RESULT) -> Value:
    numel = 1
    for size in tensor.shape:
        numel *= hint(size)
    return Value(
        name,
        neutral_dtype(tensor.dtype),
        tuple(size if isinstance(size, int) else str(size) for size in tensor.shape),
        numel,
        kind,
        bool(node.meta.get(VOLATILE)),
    )


def _add_node(graph: PrecisionGraph, node: fx.Node) -> None:
    operands = tensor_operands(node)
    paths = {path for _, path, _ in operands}
    attributes = {
        slot: neutral_attribute(argument) for slot, path, argument in flat_arguments(node) if path not in paths
    }
    # A training step has named the modules: what it left in none stands in the loss function.
    module, module_type = (LOSS_FUNCTION, "") if node.meta.get("nn_module_stack") == {} else module_of(node)
    outputs = _outputs(node)
    graph.add_node(
        Node(
            node.name,
            canonical_op(node.target),
            tuple(Operand(source.name, slot) for slot, _, source in operands),
            tuple(value.name for value in outputs),
            attributes,
            module,
            module_type,
            user_source(node.meta.get("stack_trace")),
            phase=node.meta.get("amp_phase", "forward"),
            pin=_pin(node),
        ),
        outputs,
    )


def _outputs(node: fx.Node) -> list[Value]:
    single = node_tensor(node)
    if single is not None:
        return [_value(node.name, node, single)]
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return []
    names = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    return [
        _value(names[index].name if index in names else f"{node.name}.{index}", names.get(index, node), item)
        for index, item in enumerate(value)
        if isinstance(item, torch.Tensor)
    ]


def _pin(node: fx.Node) -> Pin | None:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return Pin("keep", f"higher-order op {node.target.name()}: its body is not rewritten")
    if node.meta.get(VOLATILE):
        return Pin("keep", "its memory is changed in place while other values share it")
    return node.meta.get(PIN)


def apply_plan(graph_module: fx.GraphModule, plan: PrecisionPlan) -> bool:
    """Insert the casts of a plan into the graph that it was made for, in place, and refresh every node's fake tensor.

    A cast stands right before its first user, so that it lives no longer than it must.

    Args:
        graph_module: the graph that was lowered.
        plan: the plan of it.

    Returns:
        Whether anything was inserted.

    Raises:
        LoweringError: where the plan names a value or operand that the graph lacks, or a node does not come out in the
            type that the plan says.
    """
    graph = graph_module.graph
    by_name = {node.name: node for node in graph.nodes}
    order = {node: position for position, node in enumerate(graph.nodes)}
    inserted = False
    for cast in plan.casts:
        if cast.explicit:
            continue
        source = _find(by_name, cast.value)
        users = [(_user(graph, by_name, name), name, index) for name, index in cast.users]
        if cast.src == cast.dst:  # an operand read past an exact upcast: no cast, another source
            new = source
        else:
            first = min((node for node, _, _ in users), key=order.__getitem__)
            with graph.inserting_before(first):
                new = graph.call_function(CAST, (source, torch_dtype(dtype_from_short(cast.dst))))
            new.meta = {key: source.meta[key] for key in ("nn_module_stack", "stack_trace") if key in source.meta}
            new.meta["amp_cast"] = f"{cast.value}: {cast.src} -> {cast.dst}"
        for node, name, index in users:
            _replace(node, name, index, new)
        inserted = True
    if inserted:
        refresh(graph_module)
    check_types(graph_module, plan)
    return inserted


def mark_math(graph: fx.Graph, plan: PrecisionPlan, *, differentiable: bool = True) -> None:
    """Note on each node what the plan says of its arithmetic, for the passes that carry it out.

    Args:
        graph: the graph of the plan, with its casts.
        plan: the plan.
        differentiable: whether gradients will be asked for.
    """
    planned = {node.name: node for node in plan.nodes if node.math or node.backward_math}
    for node in graph.nodes:
        found = planned.get(node.name) if node.op == "call_function" else None
        if found is not None and found.math == "fp32" and found.precision != "fp32":
            node.meta[MATH] = found.math_rule
        if found is not None and found.backward_math == "fp32" and differentiable:
            node.meta[BACKWARD_MATH] = found.math_rule


def _find(by_name: dict[str, fx.Node], name: str) -> fx.Node:
    if name not in by_name:
        raise LoweringError(f"the plan casts '{name}', which the graph does not have", mend="plan this graph again")
    return by_name[name]


def _user(graph: fx.Graph, by_name: dict[str, fx.Node], name: str) -> fx.Node:
    return graph.output_node() if name == RETURN else _find(by_name, name)


def _replace(node: fx.Node, name: str, index: int, new: fx.Node) -> None:
    if name == RETURN:
        results: Any = node.args[0]
        returned = [
            place for place, item in enumerate(results) if isinstance(item, fx.Node) and node_tensor(item) is not None
        ]
        changed = list(results)
        changed[returned[index]] = new
        node.args = (tuple(changed),)
        new.meta.setdefault("val", results[returned[index]].meta["val"])
        return
    operands = tensor_operands(node)
    if index >= len(operands):
        raise LoweringError(f"the plan casts operand {index} of '{name}', which has {len(operands)}")
    old = operands[index][2]
    new.meta.setdefault("val", old.meta["val"])  # keeps later operand indices valid until types are refreshed
    replace_operand(node, operands[index][1], new)


def check_types(graph_module: fx.GraphModule, plan: PrecisionPlan) -> None:
    """Check that every value has the type that the plan promises.

    Raises:
        LoweringError: at the first that has not.
    """
    by_name = {node.name: node for node in graph_module.graph.nodes}
    for planned in plan.nodes:
        for name, promised in planned.outputs:
            made = node_tensor(by_name[name]) if name in by_name else None
            if made is not None and neutral_dtype(made.dtype).short != promised:
                raise LoweringError(
                    f"node '{planned.name}' ({planned.op}) gives {neutral_dtype(made.dtype).short},"
                    f" the plan says {promised}",
                    where=planned.source,
                    mend=f"the entry of {planned.op} in rules/ops.yaml does not tell how it types its result",
                )
