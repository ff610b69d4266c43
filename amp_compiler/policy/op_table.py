"""The op table `rules/ops.yaml` as a `rules.OpTable`. `tests/policy/test_optable.py` holds what may stand in it."""

from __future__ import annotations

import functools
from dataclasses import fields
from importlib import resources
from typing import Any

from amp_compiler.policy.rules import OpInfo, OpTable
from amp_compiler.policy.yaml_tree import parse_yaml, tree_error

NAMESPACES = ("aten", "onnx")  # of which every op is in the table
_NAMED = (*NAMESPACES, "com.microsoft")
_KINDS = {field.name: type(field.default) for field in fields(OpInfo)[2:]}  # what an op has beside name and family


@functools.cache
def op_table() -> OpTable:
    """The op table that comes with the package, read once.

    Raises:
        RuleError: where the installed table is damaged.

    Example:
        >>> op_table().info("aten.linear").family
        'matmul'
    """
    text = resources.files("amp_compiler.rules").joinpath("ops.yaml").read_text(encoding="utf-8")
    return parse_op_table(text, "ops.yaml")


def parse_op_table(text: str, file: str) -> OpTable:
    """Read the text of an op table.

    Args:
        text: YAML as `rules/ops.yaml` has it.
        file: its name for error messages.

    Raises:
        RuleError: an op in two families, a family without a description, an unknown field.
    """
    ops: dict[str, OpInfo] = {}
    about: dict[str, str] = {}
    root = parse_yaml(text, file)
    family, place = "", root
    try:
        for family, place in root.value["families"].value.items():
            entry = place.plain()
            about[family], special = entry.pop("about"), entry.pop("special", {})
            listed = {namespace: entry.pop(namespace) for namespace in _NAMED if namespace in entry}
            for namespace, words in listed.items():
                for name in [f"{namespace}.{word}" for word in (words.split() if isinstance(words, str) else words)]:
                    if name in ops:
                        raise tree_error(f"'{name}' is in '{ops[name].family}' too", file, place, "name it once")
                    ops[name] = OpInfo(name, family, **_fields({**entry, **special.pop(name, {})}))
            if special:
                what = f"'special' names '{min(special)}', which '{family}' does not hold"
                raise tree_error(what, file, place, "list it there")
    except (AttributeError, KeyError, TypeError) as wrong:
        where = f"in the family '{family}': " if family else ""
        raise tree_error(f"the op table is damaged: {where}{wrong}", file, place, "see rules/README.md") from wrong
    return OpTable(ops, about)


def _fields(said: dict[str, Any]) -> dict[str, Any]:
    known = {name: frozenset(value) if isinstance(value, list) else value for name, value in said.items()}
    for name, value in known.items():
        if name not in _KINDS:
            raise TypeError(f"'{name}' is no field of an op, which are {', '.join(_KINDS)}")
        if type(value) is not _KINDS[name]:
            raise TypeError(f"'{name}' is {value!r}, which is not a {_KINDS[name].__name__}")
    return known
