"""Rules of the user's own that match no node of a model: which, why, and what they may have meant."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from amp_compiler.ir.plan import UnusedRule
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Condition, Rule

logger = logging.getLogger("amp_compiler")
_SIGNS = re.compile(r"[\^$\\*?\[\]()]")  # of globs and regular expressions


def unused_rules(matcher: RuleMatcher) -> tuple[UnusedRule, ...]:
    """The rules that match no node of the matcher's graph, in the order in which they are read.

    Rules of presets are general by intent and never told; nor is a rule for another device or low type than the one
    that is planned for. A rule that matches and is overruled, by a later one or by the model itself, is used.

    Args:
        matcher: the rules and the graph.
    """
    unmatched = [rule for rule in matcher.rules.rules if rule.own and _is_for(rule, matcher)]
    by_op: dict[str, list[Rule]] = {}
    for node in matcher.graph.nodes.values():
        if not unmatched:
            break
        waiting = by_op.get(node.op)
        if waiting is None:
            info = matcher.rules.ops.info(node.op)
            waiting = by_op[node.op] = [
                rule for rule in unmatched if all(c.possible(info, matcher.context) for c in rule.match.conditions)
            ]
        matched = [rule for rule in waiting if all(c.holds(node, matcher.view) for c in rule.match.conditions)]
        for rule in matched:
            for rules in (unmatched, *by_op.values()):
                rules[:] = [other for other in rules if other is not rule]
    return tuple(_describe(rule, matcher) for rule in unmatched)


def warn_of_unused(rules: Sequence[UnusedRule], what: str) -> None:
    """Say in one warning of the logger `amp_compiler` which rules match nothing; nothing where there are none.

    Args:
        rules: `plan.unused_rules`.
        what: the model, as it is to be called in the warning.
    """
    if rules:
        one = "a rule matches" if len(rules) == 1 else f"{len(rules)} rules match"
        logger.warning("%s no node of %s: %s", one, what, "; ".join(str(rule) for rule in rules))


def _is_for(rule: Rule, matcher: RuleMatcher) -> bool:
    """Whether a rule is for the device and the low type that are planned for."""
    anything = matcher.rules.ops.info("")
    return all(c.possible(anything, matcher.context) for c in rule.match.conditions if c.kind.contextual)


def _describe(rule: Rule, matcher: RuleMatcher) -> UnusedRule:
    nodes = list(matcher.graph.nodes.values())
    conditions = [condition for condition in rule.match.conditions if not condition.kind.contextual]
    for condition in conditions:
        if not any(matcher.meets(condition, node) for node in nodes):
            field = condition.kind.name_of
            names = dict.fromkeys(getattr(node, field) for node in nodes if field)
            return UnusedRule(rule.where, rule.text, condition.kind.key, _nearest(condition, names))
    if not nodes:
        return UnusedRule(rule.where, rule.text)
    # Each condition is met somewhere, but not all of them by one node: the first that meets most comes nearest.
    best = max(nodes, key=lambda node: sum(matcher.meets(condition, node) for condition in conditions))
    return UnusedRule(rule.where, rule.text, nearest=best.name)


def _part(name: str, glob: str, depth: int) -> str:
    """What of a name a glob speaks of: its end after a leading `*`, its beginning before another one."""
    parts = name.split(".")
    if glob.startswith("*"):
        return ".".join(parts[-depth:])
    return ".".join(parts[:depth]) if "*" in glob else name


def _nearest(condition: Condition, names: Iterable[str]) -> str:
    """The name that is most like what a condition asks for; empty where it is compared with no names."""
    nearest, most = "", 0.0
    known = [name for name in names if name]
    for pattern in condition.wanted if known else ():
        text = pattern if isinstance(pattern, str) else pattern.pattern
        plain = re.sub(r"\.+", ".", _SIGNS.sub("", text)).strip(".")
        alike = SequenceMatcher(None, b=plain, autojunk=False)
        for name in known:
            alike.set_seq1(_part(name, text, plain.count(".") + 1))
            if alike.real_quick_ratio() > most and alike.quick_ratio() > most and alike.ratio() > most:
                nearest, most = name, alike.ratio()
    return nearest
