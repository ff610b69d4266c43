"""The op table `rules/ops.yaml` as a `rules.OpTable`. `tests/policy/test_optable.py` holds what may stand in it."""

from __future__ import annotations

import functools
from dataclasses import fields
from importlib import resources
from typing import Any

from amp_compiler.errors import RuleError
from amp_compiler.policy.rules import OpInfo, OpTable
from amp_compiler.policy.yaml_tree import parse_yaml

NAMESPACES = ("aten", "onnx")  # of which every op is in the table
_NAMED = (*NAMESPACES, "com.microsoft")
_SETS = {field.name for field in fields(OpInfo) if isinstance(field.default, frozenset)}


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
    family = ""
    try:
        for family, entry in parse_yaml(text, file).plain()["families"].items():
            about[family], special = entry.pop("about"), entry.pop("special", {})
            listed = {namespace: entry.pop(namespace) for namespace in _NAMED if namespace in entry}
            for namespace, words in listed.items():
                for name in [f"{namespace}.{word}" for word in (words.split() if isinstance(words, str) else words)]:
                    if name in ops:
                        raise KeyError(f"'{name}' is in '{ops[name].family}' too")
                    ops[name] = OpInfo(name, family, **_fields({**entry, **special.pop(name, {})}))
            if special:
                raise KeyError(f"'special' names '{min(special)}', which is none of its ops")
    except (AttributeError, KeyError, TypeError) as wrong:
        place = f"in the family '{family}': " if family else ""
        raise RuleError(f"the op table is damaged: {place}{wrong}", file=file, hint="see rules/README.md") from wrong
    return OpTable(ops, about)


def _fields(said: dict[str, Any]) -> dict[str, Any]:
    return {name: frozenset(value) if name in _SETS else value for name, value in said.items()}
