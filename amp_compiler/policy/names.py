"""Names in rule files, of families, ops and modules: which ones there are, and what a glob matches."""

from __future__ import annotations

import fnmatch
import functools
import re

from amp_compiler.policy.marks import Mark, nearest
from amp_compiler.policy.op_table import NAMESPACES
from amp_compiler.policy.rules import OpTable, Precision

_GLOB = re.compile(r"[*?\[]")


def is_op(entry: str) -> bool:
    """True for an op or a glob on ops, false for the name of a family."""
    return "." in entry or _GLOB.search(entry) is not None


def known_family(name: str, table: OpTable, mark: Mark) -> str:
    """The name of a family, as it is.

    Raises:
        RuleError: there is none; the hint names the nearest.
    """
    if name in table.families:
        return name
    if name in {precision.value for precision in Precision}:
        raise mark.error(f"'{name}' is a precision, not an op family", "name a family here")
    ops = [op for op in table.ops if op.split(".", 1)[1] == name]
    hint = f"an op is written '{ops[0]}'" if ops else nearest(name, sorted(table.families))
    raise mark.error(f"there is no op family '{name}'", hint)


def known_op(glob: str, table: OpTable, mark: Mark) -> str:
    """A glob that matches some op of the table, as it is.

    A literal namespace other than `aten` and `onnx` is a user's own, of which the table can know nothing.

    Raises:
        RuleError: it matches none; the hint names the nearest.
    """
    namespace, dot, name = glob.partition(".")
    is_glob = _GLOB.search(glob) is not None
    own = bool(dot) and bool(name) and _GLOB.search(namespace) is None and namespace not in NAMESPACES
    if own or glob in table.ops or (is_glob and any(fnmatch.fnmatchcase(op, glob) for op in table.ops)):
        return glob
    what = f"'{glob}' matches no known op"
    if name.endswith("_") and glob[:-1] in table.ops:
        raise mark.error(what, f"an op in place has the name of the other: '{glob[:-1]}'")
    base = glob.rpartition(".")[0]
    if base in table.ops:
        raise mark.error(what, f"overloads have no names of their own: '{base}'")
    raise mark.error(what, nearest(glob, sorted(table.ops), "see rules/ops.yaml for the names"))


@functools.lru_cache(maxsize=65536)
def matches(globs: tuple[str, ...], name: str) -> bool:
    """Whether one of the globs matches the whole name; modules and ops come up again and again."""
    return _pattern(globs).match(name) is not None


@functools.lru_cache(maxsize=4096)
def _pattern(globs: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{fnmatch.translate(glob)})" for glob in globs))
