"""Rule files: YAML, or the same as a Python dict, to a `policy.RuleSet`. The language is told in `rules/README.md`."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from amp_compiler.dtypes import LOW_TYPES, DType, dtype_from_short
from amp_compiler.errors import RuleError
from amp_compiler.optable import NAMESPACES, op_table
from amp_compiler.policy import Comparison, Matcher, OpTable, Precision, Rule, RuleSet
from amp_compiler.rulemodel import PRECISIONS, MatchModel, RuleFileModel, RuleModel, known_keys
from amp_compiler.rulemodel import schema as schema
from amp_compiler.yamltree import MAX_BYTES, Tree, parse_yaml, tree_of

FROM_DICT = "<dict>"
MAX_CHAIN = 16  # files that may extend one another
_ALIASES = {"whitelist": "allow", "blacklist": "deny"}
_GLOB = re.compile(r"[*?\[]")
_NUMBERED_COMPARISON = re.compile(r"\s*(<=|>=|==|!=|<|>)\s*(\S+)\s*")
Path_ = tuple[str | int, ...]


@functools.cache
def preset_names() -> tuple[str, ...]:
    """The names of the built-in presets, in alphabetical order.

    Example:
        >>> "default" in preset_names()
        True
    """
    files = (entry.name for entry in resources.files("amp_compiler.rules").iterdir())
    return tuple(sorted(name[: -len(".yaml")] for name in files if name.endswith(".yaml") and name != "ops.yaml"))


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
        return _load(_Source(FROM_DICT, FROM_DICT, Path(), tree_of(rules, FROM_DICT)), ())
    if isinstance(rules, Path):
        return _load(_read_path(rules), ())
    if not isinstance(rules, str):
        raise RuleError(
            f"rules cannot be of type {type(rules).__name__}", mend="give a preset name, a path, a dict or a RuleSet"
        )
    if rules in preset_names():
        return _load_preset(rules)
    if "\n" in rules:
        raise RuleError("this looks like the text of a rule file", mend="write it to a file, or give it as a dict")
    if _looks_like_path(rules):
        return _load(_read_path(Path(rules)), ())
    raise RuleError(f"there is no preset '{rules}'", mend=_nearest(rules, preset_names(), "or give the path of a .yaml file"))


@functools.cache
def _load_preset(name: str) -> RuleSet:
    return _load(_read_preset(name), ())


@dataclass(frozen=True)
class _Source:
    """A rule file that was read: its name as shown, its identity against cycles, its folder and its contents."""

    shown: str
    identity: str
    folder: Path
    tree: Tree


def _read_preset(name: str) -> _Source:
    file = f"{name}.yaml"
    text = resources.files("amp_compiler.rules").joinpath(file).read_text(encoding="utf-8")
    return _Source(file, f"preset {name}", Path(), parse_yaml(text, file))


def _read_path(path: Path, *, by: _Mark | None = None) -> _Source:
    shown = str(path)
    at = {} if by is None else {"file": by.file, "line": by.line, "column": by.column, "key": by.key}
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= MAX_BYTES and path.is_file() else None
    except (OSError, ValueError) as cause:
        raise RuleError(
            f"the rule file '{shown}' cannot be read ({cause})", **at, mend=_nearest(shown, preset_names(), "check the path")
        ) from cause
    if raw is None:
        what = f"'{shown}' is no file" if size <= MAX_BYTES else f"the rule file '{shown}' has {size} bytes"
        raise RuleError(what, **at, mend=f"give a YAML file of at most {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = raw[: cause.start].count(b"\n") + 1
        raise RuleError("this is not UTF-8 text", file=shown, line=line, mend="save it as UTF-8") from cause
    return _Source(shown, str(path.resolve()), path.parent, parse_yaml(text, shown))


def _looks_like_path(text: str) -> bool:
    return "/" in text or "\\" in text or text.endswith((".yaml", ".yml", ".json"))


@dataclass(frozen=True)
class _Mark:
    """A place in a rule file, for errors."""

    file: str
    line: int | None
    column: int | None
    key: str

    def error(self, what: str, mend: str) -> RuleError:
        return RuleError(what, file=self.file, line=self.line, column=self.column, key=self.key, mend=mend)


def _mark(source: _Source, path: Path_, *, key: bool = False) -> _Mark:
    at = source.tree.locate(path, key=key)
    return _Mark(source.shown, at.line, at.column, ".".join(str(part) for part in path))


def _load(source: _Source, chain: tuple[_Source, ...]) -> RuleSet:
    """Check one file, load what it extends, and put the rules of both in order."""
    model = _validate(source)
    table = op_table()
    base = _load_extended(model, source, (*chain, source)) if model.extends is not None else None
    rules = [*_list_rules(model, source, table), *_own_rules(model, source, table)]
    name = source.shown if source.identity != f"preset {source.shown.removesuffix('.yaml')}" else source.shown[:-5]
    return RuleSet(
        name=name,
        rules=(*(base.rules if base is not None else ()), *rules),
        ops=table,
        loss_scale=_loss_scale(model, source, base),
        weights={**(base.weights if base is not None else {}), **_given(model.weights)},
    )


def _load_extended(model: RuleFileModel, source: _Source, chain: tuple[_Source, ...]) -> RuleSet:
    wanted, mark = str(model.extends), _mark(source, ("extends",))
    if wanted in preset_names():
        found = _read_preset(wanted)
    elif _looks_like_path(wanted):
        found = _read_path(source.folder / wanted, by=mark)
    else:
        raise mark.error(f"there is no preset '{wanted}'", _nearest(wanted, preset_names(), "or give the path of a .yaml file"))
    told = " -> ".join(link.shown for link in (*chain, found))
    if found.identity in {link.identity for link in chain}:
        raise mark.error(f"the files extend each other in a circle: {told}", "remove one 'extends'")
    if len(chain) >= MAX_CHAIN:
        raise mark.error(f"more than {MAX_CHAIN} files extend one another: {told}", "join some of them")
    return _load(found, chain)


def _validate(source: _Source) -> RuleFileModel:
    """The file as a pydantic model; the first error, in file order, as a `RuleError` at its place."""
    if not isinstance(source.tree.value, dict):
        found = "empty" if source.tree.value is None else f"a {type(source.tree.value).__name__}"
        raise _mark(source, ()).error(f"a rule file is a mapping, and this is {found}", "begin with 'version: 1'")
    try:
        return RuleFileModel.model_validate(source.tree.plain())
    except ValidationError as cause:
        errors = [_translate(source, error) for error in cause.errors(include_url=False)]
        first = min(errors, key=lambda error: (error.line or 0, error.column or 0))
        raise first from cause


def _translate(source: _Source, error: Any) -> RuleError:
    path = _real_path(source.tree, error["loc"])
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        mark = _mark(source, path, key=True)
        return mark.error(f"unknown key '{path[-1]}'", _nearest(str(path[-1]), known_keys(path[:-1])))
    if kind == "missing":
        name = error["loc"][-1]
        mend = "write 'match: {}' to match every node" if name == "match" else f"add '{name}:'"
        return _mark(source, path).error(f"the key '{name}' is missing", "begin with 'version: 1'" if name == "version" else mend)
    mark = _mark(source, path)
    value = source.tree.locate(path).plain()
    shown = f"'{value}'" if isinstance(value, str) else repr(value)[:60]
    if kind == "literal_error":
        words = [word for word in re.findall(r"'([^']*)'", context["expected"])]
        if not words:
            return mark.error(f"{shown} is not {context['expected']}", f"write {context['expected']}")
        return mark.error(f"{shown} is none of {', '.join(words)}", _nearest(str(value), words))
    if kind == "string_pattern_mismatch" or "function-" in str(error["loc"]):
        return mark.error(f"{shown} is no comparison", "write an operator and a number in quotes, such as \"> 8192\"")
    if kind == "model_type" or kind == "dict_type":
        return mark.error(f"{shown} stands where a mapping belongs", "write 'key: value' lines below it")
    return mark.error(f"{shown} is wrong: {_lower(error['msg'])}", "see the rule language in rules/README.md")


def _real_path(tree: Tree, loc: tuple[str | int, ...]) -> Path_:
    """The part of pydantic's location that is a path in the file: names of union members are left out."""
    path: list[str | int] = []
    at = tree
    for part in loc:
        inside = isinstance(at.value, dict) and part in at.value
        inside = inside or (isinstance(at.value, list) and isinstance(part, int) and part < len(at.value))
        if inside:
            path.append(part)
            at = at.value[part]
    return tuple(path)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The mend of a wrong name: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    close = close or [known_name for known_name in names if len(name) > 2 and known_name.split(".")[-1] == name][:1]
    if close:
        return f"did you mean '{close[0]}'?"
    listed = f"use one of {', '.join(names)}" if 0 < len(names) <= 40 else ""
    return f"{listed}, {otherwise}".strip(", ")


def _given(model: Any) -> dict[str, Any]:
    """The keys of a section that the file gives, a null counting as not given."""
    return {} if model is None else model.model_dump(exclude_none=True)


def _loss_scale(model: RuleFileModel, source: _Source, base: RuleSet | None) -> dict[str, object]:
    """The section merged over the extended file's, whose keys hold for its own mode only."""
    own = _given(model.loss_scale)
    inherited = dict(base.loss_scale) if base is not None else {}
    if "mode" in own and own["mode"] != inherited.get("mode"):
        inherited = {}
    merged = {**inherited, **own}
    if {"min", "max"} <= set(merged) and float(merged["min"]) > float(merged["max"]):
        raise _mark(source, ("loss_scale",)).error("the loss scale's 'min' is above its 'max'", "exchange them")
    return merged


def _list_rules(model: RuleFileModel, source: _Source, table: OpTable) -> list[Rule]:
    """The allow and deny lists as rules: families first, so that an op named by itself wins; deny after allow."""
    entries: dict[str, list[tuple[str, _Mark]]] = {"allow": [], "deny": []}
    seen: dict[str, tuple[str, _Mark]] = {}
    for key in ("allow", "deny", *_ALIASES):
        listed, side = getattr(model, key), _ALIASES.get(key, key)
        if listed is None:
            continue
        if key in _ALIASES and getattr(model, side) is not None:
            raise _mark(source, (key,), key=True).error(f"'{key}' is another name of '{side}'", "keep one of the two")
        for index, entry in enumerate(listed):
            mark = _mark(source, (key, index))
            if entry in seen:
                where, first = seen[entry]
                told = f"'{entry}' is in '{key}' and already in '{where}'" + (f" at line {first.line}" if first.line else "")
                raise mark.error(told, "keep one of the two")
            seen[entry] = (key, mark)
            entries[side].append((entry, mark))
    made = []
    for is_op in (False, True):
        for side, precision in (("allow", Precision.LOW), ("deny", Precision.FP32)):
            for entry, mark in entries[side]:
                if ("." in entry or _GLOB.search(entry) is not None) == is_op:
                    made.append(_list_rule(entry, mark, side, precision, table, is_op=is_op))
    return made


def _list_rule(entry: str, mark: _Mark, side: str, precision: Precision, table: OpTable, *, is_op: bool) -> Rule:
    if is_op:
        _check_op(entry, mark, table)
        match = Matcher(op=(entry,))
    else:
        _check_family(entry, mark, table)
        match = Matcher(family=(entry,))
    return Rule(_where(mark), match, precision, why=f"'{entry}' is on the {side} list")


def _where(mark: _Mark) -> str:
    """`file:line`, or `<dict>:rules.0` for rules that have no lines."""
    return f"{mark.file}:{mark.line if mark.line is not None else mark.key}"


def _own_rules(model: RuleFileModel, source: _Source, table: OpTable) -> list[Rule]:
    return [_rule(rule, source, ("rules", index), table) for index, rule in enumerate(model.rules or [])]


def _rule(model: RuleModel, source: _Source, path: Path_, table: OpTable) -> Rule:
    mark = _mark(source, path)
    backward = _given(model.backward)
    if model.precision is None and model.math is None and not backward:
        raise mark.error("the rule asks for nothing", "add 'precision:', 'math:' or 'backward:'")
    return Rule(
        where=_where(mark),
        match=_matcher(model.match, source, (*path, "match"), table),
        precision=None if model.precision is None else Precision(model.precision),
        math=_type(model.math),
        backward=Precision(backward["precision"]) if "precision" in backward else None,
        backward_math=_type(backward.get("math")),
        why=model.why or "",
    )


def _matcher(model: MatchModel, source: _Source, path: Path_, table: OpTable) -> Matcher:
    for name in model.family or ():
        _check_family(name, _item(source, (*path, "family"), model.family, name), table)
    for glob in model.op or ():
        _check_op(glob, _item(source, (*path, "op"), model.op, glob), table)
    return Matcher(
        family=tuple(model.family or ()),
        op=tuple(model.op or ()),
        module=tuple(model.module or ()),
        module_type=tuple(model.module_type or ()),
        node=tuple(_regex(text, _item(source, (*path, "node"), model.node, text)) for text in model.node or ()),
        attr=tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in (model.attr or {}).items()),
        inputs=frozenset(dtype_from_short(short) for short in model.inputs or ()),
        reduction_size=_comparison(model.reduction_size, _mark(source, (*path, "reduction_size"))),
        absmax=_comparison(model.absmax, _mark(source, (*path, "absmax"))),
        phase=model.phase,
        device=tuple(model.device or ()),
        dtype=tuple(LOW_TYPES[name] for name in model.dtype or ()),
    )


def _item(source: _Source, path: Path_, items: list[str] | None, item: str) -> _Mark:
    """The place of one item, which stands alone or in a list."""
    if isinstance(source.tree.locate(path).value, list) and items is not None:
        return _mark(source, (*path, items.index(item)))
    return _mark(source, path)


def _check_family(name: str, mark: _Mark, table: OpTable) -> None:
    if name in table.families:
        return
    if name in PRECISIONS:
        raise mark.error(f"'{name}' is a precision, not an op family", "name a family here")
    ops = [op for op in table.ops if op.split(".", 1)[1] == name]
    mend = f"an op is written '{ops[0]}'" if ops else _nearest(name, sorted(table.families))
    raise mark.error(f"there is no op family '{name}'", mend)


def _check_op(glob: str, mark: _Mark, table: OpTable) -> None:
    """A literal namespace other than `aten` and `onnx` is a user's own, of which the table can know nothing."""
    namespace, dot, name = glob.partition(".")
    own = bool(dot) and bool(name) and _GLOB.search(namespace) is None and namespace not in NAMESPACES
    if own or (_GLOB.search(glob) is None and glob in table.ops):
        return
    if _GLOB.search(glob) is not None and any(fnmatch.fnmatchcase(op, glob) for op in table.ops):
        return
    if name.endswith("_") and glob[:-1] in table.ops:
        raise mark.error(f"'{glob}' matches no known op", f"ops in place have the name of the others: '{glob[:-1]}'")
    raise mark.error(f"'{glob}' matches no known op", _nearest(glob, sorted(table.ops)) or "see rules/ops.yaml for the names")


def _regex(text: str, mark: _Mark) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as cause:
        spot = getattr(cause, "pos", None)
        told = f"'{text}' is no regular expression: {cause}"
        raise mark.error(told, "correct it" if spot is None else f"correct it at character {spot + 1}") from cause


def _comparison(bound: str | float | None, mark: _Mark) -> Comparison | None:
    if bound is None:
        return None
    if not isinstance(bound, str):
        return Comparison("==", float(bound))
    found = _NUMBERED_COMPARISON.fullmatch(bound)
    if found is None:  # the pydantic model has the same pattern, so this is for a change of one of them
        raise mark.error(f"'{bound}' is no comparison", "write an operator and a number, such as \"> 8192\"")
    return Comparison(found[1], float(found[2]))


def _type(name: str | None) -> DType | None:
    return None if name is None else dtype_from_short(name)
