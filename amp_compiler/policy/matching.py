"""Which rule decides on a node: rules compiled so that a node costs little more than a few look-ups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amp_compiler.ir.graph import Node, PrecisionGraph
from amp_compiler.policy.rules import Condition, Context, Decision, Precision, Rule, RuleSet, View

Kind = tuple[str, str]  # op and part of a node
Candidate = tuple[Rule, tuple[Condition, ...]]  # with the conditions that must be asked of each node


@dataclass
class RuleMatcher:
    """The rules of a set, ready to be asked about the nodes of one graph.

    Args:
        rules: the rules and the op table.
        graph: the graph that the nodes are of.
        context: low type and device; rules for other ones never match.
        ranges: calibrated largest magnitude by value name.

    Attributes:
        by_kind_alone: by op and part, the decisions made so far that are those on every such node.

    Example:
        >>> from amp_compiler.ir.dtypes import DType
        >>> from amp_compiler.policy.loader import load_rules
        >>> matcher = RuleMatcher(load_rules("default"), PrecisionGraph(), Context(DType.FLOAT16))
        >>> matcher.decide(Node("y", "aten.linear", (), ())).precision
        <Precision.LOW: 'low'>
    """

    rules: RuleSet
    graph: PrecisionGraph
    context: Context
    ranges: Mapping[str, float] = field(default_factory=dict)
    _by_kind: dict[Kind, tuple[Candidate, ...]] = field(default_factory=dict, init=False, repr=False)
    _decisions: dict[tuple[Any, ...], Decision] = field(default_factory=dict, init=False, repr=False)
    by_kind_alone: dict[Kind, Decision] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.view = View(self.graph, self.rules.ops, self.ranges, frozenset(self.graph.outputs))

    def decide(self, node: Node) -> Decision | None:
        """What the rules say of `node`: the last match decides, and later ones may have refined its arithmetic.

        A rule with a precision replaces everything that earlier ones said; one without sets `math` and `backward` only.

        Returns:
            The decision, or `None` where no rule with a precision matches.
        """
        kind = (node.op, node.part)
        settled = self.by_kind_alone.get(kind)
        if settled is not None:
            return settled
        refined: list[Rule] = []
        alone = True
        for rule, conditions in self._candidates(kind, node):
            if conditions:
                alone = False
                if not all(condition.holds(node, self.view) for condition in conditions):
                    continue
            refined.append(rule)
            if rule.precision is not None:
                key = (node.op, *map(id, refined))  # what a decision is made of; most nodes share one with others
                if key not in self._decisions:
                    self._decisions[key] = self._merge(node, rule, refined)
                if alone:
                    self.by_kind_alone[kind] = self._decisions[key]
                return self._decisions[key]
        return None

    def matches(self, rule: Rule, node: Node) -> bool:
        """Whether all conditions of a rule hold for a node, whatever other rules say.

        Args:
            rule: the rule.
            node: the node.
        """
        return all(self.meets(condition, node) for condition in rule.match.conditions)

    def meets(self, condition: Condition, node: Node) -> bool:
        """Whether one condition holds for a node.

        Args:
            condition: the condition.
            node: the node.
        """
        info = self.rules.ops.info(node.op)
        return condition.possible(info, self.context) and condition.holds(node, self.view)

    def _merge(self, node: Node, rule: Rule, matched: list[Rule]) -> Decision:
        """The decision of `rule` with what later rules (`matched`, last first, ending in `rule`) refine."""
        reason = rule.why or default_reason(node.op, self.rules.ops.info(node.op).family, rule)
        refining = [later.where for later in reversed(matched[:-1])]
        if refining:
            reason += f"; arithmetic refined by {', '.join(refining)}"
        said = next((one for one in matched if one.math is not None), None)
        backward = next((one for one in matched if one.backward is not None), None)
        backward_math = next((one for one in matched if one.backward_math is not None), None)
        return Decision(
            precision=rule.precision or Precision.KEEP,
            rule=rule.where,
            reason=reason,
            math=None if said is None else said.math,
            backward=None if backward is None else backward.backward,
            backward_math=None if backward_math is None else backward_math.backward_math,
            refusal=rule.refusal,
            math_rule="" if said is None else said.where,
        )

    def _candidates(self, kind: Kind, node: Node) -> tuple[Candidate, ...]:
        """The rules that the op of a node, its family and part, the device and the low type leave, last first."""
        candidates = self._by_kind.get(kind)
        if candidates is None:
            info = self.rules.ops.info(node.op)
            candidates = tuple(
                (rule, tuple(one for one in rule.match.conditions if one.kind.holds and not one.kind.by_part))
                for rule in reversed(self.rules.rules)
                if all(
                    one.possible(info, self.context) and (not one.kind.by_part or one.holds(node, self.view))
                    for one in rule.match.conditions
                )
            )
            self._by_kind[kind] = candidates
        return candidates


def default_reason(op: str, family: str, rule: Rule) -> str:
    """The reason where the author of a rule gave none.

    Example:
        >>> from amp_compiler.policy.matchers import MATCHERS
        >>> from amp_compiler.policy.rules import Matcher
        >>> rule = Rule("my.yaml:3", Matcher((Condition(MATCHERS["family"], ("matmul",)),)), Precision.LOW)
        >>> default_reason("aten.linear", "matmul", rule)
        'the rule lets the family matmul run in the low type'
    """
    action = {
        Precision.LOW: "run in the low type",
        Precision.FP32: "run in FP32",
        Precision.WIDEST: "run in the widest type of its inputs",
        Precision.BETWEEN: "run in the low type between nodes that do",
        Precision.FOLLOW: "run in whichever type costs least traffic",
        Precision.KEEP: "stay as it was captured",
    }[rule.precision or Precision.KEEP]
    subject = f"the family {family}" if rule.match.get("family") else (op if rule.match.get("op") else "the node")
    return f"the rule lets {subject} {action}"
