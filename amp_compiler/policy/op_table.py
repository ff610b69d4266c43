"""The op table `rules/ops.yaml` as a `rules.OpTable`."""

from __future__ import annotations

import functools
from dataclasses import fields
from importlib import resources
from typing import Any

from amp_compiler.policy.reduction_size import SIZES
from amp_compiler.policy.rules import OpInfo, OpTable
from amp_compiler.policy.yaml_tree import Tree, parse_yaml, tree_error

NAMESPACES = ("aten", "onnx")  # of which every op is in the table
_NAMED = (*NAMESPACES, "com.microsoft")
_KINDS = {field.name: type(field.default) for field in fields(OpInfo)[2:]}  # what an op has beside name and family
_WORDS = {
    "moves": ("shape", "place", "index"),
    "sums": tuple(SIZES),
    "fp8": ("product", "convolution"),
}  # "" unsays what the family says


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
        RuleError: an op in two families, a family without a description, an unknown field or a wrong type.
    """
    root = parse_yaml(text, file)
    families = root.value.get("families") if isinstance(root.value, dict) else None
    if families is None or not isinstance(families.value, dict):
        raise tree_error("an op table needs the mapping 'families'", file, root, "write 'families:' first")
    ops: dict[str, OpInfo] = {}
    about: dict[str, str] = {}
    for family, entry in families.value.items():
        if not isinstance(entry.value, dict) or "about" not in entry.value:
            raise tree_error(
                f"the family '{family}' lacks its line 'about'", file, entry, "say in one line what it holds"
            )
        about[family] = _typed(entry.value["about"], str, file)
        _add_family(ops, family, entry, file)
    return OpTable(ops, about)


def _add_family(ops: dict[str, OpInfo], family: str, entry: Tree, file: str) -> None:
    parts: dict[str, Tree] = entry.value
    common = _fields({key: tree for key, tree in parts.items() if key in _KINDS}, file)
    special: dict[str, Tree] = parts["special"].value if "special" in parts else {}
    unknown = set(parts) - {"about", "special", *_NAMED, *_KINDS}
    if unknown:
        raise tree_error(f"unknown field '{min(unknown)}' of family '{family}'", file, entry, "see rules/README.md")
    mine = set()
    for namespace in _NAMED:
        for word, tree in _names(parts[namespace], file) if namespace in parts else []:
            name = f"{namespace}.{word}"
            if name in ops:
                raise tree_error(f"'{name}' is in '{ops[name].family}' and in '{family}'", file, tree, "name it once")
            own = _fields(special[name].value, file) if name in special else {}
            ops[name] = OpInfo(name, family, **{**common, **own})
            mine.add(name)
    for name in special:
        if name not in mine:
            raise tree_error(
                f"'special' names '{name}', which '{family}' does not hold", file, special[name], "list it there"
            )


def _names(tree: Tree, file: str) -> list[tuple[str, Tree]]:
    """The names in a list or in a text, each with its place."""
    if isinstance(tree.value, str):
        return [(word, tree) for word in tree.value.split()]
    return [(_typed(item, str, file), item) for item in _typed(tree, list, file)]


def _fields(parts: dict[str, Tree], file: str) -> dict[str, Any]:
    known: dict[str, Any] = {}
    for key, tree in parts.items():
        if key not in _KINDS:
            raise tree_error(f"unknown field '{key}' of an op", file, tree, f"use one of {', '.join(_KINDS)}")
        if _KINDS[key] is frozenset:
            known[key] = frozenset(_typed(item, str, file) for item in _typed(tree, list, file))
            continue
        known[key] = _typed(tree, _KINDS[key], file)
        if key in _WORDS and known[key] not in ("", *_WORDS[key]):
            raise tree_error(f"'{known[key]}' is no '{key}'", file, tree, f"use one of {', '.join(_WORDS[key])}")
    return known


def _typed(tree: Tree, kind: type, file: str) -> Any:
    if type(tree.value) is not kind:
        raise tree_error(f"{tree.plain()!r} is not a {kind.__name__}", file, tree, "see rules/README.md")
    return tree.value
