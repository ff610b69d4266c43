"""Rules for the nodes that were found, as a file: by op or module where that names no other node, else by node."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.policy.loader import load_rules, preset_names
from amp_compiler.policy.rules import Condition, Matcher, Precision, Rule, RuleSet, View
from amp_compiler.policy.sources import FROM_DICT

LOW, FP32 = "low", "fp32"
_SHOWN = 8  # nodes of one rule beside which stands what was measured
_GLOB = re.compile(r"[*?\[\]]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_FIXED = ("factory", "cast", "random", "control", "sparse", "quantization")  # families that no type is chosen for


@dataclass(frozen=True)
class _Chosen(Condition):
    """The node is one of these. No rule file has it: thousands of names are looked up at once."""

    names: frozenset[str]
    key: ClassVar[str] = "chosen"
    about: ClassVar[str] = "one of some nodes"
    form: ClassVar[Any] = None

    @property
    def given(self) -> Any:
        """The names."""
        return tuple(sorted(self.names))

    def holds(self, node: Any, view: View) -> bool:
        """By its name."""
        return node.name in self.names


def all_fp32(plan: PrecisionPlan) -> list[dict[str, Any]]:
    """Rules by which nothing is low that is not named behind them, and what has to keep its type keeps it.

    Args:
        plan: says which families there are.
    """
    fixed = [family for family in _FIXED if any(node.family == family for node in plan.nodes)]
    rules: list[dict[str, Any]] = [{"match": {}, "precision": FP32, "why": "what is not named below stays in FP32"}]
    why = "its type is fixed by the model or by what it works on"
    return [*rules, *([{"match": {"family": fixed}, "precision": "keep", "why": why}] if fixed else [])]


def with_chosen(
    rules: RuleSet, chosen: frozenset[str], *, above: PrecisionPlan | None = None, in_fp8: bool = False
) -> RuleSet:
    """Rules with some nodes kept in FP32, for a trial.

    Args:
        rules: what they are added to.
        chosen: the nodes.
        above: the plan that the rules make, where all is to be FP32 but the chosen nodes, which are put low.
        in_fp8: whether the chosen nodes are kept in 16 bits, out of FP8.
    """
    first = () if above is None else load_rules({"version": 1, "rules": all_fp32(above)}).rules
    precision = Precision.FP32 if above is None and not in_fp8 else Precision.LOW
    own = Rule("<tune>", Matcher((_Chosen(chosen),)), precision, own=True)
    return replace(rules, rules=(*rules.rules, *first, *([own] if chosen else [])))


@dataclass(frozen=True)
class Entry:
    """One rule.

    Args:
        match: its conditions.
        nodes: the nodes that it is for.
    """

    match: dict[str, str]
    nodes: tuple[str, ...]


def entries_for(plan: PrecisionPlan, chosen: Sequence[str], *, by_name: bool = False) -> list[Entry]:
    """Rules that match some nodes of a plan and no other one, as general as that allows.

    Args:
        plan: the plan.
        chosen: the nodes.
        by_name: one for each node, by its name.
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
        entry = Entry(_by_name(node), (node.name,))
        for match in () if by_name else _general(node):
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


def _by_name(node: PlannedNode) -> dict[str, str]:
    return {"node": f"^{re.escape(node.name)}$"}


def _holds(match: Mapping[str, str], node: PlannedNode) -> bool:
    """Whether a node of the same op is in the modules that are matched."""
    glob = match.get("module")
    return glob is None or re.fullmatch(re.escape(glob).replace(r"\*", ".*"), node.module) is not None


@dataclass(frozen=True)
class Base:
    """What the written rules stand on.

    Args:
        name: a preset's name or a path; `FROM_DICT` for rules that came as a dict.
        data: that dict, where it is known.
    """

    name: str
    data: Mapping[str, Any] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it cannot be extended: rules of a dict that is not at hand."""
        return self.name == FROM_DICT and self.data is None

    def head(self, folder: Path | None) -> list[str]:
        """The lines up to the first rule of ours, `rules:` among them."""
        if self.name != FROM_DICT:
            return ["version: 1", f"extends: {_extended(self.name, folder)}", "rules:"]
        if self.data is None:
            return ["# put these behind the rules of the dict", "rules:"]
        fields = {key: json.dumps(value, ensure_ascii=False) for key, value in self.data.items() if key != "rules"}
        if self.data.get("extends") is not None:
            fields["extends"] = _extended(str(self.data["extends"]), folder)
        rules = self.data.get("rules") or []
        lines = [*(f"{key}: {value}" for key, value in fields.items()), "rules:"]
        return lines + [f"  - {json.dumps(rule, ensure_ascii=False)}" for rule in rules]


def _extended(name: str, folder: Path | None) -> str:
    """What stands behind `extends:` in a file in a folder; paths are absolute where that is `None`."""
    if name in preset_names():
        return name
    path = Path(name).resolve()
    if folder is None:
        return json.dumps(str(path))
    near = Path(os.path.relpath(path, folder.resolve())).as_posix()
    return json.dumps(near if "/" in near else f"./{near}")


def rules_file(
    base: Base,
    entries: Sequence[Entry],
    reasons: Mapping[str, str],
    head: Sequence[str],
    tolerance: float,
    folder: Path | None,
    above: PrecisionPlan | None = None,
    in_fp8: bool = False,
) -> str:
    """A rule file in YAML with comments.

    Args:
        base: what it extends.
        entries: the rules.
        reasons: what was measured, by node.
        head: what there is to say of all, in lines.
        tolerance: what the reason names that plans give.
        folder: where the file will be; `None` where it will be nowhere, so that paths are absolute.
        above: the plan of what is extended, where all is to be FP32 but what the entries put low.
        in_fp8: whether the entries keep FP8 products in 16 bits.
    """
    why = f"amp.tune: {'needed for' if above is None else 'allowed by'} the tolerance {tolerance:g}"
    lines = [*(f"# {line}" for line in head), *base.head(folder)]
    lines += [] if above is None else [f"  - {json.dumps(rule)}" for rule in all_fp32(above)]
    if lines[-1] == "rules:" and not entries:
        lines.pop()  # nothing has to be kept
    for entry in entries:
        match = ", ".join(f"{key}: {json.dumps(value)}" for key, value in entry.match.items())
        for name in entry.nodes[:_SHOWN]:
            lines.append(f"  # {name}: {reasons[name]}" if reasons.get(name) else f"  # {name}")
        if len(entry.nodes) > _SHOWN:
            lines.append(f"  # and {len(entry.nodes) - _SHOWN} more")
        precision = FP32 if above is None and not in_fp8 else LOW
        lines += [f"  - match: {{{match}}}", f"    precision: {precision}", f"    why: {json.dumps(why)}"]
    return "\n".join([*lines, ""])
