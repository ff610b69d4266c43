"""Rules for the nodes that were found, as a file: by op or module where that names no other node, else by node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.policy.rule_text import rule_lines
from amp_compiler.policy.rules import Condition, Kind, Matcher, Precision, Rule, RuleSet

_SHOWN = 8  # nodes of one rule beside which stands what was measured
_GLOB = re.compile(r"[*?\[\]]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


# No rule file has it: thousands of names are looked up at once.
_CHOSEN = Kind("chosen", "one of some nodes", None, holds=lambda names, node, view: node.name in names)


def with_chosen(rules: RuleSet, chosen: frozenset[str], precision: Precision) -> RuleSet:
    """Rules with some nodes kept in FP32, or FP8 products in 16 bits, for a trial.

    Args:
        rules: what they are added to.
        chosen: the nodes.
        precision: that they are to have.
    """
    own = Rule("<tune>", Matcher((Condition(_CHOSEN, chosen),)), precision, own=True)
    return replace(rules, rules=(*rules.rules, *([own] if chosen else [])))


@dataclass(frozen=True)
class Entry:
    """One rule.

    Args:
        match: its conditions.
        nodes: the nodes that it is for.
    """

    match: dict[str, str]
    nodes: tuple[str, ...]


def entries_for(plan: PrecisionPlan, chosen: Sequence[str]) -> list[Entry]:
    """Rules that match some nodes of a plan and no other one, as general as that allows.

    Args:
        plan: the plan.
        chosen: the nodes.
    """
    wanted = set(chosen)
    by_op: dict[str, list[PlannedNode]] = {}
    for node in plan.nodes:
        by_op.setdefault(node.op, []).append(node)
    done: set[str] = set()
    entries: list[Entry] = []
    for node in plan.nodes:
        if node.name not in wanted or node.name in done:
            continue
        entry = Entry({"node": f"^{re.escape(node.name)}$"}, (node.name,))
        for match in _general(node):
            matched = [other for other in by_op[node.op] if _holds(match, other)]
            modules = {other.module for other in matched}
            several = len(modules) > 1 or (modules == {""} and len(matched) > 1)
            if all(other.name in wanted for other in matched) and (several or "module" in match):
                entry = Entry(match, tuple(other.name for other in matched))
                break
        done.update(entry.nodes)
        entries.append(entry)
    return entries


def _general(node: PlannedNode) -> list[dict[str, str]]:
    """Conditions that the node meets, the most general first: its op anywhere, in modules like its own, in its own."""
    forms = [{"op": node.op}]
    if node.module and not _GLOB.search(node.module):
        alike = _NUMBER.sub("*", node.module)
        forms += [{"module": alike, "op": node.op}] if alike != node.module else []
        forms.append({"module": node.module, "op": node.op})
    return forms


def _holds(match: Mapping[str, str], node: PlannedNode) -> bool:
    """Whether a node of the same op is in the modules that are matched."""
    glob = match.get("module")
    return glob is None or re.fullmatch(re.escape(glob).replace(r"\*", ".*"), node.module) is not None


def rules_file(
    base: Sequence[str],
    entries: Sequence[Entry],
    reasons: Mapping[str, str],
    head: Sequence[str],
    tolerance: float,
    precision: Precision,
) -> str:
    """A rule file in YAML with comments.

    Args:
        base: the lines of what it extends, see `policy.rule_text.head_lines`.
        entries: the rules.
        reasons: what was measured, by node.
        head: what there is to say of all, in lines.
        tolerance: what the reason names that plans give.
        precision: that the entries ask for.
    """
    lines = [*(f"# {line}" for line in head), *base]
    if lines[-1] == "rules:" and not entries:
        lines.pop()  # nothing has to be kept
    for entry in entries:
        for name in entry.nodes[:_SHOWN]:
            lines.append(f"  # {name}: {reasons[name]}" if reasons.get(name) else f"  # {name}")
        if len(entry.nodes) > _SHOWN:
            lines.append(f"  # and {len(entry.nodes) - _SHOWN} more")
        lines += rule_lines(entry.match, precision.value, why=f"amp.tune: needed for the tolerance {tolerance:g}")
    return "\n".join([*lines, ""])
