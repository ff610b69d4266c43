"""Which nodes of a plan have to run in FP32 for all to stay finite: a search that tries every answer, and its rules.

Rounding to 16 bits spoils a value in two ways: it is too large for the type where it is rounded, or what made it zero
or coarse lies further up (the logarithm of a softmax that has underflowed). So FP32 spreads from the node that broke:
to those that read a value that does not fit, to those that made one that is too small, and in the backward to those
whose gradient it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amp_compiler.errors import AmpError, first_line
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.nonfinite import INPUT, NonfiniteNode
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rule_text import head_lines, rule_lines
from amp_compiler.policy.rules import Precision, RuleSet

MOST_TRIALS = 8
MOST_NODES = 16
_FP32 = Precision.FP32.value
_FOLLOWING = {Precision.WIDEST.value, Precision.FOLLOW.value}
_UP = 4  # FP32 nodes between a node that broke and the one whose rounding is to blame
_SUBGRAPH = re.compile(r"^graph\d+/")
_GLOB = re.compile(r"[*?\[\]]")


@dataclass(frozen=True)
class Trial:
    """What one run showed.

    Args:
        plan: what was run.
        nodes: the first that made something infinite or NaN of finite values, in execution order; empty where loss and
            gradients, or the outputs, are finite.
    """

    plan: PrecisionPlan
    nodes: tuple[NonfiniteNode, ...]


@dataclass(frozen=True)
class Cure:
    """What fixes a run that was not finite.

    Args:
        rule: rules in YAML that were seen to fix it; empty where no rule does.
        message: in a sentence, what fixes it or why no rule does.
    """

    rule: str = ""
    message: str = ""


def find_cure(rules: RuleSet, first: Trial, attempt: Callable[[RuleSet], Trial]) -> Cure:
    """Search the nodes that FP32 fixes, a few of them or none.

    Args:
        rules: those of the run that broke.
        first: that run.
        attempt: runs the same with other rules.
    """
    try:
        return _Search(rules, first, attempt).run()
    except (AmpError, RuntimeError) as error:  # a trial of other types may find no kernel, or memory may not do
        return Cure(message=f"no rule was found: {first_line(error)}")


def spoilt_inputs(nodes: Sequence[NonfiniteNode], names: Mapping[str, str]) -> Cure | None:
    """What to say where inputs are not finite themselves; `None` where they are.

    Args:
        nodes: the first that are bad.
        names: what each input is, in words.
    """
    bad = [node for node in nodes if node.op == INPUT and not node.rounding]
    if not bad:
        return None
    held = "; ".join(
        f"{names.get(one.name, one.name)} holds {one.output.spoilt if one.output is not None else 'inf or NaN'}"
        for one in bad
    )
    return Cure(message=f"{held}: no precision fixes that")


class _Search:
    def __init__(self, rules: RuleSet, first: Trial, attempt: Callable[[RuleSet], Trial]) -> None:
        self.rules, self.first, self.attempt = rules, first, attempt
        self.why: dict[str, str] = {}  # the nodes that are to be FP32, and why

    def run(self) -> Cure:
        """Let FP32 spread from trial to trial."""
        trial = self.first
        for number in range(MOST_TRIALS):
            more = self._more(trial)
            if not more or len(self.why) + len(more) > MOST_NODES:
                break
            self.why |= more
            trial = self._tried(self._entries())
            if not trial.nodes:
                return self._cure()
            if number == 0 and self._tried([_entry({}, "")]).nodes:
                return Cure(message="FP32 makes it too: no rule fixes it, the model or its data have to")
        everywhere = "with FP32 everywhere it is finite" if self.why else "the plan rounds nothing there"
        return Cure(message=f"no rule for {MOST_NODES} nodes or fewer was found that fixes it; {everywhere}")

    def _cure(self) -> Cure:
        self._leave_out_followers()
        several = len(self.why) > 1
        text = f"{len(self.why)} node{'s' * several} in FP32 fix{'es' * (not several)} it"
        outcome = "it is not" if all(map(_is_lost, self.first.nodes)) else "it is finite"
        return Cure(rules_text(self.rules, self._entries()), f"{text}: run again with these rules {outcome}")

    def _leave_out_followers(self) -> None:
        """Name no node that goes with its neighbours, a view say, where it does so by itself."""
        requested = {node.name: node.requested for node in self.first.plan.nodes}
        fewer = {name: why for name, why in self.why.items() if requested[name] not in _FOLLOWING}
        if fewer and len(fewer) < len(self.why):
            self.why, all_of_them = fewer, self.why
            if self._tried(self._entries()).nodes:
                self.why = all_of_them

    def _tried(self, entries: Sequence[Mapping[str, Any]]) -> Trial:
        return self.attempt(extended(self.rules, entries))

    def _entries(self) -> list[dict[str, Any]]:
        """One for each node, or for several of one op in one module."""
        entries: dict[str, dict[str, Any]] = {}
        for node in self.first.plan.nodes:
            if node.name in self.why:
                match = match_of(node, self.first.plan.nodes, self.why)
                entries.setdefault(json.dumps(match), _entry(match, self.why[node.name]))
        return list(entries.values())

    def _more(self, trial: Trial) -> dict[str, str]:
        """The nodes that FP32 has to spread to, with the reasons."""
        more: dict[str, str] = {}
        near = _Near(trial.plan, self.why)
        forward = [one for one in trial.nodes if one.phase == "forward"]
        for one in forward or trial.nodes:  # what the backward makes of a forward that is finite is seen then
            backward = one.phase == "backward"
            what = "lost in zeros" if _is_lost(one) else "not finite"
            own = f"{'its gradient is ' if backward else ''}{what}: {one.seen}"
            shown = one.parameter or one.planned
            beside = f"{'the gradient at ' if backward else ''}{shown} beside it is {what}: {one.seen}"
            for name in near.to_blame(one):
                more.setdefault(name, own if name == one.planned else beside)
        return more


def _is_lost(one: NonfiniteNode) -> bool:
    return one.output is not None and one.output.is_zero


class _Near:
    """The surroundings of a node in a plan.

    Args:
        plan: the plan of a trial.
        taken: nodes that a rule keeps in FP32 already.
    """

    def __init__(self, plan: PrecisionPlan, taken: Iterable[str]) -> None:
        self._nodes = {node.name: node for node in plan.nodes}
        self._makers = {value: node for node in plan.nodes for value, _ in node.outputs}
        self._casts, self._taken = plan.casts, set(taken)

    def to_blame(self, one: NonfiniteNode) -> list[str]:
        """The nodes to try in FP32 next; empty where there is none."""
        node = self._nodes.get(one.planned)
        if node is None:  # an input that was rounded
            return self._readers({one.planned})
        if self._is_open(node):
            return [node.name]
        values = {value for value, _ in node.outputs}
        if one.rounding and one.phase == "forward":
            return self._readers(values) or self._makers_above(node)
        return self._makers_above(node) or self._readers(values)

    def _is_open(self, node: PlannedNode) -> bool:
        return node.precision != _FP32 and node.name not in self._taken

    def _readers(self, values: set[str]) -> list[str]:
        """Those that read these values rounded."""
        users = [name for cast in self._casts if cast.value in values and cast.dst != _FP32 for name, _ in cast.users]
        return [name for name in dict.fromkeys(users) if name in self._nodes and self._is_open(self._nodes[name])]

    def _makers_above(self, node: PlannedNode) -> list[str]:
        """The nearest nodes further up that round."""
        matches: dict[str, None] = {}
        level = [node]
        for _ in range(_UP):
            makers = {m.name: m for one in level for value in one.inputs if (m := self._makers.get(value)) is not None}
            matches |= {name: None for name, maker in makers.items() if self._is_open(maker)}
            level = [maker for name, maker in makers.items() if name not in matches]
        return list(matches)


def match_of(node: PlannedNode, nodes: Iterable[PlannedNode], chosen: Iterable[str]) -> dict[str, str]:
    """What matches a node: its module and op, where that is no other node than those chosen; else its name.

    Args:
        node: the node.
        nodes: all that there are, at least those of its op.
        chosen: names of the nodes that may be matched.
    """
    alike = {one.name for one in nodes if (one.module, one.op) == (node.module, node.op)}
    if node.module and not _GLOB.search(node.module) and alike <= set(chosen):
        return {"module": node.module, "op": node.op}
    return {"node": f"^{re.escape(_SUBGRAPH.sub('', node.name))}$"}


def _entry(match: Mapping[str, str], why: str) -> dict[str, Any]:
    return {"match": dict(match), "precision": _FP32, **({"why": why} if why else {})}


def with_present_scales(plan: PrecisionPlan, why: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rules by which some FP8 products scale by what their operands are, and no longer by what they were before.

    Args:
        plan: says how they are computed.
        why: the reasons, by node.
    """

    def present(math: str) -> Any:
        way = Fp8.parse(math)
        if way is None:
            return math
        return (replace(way, scaling="tensorwise", history=0) if way.history else way).words

    entries: dict[str, dict[str, Any]] = {}
    for node in plan.nodes:
        if node.name in why:
            match = match_of(node, plan.nodes, why)
            backward = {"backward": {"math": present(node.backward_math)}} if node.backward_math else {}
            said = {"match": match, "precision": "low", "math": present(node.math), **backward, "why": why[node.name]}
            entries.setdefault(json.dumps(match), said)
    return list(entries.values())


def extended(rules: RuleSet, entries: Sequence[Mapping[str, Any]]) -> RuleSet:
    """Rules with more of them behind.

    Args:
        rules: what is extended.
        entries: as they stand under `rules:` in a file.
    """
    more = load_rules({"version": 1, "rules": list(entries)}).rules
    return replace(rules, rules=(*rules.rules, *more))


def rules_text(rules: RuleSet, entries: Sequence[Mapping[str, Any]]) -> str:
    """A rule file in YAML that extends other rules.

    Args:
        rules: what is extended. Rules that came as a dict have no name that a file could extend: the text is what to
            put behind theirs.
        entries: as they stand under `rules:`.

    Example:
        >>> entry = {"match": {"module": "head", "op": "aten.linear"}, "precision": "fp32", "why": "logits overflow"}
        >>> print(rules_text(load_rules("default"), [entry]), end="")
        version: 1
        extends: default
        rules:
          - match: {module: "head", op: "aten.linear"}
            precision: fp32
            why: "logits overflow"
    """
    lines = [line for entry in entries for line in rule_lines(**entry)]
    return "\n".join([*head_lines(rules.name), *lines, ""])
