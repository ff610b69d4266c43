"""What autograd does with the seed of a backward in FP16, done in FP32: part of `FoldLossScale`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from amp_compiler.fx.graph import is_single_number, node_tensor, replace_call

aten = torch.ops.aten
SCALAR_OPS = frozenset({aten.div.Tensor, aten.div.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.neg.default})
_CAST = aten._to_copy.default
_LOW = torch.float16  # BF16 holds whatever FP32 does


def widen_seed(graph: fx.Graph, scale: fx.Node) -> None:
    """Do in FP32 what the graph does in FP16 with single numbers that are made from the loss scale.

    The first op that makes a tensor of such a number runs in FP32 as well where it can, and its result is cast down;
    an `expand` is given the number cast down, with the constants that follow it already in it.

    Args:
        graph: the joint graph, seeded with the scale.
        scale: placeholder of the scale, FP32.
    """
    wide: dict[fx.Node, fx.Node] = {}  # an FP16 number, and the FP32 one in its place
    scaled = {scale}  # FP32 numbers that are made from the scale
    for node in list(graph.nodes):
        value, sources = node_tensor(node), node.all_input_nodes
        if value is None or node.op != "call_function":
            continue
        if node.target is _CAST and sources[0] in scaled and value.dtype is _LOW:
            wide[node] = sources[0]
        elif any(source in wide for source in sources):
            _widen(graph, node, value, wide, scaled)
        elif value.dtype is torch.float32 and is_single_number(value) and any(source in scaled for source in sources):
            scaled.add(node)
    for node in reversed(list(wide)):
        if not node.users:
            graph.erase_node(node)


def _widen(
    graph: fx.Graph, node: fx.Node, value: torch.Tensor, wide: dict[fx.Node, fx.Node], scaled: set[fx.Node]
) -> None:
    """Rewrite one reader of a widened number."""
    source = next(one for one in node.all_input_nodes if one in wide)
    if node.target is _CAST and value.dtype is torch.float32:
        replace_call(node, wide[source])
        return
    if node.target is aten.expand.default and value.dtype is _LOW and not is_single_number(value):
        node.update_arg(0, _cast(graph, node, absorb(graph, node, wide[source]), _LOW))
        return
    wide_node = _in_fp32(graph, node, value, wide) if value.dtype is _LOW else None
    if wide_node is None:
        for one in node.all_input_nodes:
            if one in wide:  # it reads the number in FP16 only, rounded once
                node.replace_input_with(one, _cast(graph, node, wide[one], _LOW))
    elif is_single_number(value):
        wide[node] = wide_node
        scaled.add(wide_node)
    else:
        replace_call(node, _cast(graph, node, wide_node, _LOW))


def absorb(graph: fx.Graph, expand: fx.Node, number: fx.Node) -> fx.Node:
    """The number with the constants that the ops behind its `expand` multiply by; these ops go."""
    while len(expand.users) == 1:
        (user,) = expand.users
        constant = user.target in SCALAR_OPS and not any(isinstance(argument, fx.Node) for argument in user.args[1:])
        if not constant or user.args[0] is not expand:
            break
        with graph.inserting_before(expand):
            small = graph.call_function(user.target, (number, *user.args[1:]), dict(user.kwargs))  # type: ignore[arg-type]
        small.meta = {**user.meta, "val": number.meta["val"]}
        replace_call(user, expand)
        number = small
    return number


def _in_fp32(graph: fx.Graph, node: fx.Node, value: torch.Tensor, wide: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """The node's op on FP32 inputs, in front of it; `None` where it is not the same op then."""

    def example(argument: fx.Node) -> Any:
        value = argument.meta.get("val")
        return value.float() if isinstance(value, torch.Tensor) and value.dtype is _LOW else value

    kwargs = {key: torch.float32 if argument is _LOW else argument for key, argument in node.kwargs.items()}
    try:
        seen: Any = node.target(*fx.node.map_arg(node.args, example), **fx.node.map_arg(kwargs, example))  # type: ignore[operator]
    except (RuntimeError, TypeError, NotImplementedError):  # an op that takes FP16 alone
        return None
    if not isinstance(seen, torch.Tensor) or seen.dtype is not torch.float32 or seen.shape != value.shape:
        return None

    def widened(argument: fx.Node) -> fx.Node:
        value = node_tensor(argument)
        low = value is not None and value.dtype is _LOW
        return wide.get(argument) or (_cast(graph, node, argument, torch.float32) if low else argument)

    args, named = fx.node.map_arg(node.args, widened), fx.node.map_arg(kwargs, widened)
    with graph.inserting_before(node):
        node_in_fp32 = graph.call_function(node.target, args, named)  # type: ignore[arg-type]
    node_in_fp32.meta = {**node.meta, "val": seen}
    return node_in_fp32


def _cast(graph: fx.Graph, before: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    with graph.inserting_before(before):
        cast = graph.call_function(_CAST, (node,), {"dtype": dtype})
    cast.meta = {**before.meta, "val": node.meta["val"].to(dtype)}
    return cast
