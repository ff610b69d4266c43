"""Probabilities that a loss takes the logarithm of: they are computed in FP32 from the function that squashes them on.

Rounded to 16 bits, a probability near one is one, and its gradient in the loss is 1e12 where the true one is small: an
infinity in FP16, and a NaN behind the gradient of the sigmoid, which is zero there. In an ONNX model the logarithm
itself is such a loss: a probability below 3e-8 is zero in FP16.
"""

from __future__ import annotations

from collections.abc import Mapping

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.rules import Decision, Precision

_OPEN = (Precision.LOW, Precision.WIDEST, Precision.BETWEEN)


def makers_of_outputs(draft: Draft, decisions: Mapping[str, Decision]) -> frozenset[str]:
    """The squashing functions that make nothing but an FP32 output of a model, by node name.

    The loss outside of it may take a logarithm: a probability that is rounded to 0 in FP16 gives NaN there. And a cast
    in front of such a function costs what one behind it does. A function with other readers is none of them, nor is
    what a user's own rule asks the low type for.

    Args:
        draft: the graph, the rules and what is planned for.
        decisions: what the rules say, by node name.
    """
    free = (*_OPEN, Precision.FOLLOW) if draft.graph.execution.run_only else _OPEN
    own = {rule.where for rule in draft.rules.rules if rule.own}
    graph, makers = draft.graph, set()
    for output in graph.outputs:
        value, readers = output, 0
        while (maker := graph.producer(value)) is not None and len(graph.users(value)) == readers:
            info, decision = draft.rules.ops.info(maker.op), decisions[maker.name]
            if info.squashes and graph.values[value].dtype is DType.FLOAT32:
                if decision.precision in free and decision.rule not in own:
                    makers.add(maker.name)
                break
            if info.moves != "shape" or decision.precision is Precision.LOW:  # which rounds what it moves
                break
            if graph.execution.run_only and graph.values[value].numel != graph.values[maker.inputs[0].value].numel:
                break  # a cast in front costs more than one behind what takes a part
            value, readers = maker.inputs[0].value, 1
    return frozenset(makers)


def makers_of_probabilities(draft: Draft, decisions: Mapping[str, Decision]) -> dict[str, Node]:
    """The nodes between a squashing function and a loss, or a logarithm, in FP32 that are not to run in 16 bits.

    From the loss back through arithmetic, copies and views to the functions that make probabilities (a sigmoid, a
    softmax), these included. From a logarithm, which counts in an ONNX model, on the ways alone that lead to such a
    function.

    Args:
        draft: the graph, the rules and what is planned for.
        decisions: what the rules say, by node name. A rule of the user's own that asks for the low type is obeyed.

    Returns:
        By node name, the loss or logarithm.
    """
    graph, info, in_file = draft.graph, draft.rules.ops.info, draft.graph.execution.run_only
    own = {rule.where for rule in draft.rules.rules if rule.own}
    makers: dict[str, Node] = {}
    behind_logarithms: dict[str, Node] = {}
    for taker in graph.nodes.values():
        slots = info(taker.op).probabilities
        if not slots or decisions[taker.name].precision not in (Precision.FP32, Precision.KEEP):
            continue
        is_loss = info(taker.op).family == "loss"
        if not is_loss and not in_file:
            continue
        takers = makers if is_loss else behind_logarithms
        pending = [operand.value for operand in taker.inputs if operand.slot in slots]
        while pending:
            maker = graph.producer(pending.pop())
            if maker is None or maker.name in takers:
                continue
            known = info(maker.op)
            sums = not is_loss and known.family in ("reduction", "cast")
            if known.squashes or known.carries or known.exact or known.moves or sums:
                takers[maker.name] = taker
                pending += [] if known.squashes else [operand.value for operand in maker.inputs]
    probabilities: set[str] = set()
    for name in [name for name in graph.nodes if name in behind_logarithms] if behind_logarithms else ():
        node = graph.nodes[name]
        if info(node.op).squashes or any(operand.value in probabilities for operand in node.inputs):
            probabilities.update(node.outputs)
            makers.setdefault(name, behind_logarithms[name])
    free = (*_OPEN, Precision.FOLLOW) if in_file else _OPEN
    return {
        name: taker
        for name, taker in makers.items()
        if decisions[name].precision in free and decisions[name].rule not in own
    }
