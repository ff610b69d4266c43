"""Rule files: YAML, or the same as a Python dict, to a `rules.RuleSet`. The language is told in `rules/README.md`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from amp_compiler.errors import RuleError
from amp_compiler.ir.arithmetic import WORDS, Fp8
from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.policy.marks import Mark, nearest
from amp_compiler.policy.matchers import MATCHERS, read_condition
from amp_compiler.policy.names import is_op
from amp_compiler.policy.op_table import op_table
from amp_compiler.policy.rules import Matcher, OpTable, Precision, Rule, RuleSet
from amp_compiler.policy.schema import MathModel, RuleFileModel, RuleModel
from amp_compiler.policy.sources import (
    Keys,
    Source,
    from_dict,
    from_path,
    from_preset,
    looks_like_path,
    validate,
)
from amp_compiler.policy.sources import preset_names as preset_names

MAX_CHAIN = 16  # files that may extend one another
_ALIASES = {"whitelist": "allow", "blacklist": "deny"}
_KEPT = ("batch_norm", "normalization")  # families whose parameters the section `keep` speaks of
_OR_PATH = "or give the path of a .yaml file"


def load_rules(rules: str | Path | dict[str, Any] | RuleSet = "default") -> RuleSet:
    """Read rules.

    Args:
        rules: name of a built-in preset, path of a YAML file, the contents of one as a dict, or a `RuleSet`, which is
            given back as it is. A relative `extends` in a dict is relative to the working directory.

    Returns:
        The rules of the extended files and of this one, in the order in which they are read.

    Raises:
        RuleError: anything is wrong with them; file, line, column and key say where, and the text says the hint.

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
        raise RuleError(f"rules cannot be of type {kind}", hint="give a preset name, a path, a dict or a RuleSet")
    if rules in preset_names():
        known = _load_preset(rules)
        sections = ("loss_scale", "weights", "keep", "reduce")  # which a caller may change
        copies: dict[str, Any] = {name: dict(getattr(known, name)) for name in sections}
        return replace(known, **copies)
    if "\n" in rules:
        raise RuleError("this looks like the text of a rule file", hint="write it to a file, or give it as a dict")
    if looks_like_path(rules):
        return _load(from_path(Path(rules)), ())
    raise RuleError(f"there is no preset '{rules}'", hint=nearest(rules, preset_names(), _OR_PATH))


@functools.cache
def _load_preset(name: str) -> RuleSet:
    return _load(from_preset(name), ())


def _load(source: Source, chain: tuple[Source, ...]) -> RuleSet:
    """Check one file, load what it extends (`chain` led here), and put the rules of both in order."""
    model = validate(source)
    table = op_table()
    base = None if model.extends is None else _load_extended(model.extends, source, (*chain, source))
    own = [_rule(rule, source, ("rules", index), table) for index, rule in enumerate(model.rules or [])]
    keep = {**(base.keep if base is not None else {}), **_present(model.keep)}
    return RuleSet(
        name=source.name,
        rules=(*(base.rules if base is not None else ()), *_list_rules(model, source, table), *own),
        ops=_table_without_kept(tuple(family for family in _KEPT if not keep.get(family, True))),
        loss_scale=_loss_scale(model, source, base),
        weights={**(base.weights if base is not None else {}), **_present(model.weights)},
        keep=keep,
        reduce={**(base.reduce if base is not None else {}), **_present(model.reduce)},
        buffers=model.buffers or (base.buffers if base is not None else "always"),
    )


@functools.cache
def _table_without_kept(families: tuple[str, ...]) -> OpTable:
    """The op table in which ops of some families have no operands of their own type."""
    return functools.reduce(OpTable.without_kept, families, op_table())


def _load_extended(wanted: str, source: Source, chain: tuple[Source, ...]) -> RuleSet:
    mark = source.mark(("extends",))
    if wanted in preset_names():
        extended = from_preset(wanted)
    elif looks_like_path(wanted):
        extended = from_path(source.folder / wanted, mark)
    else:
        raise mark.error(f"there is no preset '{wanted}'", nearest(wanted, preset_names(), _OR_PATH))
    chain_text = " -> ".join(link.shown for link in (*chain, extended))
    if extended.identity in {link.identity for link in chain}:
        raise mark.error(f"the files extend each other in a circle: {chain_text}", "remove one 'extends'")
    if len(chain) >= MAX_CHAIN:
        raise mark.error(f"more than {MAX_CHAIN} files extend one another: {chain_text}", "join some of them")
    return _load_preset(wanted) if extended.preset else _load(extended, chain)


def _present(model: Any) -> dict[str, Any]:
    """The keys of a section that the file gives, a null counting as not given."""
    return {} if model is None else model.model_dump(exclude_none=True)


def _loss_scale(model: RuleFileModel, source: Source, base: RuleSet | None) -> dict[str, object]:
    """The section merged over the extended file's, whose keys hold for its own mode only."""
    own = _present(model.loss_scale)
    inherited = dict(base.loss_scale) if base is not None else {}
    if "mode" in own and own["mode"] != inherited.get("mode"):
        inherited = {}
    merged = {**inherited, **own}
    if {"min", "max"} <= set(merged) and merged["min"] > merged["max"]:
        raise source.mark(("loss_scale",)).error("the loss scale's 'min' is above its 'max'", "swap them")
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
        _list_rule(entry, mark, side, precision, table, not source.preset)
        for ops in (False, True)
        for side, precision in (("allow", Precision.LOW), ("deny", Precision.FP32))
        for entry, mark in entries[side]
        if is_op(entry) == ops
    ]


def _list_rule(entry: str, mark: Mark, side: str, precision: Precision, table: OpTable, own: bool) -> Rule:
    condition = read_condition(MATCHERS["op" if is_op(entry) else "family"], [entry], table, lambda item: mark)
    why, text = f"'{entry}' is on the {side} list", f"{side}: {entry}" if own else ""
    return Rule(mark.where, Matcher((condition,)), precision, why=why, text=text, own=own)


def _rule(model: RuleModel, source: Source, path: Keys, table: OpTable) -> Rule:
    mark = source.mark(path)
    backward = _present(model.backward)
    if model.precision is None and model.math is None and not backward and model.refuse is None:
        raise mark.error("the rule asks for nothing", "add 'precision:', 'math:', 'backward:' or 'refuse:'")
    if model.refuse is not None and (model.precision is not None or model.math is not None or backward):
        raise mark.error(
            "'refuse' stands alone: a model with such a node is not planned",
            "leave 'precision', 'math' and 'backward' out, or leave 'refuse' out",
        )
    _check_math(model, source, path)
    return Rule(
        where=mark.where,
        match=_matcher(model.match, source, (*path, "match"), table),
        # A refusal decides on a node as a precision does, though nothing runs in it.
        precision=Precision.KEEP if model.refuse is not None else model.precision and Precision(model.precision),
        math=_arithmetic(model.math),
        backward=Precision(backward["precision"]) if "precision" in backward else None,
        backward_math=_arithmetic(backward.get("math")),
        why=model.why or "",
        refusal=model.refuse or "",
        text="" if source.preset else _text(source.tree.locate(path).plain()),
        own=not source.preset,
    )


def _check_math(model: RuleModel, source: Source, path: Keys) -> None:
    """Refuse arithmetic that no node could have, whatever the model and the device; the rest is for planning to say."""
    backward = _present(model.backward)
    if isinstance(_arithmetic(backward.get("math", "fp32")), DType) and backward.get("math", "fp32") != "fp32":
        raise source.mark((*path, "backward", "math")).error(
            f"no kernel accumulates gradients in {backward['math']}: 16-bit ones accumulate in FP32",
            "write 'math: fp32', or leave it out",
        )
    if model.math is None or model.precision is None:
        return
    mark = source.mark((*path, "math"))
    if model.precision == "fp32" and model.math != "fp32":
        said = model.math if isinstance(model.math, str) else next(iter(WORDS))
        raise mark.error(
            f"a node that runs in FP32 cannot compute in {said}, which is narrower than its data",
            "write 'precision: low' for 16-bit inputs and outputs, or leave 'math' out",
        )
    if model.precision == "keep":
        raise mark.error(
            "'precision: keep' leaves a node as it was captured, its arithmetic included",
            "write 'precision: low' or 'widest', or leave 'math' out",
        )


def _matcher(model: Any, source: Source, path: Keys, table: OpTable) -> Matcher:
    conditions = []
    for key, kind in MATCHERS.items():
        written = getattr(model, key)
        if written is not None:
            mark = functools.partial(source.item_mark, (*path, key), written)
            conditions.append(read_condition(kind, written, table, mark))
    return Matcher(tuple(conditions))


def _text(data: Any) -> str:
    """A part of a rule file on one line, as it might stand in YAML."""
    if isinstance(data, dict):
        parts = (f"{key}: {_text(value)}" for key, value in data.items() if key != "why")
        return "{" + ", ".join(parts) + "}"
    if isinstance(data, list):
        return "[" + ", ".join(_text(item) for item in data) + "]"
    return json.dumps(data) if data is None or isinstance(data, bool) else str(data)


def _arithmetic(said: str | dict[str, Any] | MathModel | None) -> Any:
    """What a node computes in: a `DType`, or an `Fp8`; `None` where nothing is said."""
    if said is None:
        return None
    if isinstance(said, str):
        return WORDS.get(said) or dtype_from_short(said)
    return Fp8.of(said if isinstance(said, dict) else _present(said))
