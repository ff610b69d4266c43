"""Where rules come from: presets, files and dicts, each with the places of its keys, and errors that name them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from amp_compiler.errors import RuleError
from amp_compiler.policy.marks import Mark, nearest
from amp_compiler.policy.matchers import MATCHERS
from amp_compiler.policy.schema import RuleFileModel, known_keys
from amp_compiler.policy.yaml_tree import MAX_BYTES, Tree, parse_yaml, tree_of

FROM_DICT = "<dict>"
Keys = tuple[str | int, ...]


@functools.cache
def preset_names() -> tuple[str, ...]:
    """The names of the built-in presets, in alphabetical order.

    Example:
        >>> "default" in preset_names()
        True
    """
    files = (entry.name for entry in resources.files("amp_compiler.rules").iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in files if name.endswith(".yaml") and name != "ops.yaml"))


@dataclass(frozen=True)
class Source:
    """A rule file that was read.

    Args:
        name: name of the rule set that it makes: preset name, path, or `<dict>`.
        shown: name of the file in errors and in decisions.
        identity: what tells it from other files, however their paths are written.
        folder: what a relative `extends` is relative to.
        tree: its contents.
        preset: it comes with the package.
    """

    name: str
    shown: str
    identity: str
    folder: Path
    tree: Tree
    preset: bool = False

    def mark(self, path: Keys, *, key: bool = False) -> Mark:
        """The place of the value at `path`, or of its key."""
        at = self.tree.locate(path, key=key)
        return Mark(self.shown, at.line, at.column, ".".join(str(part) for part in path))

    def item_mark(self, path: Keys, items: list[str], item: str) -> Mark:
        """The place of one item, which may stand alone or in a list."""
        in_list = isinstance(self.tree.locate(path).value, list)
        return self.mark((*path, items.index(item)) if in_list else path)


def from_dict(data: Mapping[str, Any]) -> Source:
    """Rules given as a Python dict; a relative `extends` is relative to the working directory."""
    return Source(FROM_DICT, FROM_DICT, FROM_DICT, Path(), tree_of(data, FROM_DICT))


@functools.cache
def from_preset(name: str) -> Source:
    """The file of a built-in preset."""
    file = f"{name}.yaml"
    text = resources.files("amp_compiler.rules").joinpath(file).read_text(encoding="utf-8")
    return Source(name, file, f"preset {name}", Path(), parse_yaml(text, file), preset=True)


def from_path(path: Path, extends_mark: Mark | None = None) -> Source:
    """A file of the user.

    Args:
        path: where it is.
        extends_mark: the `extends` that names it, if one does.

    Raises:
        RuleError: it cannot be read, is too large, or is no YAML.
    """
    shown = str(path)
    mark = extends_mark if extends_mark is not None else Mark()
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= MAX_BYTES and path.is_file() else None
    except (OSError, ValueError) as cause:
        names = [*preset_names(), *(file.name for file in path.parent.glob("*.y*ml"))][:40]  # `nearest` lists no more
        what = f"the rule file '{shown}' cannot be read: {getattr(cause, 'strerror', None) or cause}"
        raise mark.error(what, f"check the path; {nearest(path.name, names)}") from cause
    if raw is None:
        what = f"'{shown}' is no file" if size <= MAX_BYTES else f"the rule file '{shown}' has {size} bytes"
        raise mark.error(what, f"give a YAML file of at most {MAX_BYTES} bytes")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        line = raw[: cause.start].count(b"\n") + 1
        raise RuleError("this is not UTF-8 text", file=shown, line=line, hint="save it as UTF-8") from cause
    return Source(shown, shown, str(path.resolve()), path.parent, parse_yaml(text, shown))


def looks_like_path(text: str) -> bool:
    """True for text that names a file rather than a preset."""
    return "/" in text or "\\" in text or text.endswith((".yaml", ".yml", ".json"))


def validate(source: Source) -> RuleFileModel:
    """The file as a pydantic model.

    Raises:
        RuleError: the first error in file order, at its place.
    """
    if not isinstance(source.tree.value, dict):
        kind = "empty" if source.tree.value is None else f"a {type(source.tree.value).__name__}"
        raise source.mark(()).error(f"a rule file is a mapping, and this is {kind}", "begin with 'version: 1'")
    try:
        return RuleFileModel.model_validate(source.tree.plain())
    except ValidationError as cause:
        errors = [_translate(source, error) for error in cause.errors(include_url=False)]
        raise min(errors, key=lambda error: (error.line or 0, error.column or 0)) from cause


def _translate(source: Source, error: Any) -> RuleError:
    """One error of pydantic in the words of the rule language."""
    path, kind = _path_in_file(source.tree, error["loc"]), error["type"]
    if kind == "extra_forbidden":
        hint = nearest(str(path[-1]), known_keys(path[:-1]))
        return source.mark(path, key=True).error(f"unknown key '{path[-1]}'", hint)
    mark = source.mark(path)
    if kind == "missing":
        hints = {"match": "write 'match: {}' to match every node", "version": "begin with 'version: 1'"}
        name = str(error["loc"][-1])
        return mark.error(f"the key '{name}' is missing", hints.get(name, f"add '{name}:'"))
    value = source.tree.locate(path).plain()
    matcher = MATCHERS.get(str(path[-1])) if len(path) > 1 and path[-2] == "match" else None
    refusal = None if matcher is None or matcher.refusal is None else matcher.refusal(value)
    if refusal is not None:
        return mark.error(*refusal)
    shown = f"'{value}'" if isinstance(value, str) else repr(value)[:60]
    if kind == "literal_error":
        expected = error["ctx"]["expected"]
        words = re.findall(r"'([^']*)'", expected)
        return mark.error(f"{shown} is not {expected}", nearest(str(value), words) if words else f"write {expected}")
    if kind in ("model_type", "dict_type"):
        return mark.error(f"{shown} stands where a mapping belongs", "write 'key: value' lines below it")
    message = error["msg"].removeprefix("Value error, ")
    return mark.error(f"{shown} is wrong: {message[:1].lower()}{message[1:]}", "see rules/README.md for the language")


def _path_in_file(tree: Tree, loc: Keys) -> Keys:
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
