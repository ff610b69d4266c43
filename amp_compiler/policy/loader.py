"""Rule files: YAML, or the same as a Python dict, to a `policy.RuleSet`. The language is told in `rules/README.md`."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from amp_compiler.errors import RuleError
from amp_compiler.ir.dtypes import LOW_TYPES, DType, dtype_from_short
from amp_compiler.policy.op_table import NAMESPACES, op_table
from amp_compiler.policy.rules import Comparison, Matcher, OpTable, Precision, Rule, RuleSet
from amp_compiler.policy.schema import PRECISIONS, MatchModel, RuleFileModel, RuleModel
from amp_compiler.policy.schema import schema as schema
from amp_compiler.policy.sources import (
    Keys,
    Mark,
    Source,
    from_dict,
    from_path,
    from_preset,
    looks_like_path,
    nearest,
    validate,
)
from amp_compiler.policy.sources import preset_names as preset_names

MAX_CHAIN = 16  # files that may extend one another
_ALIASES = {"whitelist": "allow", "blacklist": "deny"}
_GLOB = re.compile(r"[*?\[]")
_OR_PATH = "or give the path of a .yaml file"


def load_rules(rules: str | Path | dict[str, Any] | RuleSet = "default") -> RuleSet:
    """Read rules.

    Args:
        rules: name of a built-in preset, path of a YAML file, the contents of one as a dict, or a `RuleSet`, which is
            given back as it is. A relative `extends` in a dict is relative to the working directory.

    Returns:
        The rules of the extended files and of this one, in the order in which they are read.

    Raises:
        RuleError: anything is wrong with them; file, line, column and key say where, and the text says the mend.

    Example:
        >>> load_rules({"version": 1, "extends": "default", "deny": ["softmax"]}).name
        '<dict>'
    """
    if isinstance(rules, RuleSet):
        return rules
    if isinstance(rules, Mapping):
        return _load(from_dict(rules), ())
    if isinstance(rules, Path):
        return _load(from_path(rules), ())
    if not isinstance(rules, str):
        kind = type(rules).__name__
        raise RuleError(f"rules cannot be of type {kind}", mend="give a preset name, a path, a dict or a RuleSet")
    if rules in preset_names():
        known = _load_preset(rules)
        return replace(known, loss_scale=dict(known.loss_scale), weights=dict(known.weights))
    if "\n" in rules:
        raise RuleError("this looks like the text of a rule file", mend="write it to a file, or give it as a dict")
    if looks_like_path(rules):
        return _load(from_path(Path(rules)), ())
    raise RuleError(f"there is no preset '{rules}'", mend=nearest(rules, preset_names(), _OR_PATH))


@functools.cache
def _load_preset(name: str) -> RuleSet:
    return _load(from_preset(name), ())


def _load(source: Source, chain: tuple[Source, ...]) -> RuleSet:
    """Check one file, load what it extends (`chain` led here), and put the rules of both in order."""
    model = validate(source)
    table = op_table()
    base = None if model.extends is None else _load_extended(model.extends, source, (*chain, source))
    own = [_rule(rule, source, ("rules", index), table) for index, rule in enumerate(model.rules or [])]
    return RuleSet(
        name=source.name,
        rules=(*(base.rules if base is not None else ()), *_list_rules(model, source, table), *own),
        ops=table,
        loss_scale=_loss_scale(model, source, base),
        weights={**(base.weights if base is not None else {}), **_given(model.weights)},
    )


def _load_extended(wanted: str, source: Source, chain: tuple[Source, ...]) -> RuleSet:
    mark = source.mark(("extends",))
    if wanted in preset_names():
        found = from_preset(wanted)
    elif looks_like_path(wanted):
        found = from_path(source.folder / wanted, mark)
    else:
        raise mark.error(f"there is no preset '{wanted}'", nearest(wanted, preset_names(), _OR_PATH))
    told = " -> ".join(link.shown for link in (*chain, found))
    if found.identity in {link.identity for link in chain}:
        raise mark.error(f"the files extend each other in a circle: {told}", "remove one 'extends'")
    if len(chain) >= MAX_CHAIN:
        raise mark.error(f"more than {MAX_CHAIN} files extend one another: {told}", "join some of them")
    return _load(found, chain)


def _given(model: Any) -> dict[str, Any]:
    """The keys of a section that the file gives, a null counting as not given."""
    return {} if model is None else model.model_dump(exclude_none=True)


def _loss_scale(model: RuleFileModel, source: Source, base: RuleSet | None) -> dict[str, object]:
    """The section merged over the extended file's, whose keys hold for its own mode only."""
    own = _given(model.loss_scale)
    inherited = dict(base.loss_scale) if base is not None else {}
    if "mode" in own and own["mode"] != inherited.get("mode"):
        inherited = {}
    merged = {**inherited, **own}
    if {"min", "max"} <= set(merged) and merged["min"] > merged["max"]:
        raise source.mark(("loss_scale",)).error("the loss scale's 'min' is above its 'max'", "exchange them")
    return merged


def _list_rules(model: RuleFileModel, source: Source, table: OpTable) -> list[Rule]:
    """The allow and deny lists as rules: families first, so that an op named by itself wins; deny after allow."""
    entries: dict[str, list[tuple[str, Mark]]] = {"allow": [], "deny": []}
    seen: dict[str, tuple[str, Mark]] = {}
    for key in ("allow", "deny", *_ALIASES):
        listed, side = getattr(model, key), _ALIASES.get(key, key)
        if listed is not None and key in _ALIASES and getattr(model, side) is not None:
            raise source.mark((key,), key=True).error(f"'{key}' is another name of '{side}'", "keep one of the two")
        for index, entry in enumerate(listed or ()):
            mark = source.mark((key, index))
            if entry in seen:
                where, first = seen[entry]
                at = f" at line {first.line}" if first.line else ""
                raise mark.error(f"'{entry}' is in '{key}' and already in '{where}'{at}", "keep one of the two")
            seen[entry] = (key, mark)
            entries[side].append((entry, mark))
    return [
        _list_rule(entry, mark, side, precision, table)
        for is_op in (False, True)
        for side, precision in (("allow", Precision.LOW), ("deny", Precision.FP32))
        for entry, mark in entries[side]
        if _is_op(entry) == is_op
    ]


def _is_op(entry: str) -> bool:
    """True for an op or a glob on ops, false for the name of a family."""
    return "." in entry or _GLOB.search(entry) is not None


def _list_rule(entry: str, mark: Mark, side: str, precision: Precision, table: OpTable) -> Rule:
    if _is_op(entry):
        _check_op(entry, mark, table)
        match = Matcher(op=(entry,))
    else:
        _check_family(entry, mark, table)
        match = Matcher(family=(entry,))
    return Rule(mark.where, match, precision, why=f"'{entry}' is on the {side} list")


def _rule(model: RuleModel, source: Source, path: Keys, table: OpTable) -> Rule:
    mark = source.mark(path)
    backward = _given(model.backward)
    if model.precision is None and model.math is None and not backward:
        raise mark.error("the rule asks for nothing", "add 'precision:', 'math:' or 'backward:'")
    if backward.get("math", "fp32") != "fp32":
        raise source.mark((*path, "backward", "math")).error(
            f"no kernel accumulates gradients in {backward['math']}: 16-bit ones accumulate in FP32",
            "write 'math: fp32', or leave it out",
        )
    return Rule(
        where=mark.where,
        match=_matcher(model.match, source, (*path, "match"), table),
        precision=None if model.precision is None else Precision(model.precision),
        math=_type(model.math),
        backward=Precision(backward["precision"]) if "precision" in backward else None,
        backward_math=_type(backward.get("math")),
        why=model.why or "",
    )


def _matcher(model: MatchModel, source: Source, path: Keys, table: OpTable) -> Matcher:
    for name in model.family or ():
        _check_family(name, source.item_mark((*path, "family"), model.family or [], name), table)
    for glob in model.op or ():
        _check_op(glob, source.item_mark((*path, "op"), model.op or [], glob), table)
    node = [_regex(text, source.item_mark((*path, "node"), model.node or [], text)) for text in model.node or ()]
    attr = {name: tuple(value) if isinstance(value, list) else value for name, value in (model.attr or {}).items()}
    return Matcher(
        family=tuple(model.family or ()),
        op=tuple(model.op or ()),
        module=tuple(model.module or ()),
        module_type=tuple(model.module_type or ()),
        node=tuple(node),
        attr=tuple(attr.items()),
        inputs=frozenset(dtype_from_short(short) for short in model.inputs or ()),
        reduction_size=_comparison(model.reduction_size),
        absmax=_comparison(model.absmax),
        phase=model.phase,
        device=tuple(model.device or ()),
        dtype=tuple(LOW_TYPES[name] for name in model.dtype or ()),
    )


def _check_family(name: str, mark: Mark, table: OpTable) -> None:
    if name in table.families:
        return
    if name in PRECISIONS:
        raise mark.error(f"'{name}' is a precision, not an op family", "name a family here")
    ops = [op for op in table.ops if op.split(".", 1)[1] == name]
    mend = f"an op is written '{ops[0]}'" if ops else nearest(name, sorted(table.families))
    raise mark.error(f"there is no op family '{name}'", mend)


def _check_op(glob: str, mark: Mark, table: OpTable) -> None:
    """A literal namespace other than `aten` and `onnx` is a user's own, of which the table can know nothing."""
    namespace, dot, name = glob.partition(".")
    is_glob = _GLOB.search(glob) is not None
    own = bool(dot) and bool(name) and _GLOB.search(namespace) is None and namespace not in NAMESPACES
    if own or glob in table.ops or (is_glob and any(fnmatch.fnmatchcase(op, glob) for op in table.ops)):
        return
    what = f"'{glob}' matches no known op"
    if name.endswith("_") and glob[:-1] in table.ops:
        raise mark.error(what, f"an op in place has the name of the other: '{glob[:-1]}'")
    base = glob.rpartition(".")[0]
    if base in table.ops:
        raise mark.error(what, f"overloads have no names of their own: '{base}'")
    raise mark.error(what, nearest(glob, sorted(table.ops), "see rules/ops.yaml for the names"))


def _regex(text: str, mark: Mark) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as cause:
        spot = getattr(cause, "pos", None)
        mend = "correct it" if spot is None else f"correct it at character {spot + 1}"
        raise mark.error(f"'{text}' is no regular expression: {cause}", mend) from cause


def _comparison(bound: str | float | None) -> Comparison | None:
    """A bound of which the model has checked the form; a bare number asks for equality."""
    if bound is None:
        return None
    if not isinstance(bound, str):
        return Comparison("==", float(bound))
    text = bound.strip()
    width = 2 if text[1] == "=" else 1
    return Comparison(text[:width], float(text[width:]))


def _type(name: str | None) -> DType | None:
    return None if name is None else dtype_from_short(name)
