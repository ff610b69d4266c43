"""`assign_precision`: from what the rules ask to one label a node."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.planner.cut import solve_follow
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.fixed_labels import resolve
from amp_compiler.planner.free_nodes import FollowProblem
from amp_compiler.planner.typing import KEEP, LABELS


@dataclass(frozen=True)
class AssignPrecision(FunctionalPass[Draft]):
    """Label every node `low`, `fp32` or `keep`; where the rules leave it free, by least memory traffic.

    Traffic is the casts (a value is cast at most once to each type in each region) and what free nodes themselves read
    and write. The labels of all free nodes together are the optimum, found by a minimum cut for each connected group of
    them. Where costs tie, `low` wins, which puts a downcast early and an upcast late. An op that rounding commutes with
    (`exact`) runs low on FP32 data only where everything that reads it is low, so that no FP32 reader sees a rounded
    value. `widest` comes to `low` where all data operands are semantically low: in a torch graph only rules and the
    model decide that, never the costs. In a file it is free behind a free node, whose result may be FP32 by then; a
    cast costs the start of a node there, beside its bytes.

    One thing is settled ahead: an op that takes mixed types, and gets only low operands while labelled `fp32`, needs
    one of them cast. Which one counts is chosen before the cut (the cheapest), and costs are optimal under that choice.

    Before, with the rules linear: low, relu: follow (exact), layer_norm: fp32:

        y = aten.linear(input=x, weight=w) -> fp32[2, 8]
        z = aten.relu(self=y) -> fp32[2, 8]
        n = aten.layer_norm(input=z) -> fp32[2, 8]

    After: y low, z low (the upcast of z costs as much as one of y, and relu moves half the bytes), n fp32. And where
    layer_norm reads `y` too, one upcast of `y` serves both: z becomes fp32 if that saves more than its low reads do.

    Not changed: nodes with the pin `keep` or `cast`; nodes with no operand that could be cast; memory that is changed
    in place and whose writers do not agree on a type.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def requires(self, subject: Draft) -> str | None:
        """Every node has a decision."""
        if subject.graph.nodes.keys() <= subject.decisions.keys():
            return None
        return f"node '{next(name for name in subject.graph.nodes if name not in subject.decisions)}' has no decision"

    def ensures(self, subject: Draft, remembered: Any) -> str | None:
        """Every node has a label, and nodes that cannot be moved have `keep`."""
        if list(subject.labels) != list(subject.graph.nodes):
            return "the labels are not those of the graph's nodes in execution order"
        for (name, label), typing in zip(subject.labels.items(), subject.typing.nodes.values(), strict=True):
            if label not in LABELS:
                return f"node '{name}' has the unknown label '{label}'"
            if label != KEEP and not (typing.movable or typing.joins):
                return f"node '{name}' has the label '{label}' and cannot be moved"
        return None

    def run(self, subject: Draft) -> PassResult[Draft]:
        """Fill `labels` and `notes`."""
        typing = subject.typing
        semantics = resolve(subject, typing)
        problem = FollowProblem(typing, semantics)
        labels = solve_follow(problem)
        notes = {**semantics.notes, **problem.notes}
        if labels == subject.labels and notes == subject.notes:
            return PassResult(subject, False)
        return PassResult(replace(subject, labels=labels, notes=notes, casts=None), True)
