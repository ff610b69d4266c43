"""`Draft`: a plan in the making, handed from one neutral pass to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import PrecisionGraph
from amp_compiler.ir.graph_text import format_graph
from amp_compiler.ir.plan import PlannedCast
from amp_compiler.planner.typing import TypingRules
from amp_compiler.policy.rules import Context, Decision, RuleSet


@dataclass(frozen=True)
class Draft:
    """What is known so far.

    Args:
        graph: the captured graph; a pass that pins nodes of it hands on a copy.
        rules: the rules.
        context: low type and device.
        ranges: calibrated largest magnitude by value name; empty without calibration.
        decisions: by node name, from `classify`.
        labels: by node name, from `assign_precision`: `low`, `fp32` or `keep`.
        notes: by node name, from `assign_precision`: how `widest`, `follow` or an obstacle came to the label.
        casts: from `place_casts`; `None` before it ran.
    """

    graph: PrecisionGraph
    rules: RuleSet
    context: Context
    ranges: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    casts: tuple[PlannedCast, ...] | None = None
    _typing: TypingRules | None = field(default=None, compare=False, repr=False)
    _types: tuple[Mapping[str, str], TypingRules, dict[str, DType]] | None = field(
        default=None, compare=False, repr=False
    )

    def to_text(self) -> str:
        """What was found out last: the graph with its pins, then a line a node or cast: decisions, labels, casts."""
        if self.casts is not None:
            return "".join(f"{cast}\n" for cast in self.casts) or "no casts\n"
        if self.labels:
            notes = {name: f"  ({note})" for name, note in self.notes.items() if note}
            return "".join([f"{label} {name}{notes.get(name, '')}\n" for name, label in self.labels.items()])
        if not self.decisions:
            return format_graph(self.graph)
        return "".join([f"{name}: {decision}\n" for name, decision in self.decisions.items()])

    def state(self, *, kept: bool = True) -> tuple[object, ...]:
        """What `to_text` is made of, by which two states of a draft are compared.

        Args:
            kept: it stays as it is, whatever becomes of the draft; else it is to be compared at once.
        """
        held = (self.labels, self.decisions, self.notes, self.graph.nodes, self.graph.masks)  # what differs comes first
        return (self.casts, *(dict(one) if kept and isinstance(one, dict) else one for one in held))

    @property
    def typing(self) -> TypingRules:
        """The typing rules of the graph, made once and handed on to the drafts that follow."""
        known = self._typing
        if known is None or not known.fits(self.graph, self.rules.ops, self.context.low):
            known = TypingRules(self.graph, self.rules.ops, self.context.low)
            object.__setattr__(self, "_typing", known)
        return known

    @property
    def types(self) -> Mapping[str, DType]:
        """The type of each value under the labels, worked out once and handed on to the drafts that follow."""
        known, typing = self._types, self.typing
        if known is None or known[0] is not self.labels or known[1] is not typing:
            known = (self.labels, typing, typing.results(self.labels))
            object.__setattr__(self, "_types", known)
        return known[2]
