"""`ApplyPlan`: the casts of a plan, in the graph that it was made for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.errors import LoweringError
from amp_compiler.fx.graph import (
    CAST,
    neutral_dtype,
    node_tensor,
    refresh,
    replace_operand,
    tensor_operands,
    torch_dtype,
)
from amp_compiler.fx.meta import Key, source_of
from amp_compiler.fx.widen import write_back
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.dtypes import dtype_from_short
from amp_compiler.ir.plan import RETURN, PrecisionPlan
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class ApplyPlan(InPlacePass):
    """Insert the casts of a plan, and compute every node's fake tensor anew.

    A cast stands right before its first user, so that it lives no longer than it must.

    Before (plan: linear low)::

        linear: fp32[4, 8] = aten.linear.default(x, w)
        return linear

    After::

        to_dtype: bf16[4, 8] = aten.to.dtype(x, torch.bfloat16)  # cast
        to_dtype_1: bf16[8, 8] = aten.to.dtype(w, torch.bfloat16)  # cast
        linear: bf16[4, 8] = aten.linear.default(to_dtype, to_dtype_1)
        to_dtype_2: fp32[4, 8] = aten.to.dtype(linear, torch.float32)  # cast
        return to_dtype_2

    Running statistics that a norm reads through a cast and updates are written back by a `copy_` behind it.

    What the plan says of arithmetic and gradients is noted on the nodes, for `type_backward` and `widen_math`: `math`
    where a rule lets one compute in FP32, `backward=fp32` where one gives its gradients a type.

    Left alone: a graph whose plan casts nothing and says nothing of its nodes; casts that the model wrote itself, which
    the plan only lists; gradients where none will be asked for.

    Args:
        plan: the plan of this very graph.
        differentiable: whether gradients will be asked for.
    """

    plan: PrecisionPlan
    differentiable: bool = True
    exact: ClassVar[bool] = False

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place.

        Raises:
            LoweringError: the plan names a value or operand that the graph lacks, or a node does not come out in the
                type that the plan says.
        """
        graph = subject.graph
        by_name = {node.name: node for node in graph.nodes}
        order = {node: position for position, node in enumerate(graph.nodes)}
        inserted = False
        read: dict[fx.Node, None] = {}
        for cast in self.plan.casts:
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
                new.meta = source_of(source)
                new.meta[Key.PLACED] = f"{cast.value}: {cast.src} -> {cast.dst}"
            for node, name, index in users:
                read[_replace(node, name, index, new)] = None
            inserted = True
            if new is not source:
                for node, _, _ in users:
                    write_back(node, new, source)
        for node in read:
            if node.target is CAST and not node.users:  # a cast of the model's whose readers all read its source
                graph.erase_node(node)
        if inserted:
            refresh(subject)
        marked = _mark(graph, self.plan, self.differentiable)
        check_types(subject, self.plan)
        return PassResult(subject, inserted or marked)


def _mark(graph: fx.Graph, plan: PrecisionPlan, differentiable: bool) -> bool:
    """Note what the plan says of arithmetic and gradients on the nodes; whether it says anything."""
    planned = {node.name: node for node in plan.nodes if node.math or node.backward or node.backward_math}
    types = {"low": torch_dtype(dtype_from_short(plan.dtype)), "fp32": torch.float32}
    marked = False
    for node in graph.nodes if planned else ():
        verdict = planned.get(node.name) if node.op == "call_function" else None
        if verdict is None:
            continue
        in_fp8 = Fp8.parse(verdict.math) is not None  # whose gradients `scale_products` makes
        marks: dict[Key, Any] = {}
        if verdict.math == "fp32" and verdict.precision != "fp32":
            marks[Key.MATH] = verdict.math_rule
        if verdict.backward_math == "fp32" and differentiable and not in_fp8:
            marks[Key.BACKWARD_MATH] = verdict.math_rule
        if verdict.backward and differentiable:
            marks |= {Key.BACKWARD: types[verdict.backward], Key.BACKWARD_RULE: verdict.rule}
        node.meta.update(marks)
        marked |= bool(marks)
    return marked


def _find(by_name: dict[str, fx.Node], name: str) -> fx.Node:
    if name not in by_name:
        raise LoweringError(f"the plan casts '{name}', which the graph does not have", hint="plan this graph again")
    return by_name[name]


def _user(graph: fx.Graph, by_name: dict[str, fx.Node], name: str) -> fx.Node:
    return graph.output_node() if name == RETURN else _find(by_name, name)


def _replace(node: fx.Node, name: str, index: int, new: fx.Node) -> fx.Node:
    """Let an operand be `new`; returns what it was."""
    if name == RETURN:
        results: Any = node.args[0]
        returned = [
            place for place, item in enumerate(results) if isinstance(item, fx.Node) and node_tensor(item) is not None
        ]
        changed = list(results)
        old: fx.Node = changed[returned[index]]
        changed[returned[index]] = new
        node.args = (tuple(changed),)
        new.meta.setdefault("val", old.meta["val"])
        return old
    operands = tensor_operands(node)
    if index >= len(operands):
        raise LoweringError(
            f"the plan casts operand {index} of '{name}', which has {len(operands)} operands",
            hint="plan this graph again",
        )
    old = operands[index][2]
    new.meta.setdefault("val", old.meta["val"])  # keeps later operand indices valid until types are refreshed
    replace_operand(node, operands[index][1], new)
    return old


def check_types(graph_module: fx.GraphModule, plan: PrecisionPlan) -> None:
    """Check that every value has the type that the plan promises.

    Raises:
        LoweringError: at the first that has not.
    """
    by_name = {node.name: node for node in graph_module.graph.nodes}
    for planned in plan.nodes:
        for name, promised in planned.outputs:
            value = node_tensor(by_name[name]) if name in by_name else None
            if value is not None and neutral_dtype(value.dtype).short != promised:
                raise LoweringError(
                    f"node '{planned.name}' ({planned.op}) gives {neutral_dtype(value.dtype).short},"
                    f" the plan says {promised}",
                    where=planned.source,
                    hint=f"correct the entry of {planned.op} in rules/ops.yaml, which gives its result another type",
                )
