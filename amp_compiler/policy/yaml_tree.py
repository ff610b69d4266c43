"""YAML text, or plain Python data, as a small tree that knows line and column of every key and value.

Nothing is ever constructed from the text but text, numbers, truth values, lists and mappings. Tags are refused, aliases
are counted by what they expand to, and plain scalars follow YAML 1.2: `on`, `yes` and `off` are text, no truth values.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from amp_compiler.errors import RuleError

MAX_BYTES = 1 << 20
MAX_NODES = 50_000  # the op table of this package, the largest file that is read, has about 3,000
MAX_DEPTH = 32

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Any] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
    ".inf": math.inf, ".Inf": math.inf, "+.inf": math.inf, "-.inf": -math.inf, "-.Inf": -math.inf, ".nan": math.nan,
}  # fmt: skip


@dataclass(slots=True)
class Tree:
    """A key or value of a rule file.

    Args:
        value: text, number, truth value or `None` of a scalar; a list of trees; or a mapping of text to trees.
        line: line in the file from 1; `None` for data that comes from Python.
        column: column from 1.
        keys: of a mapping, the trees of its keys, for their positions.
        size: number of trees in it, aliases expanded.
    """

    value: Any
    line: int | None = None
    column: int | None = None
    keys: dict[str, Tree] = field(default_factory=dict)
    size: int = 1

    def plain(self) -> Any:
        """The tree as plain Python data."""
        if isinstance(self.value, dict):
            return {key: tree.plain() for key, tree in self.value.items()}
        if isinstance(self.value, list):
            return [tree.plain() for tree in self.value]
        return self.value

    def locate(self, path: tuple[str | int, ...], *, key: bool = False) -> Tree:
        """The tree at a path of keys and indices, or the last one on the way that exists.

        Args:
            path: keys and list indices from the root.
            key: give the tree of the last key instead of that of its value.
        """
        at = self
        for depth, part in enumerate(path):
            if isinstance(at.value, dict) and part in at.value:
                if key and depth == len(path) - 1:
                    return at.keys[str(part)]
                at = at.value[part]
            elif isinstance(at.value, list) and isinstance(part, int) and part < len(at.value):
                at = at.value[part]
            else:
                break
        return at


def parse_yaml(text: str, file: str) -> Tree:
    """Read YAML text.

    Args:
        text: the text, at most `MAX_BYTES` when encoded.
        file: its name for error messages.

    Raises:
        RuleError: the text is not YAML, or uses what a rule file may not use: tags, several documents, a key twice,
            keys that are not text, aliases to themselves, or more than `MAX_NODES` values or `MAX_DEPTH` levels.

    Example:
        >>> parse_yaml("version: 1", "my.yaml").plain()
        {'version': 1}
    """
    builder = _Builder(file)
    try:
        for event in YAML(typ="safe", pure=True).parse(io.StringIO(text)):
            builder.add(event)
    except YAMLError as cause:
        mark = getattr(cause, "problem_mark", None) or getattr(cause, "context_mark", None)
        problem = getattr(cause, "problem", None) or str(cause).splitlines()[0]
        raise RuleError(
            f"this is not YAML: {problem}",
            file=file,
            line=None if mark is None else mark.line + 1,
            column=None if mark is None else mark.column + 1,
            hint="correct the syntax",
        ) from cause
    except (ValueError, OverflowError, RecursionError, IndexError, AttributeError, TypeError, AssertionError) as cause:
        # The parser lets these escape on malformed escapes and directives, without a position.
        raise RuleError(f"this is not YAML: {cause}", file=file, hint="correct the syntax") from cause
    return builder.root if builder.root is not None else Tree(None, 1, 1)


def tree_of(data: object, file: str) -> Tree:
    """The tree of plain Python data, as if it had been read from a file, but without positions.

    Raises:
        RuleError: the data holds something that YAML has no word for, or is nested too deeply.
    """
    return _tree_of(data, file, ())


def _tree_of(data: object, file: str, path: tuple[str, ...]) -> Tree:
    key = ".".join(path)
    if len(path) > MAX_DEPTH:
        raise RuleError("it is nested too deeply", file=file, key=".".join(path[:4]), hint="flatten it")
    if data is None or isinstance(data, (bool, int, float, str)):
        return Tree(data)
    if isinstance(data, Mapping):
        wrong = next((name for name in data if not isinstance(name, str)), None)
        if wrong is not None:
            raise RuleError(f"the key {wrong!r} is not text", file=file, key=key, hint="write the key as a str")
        trees = {name: _tree_of(item, file, (*path, name)) for name, item in data.items()}
        return Tree(trees, keys={name: Tree(name) for name in trees})
    if isinstance(data, (list, tuple)):
        return Tree([_tree_of(item, file, (*path, str(index))) for index, item in enumerate(data)])
    raise RuleError(
        f"a value of type {type(data).__name__} has no place in rules",
        file=file,
        key=key,
        hint="use text, numbers, True, False, lists and dicts",
    )


class _Builder:
    """Builds the tree from parser events, with a stack of its own so that depth costs no recursion."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.root: Tree | None = None
        self.documents = 0
        self.stack: list[tuple[Tree, Tree | None, str | None]] = []  # container, pending key, anchor
        self.anchors: dict[str, Tree] = {}

    def wrong(self, what: str, at: Tree | tuple[int, int], hint: str) -> RuleError:
        line, column = (at.line, at.column) if isinstance(at, Tree) else at
        return RuleError(what, file=self.file, line=line, column=column, hint=hint)

    def add(self, event: Any) -> None:
        if isinstance(event, DocumentStartEvent):
            self.documents += 1
            if self.documents > 1:
                raise self.wrong("a second document begins", self.position(event), "keep one document in a file")
            if event.tags:
                raise self.wrong("a tag directive has no place in a rule file", self.position(event), "remove it")
        elif isinstance(event, AliasEvent):
            if event.anchor not in self.anchors:
                raise self.wrong(
                    f"the alias '*{event.anchor}' names nothing complete", self.position(event), "write the value out"
                )
            known = self.anchors[event.anchor]
            self.attach(Tree(known.value, *self.position(event), known.keys, known.size), event)
        elif isinstance(event, (ScalarEvent, SequenceStartEvent, MappingStartEvent)):
            if getattr(event, "ctag", None) is not None or event.tag is not None:
                raise self.wrong(
                    f"the tag '{event.tag}' has no place in a rule file", self.position(event), "remove it"
                )
            self.begin(event)
        elif isinstance(event, (SequenceEndEvent, MappingEndEvent)):
            tree, _, anchor = self.stack.pop()
            if anchor is not None:
                self.anchors[anchor] = tree
            self.attach(tree, event)

    def begin(self, event: Any) -> None:
        if isinstance(event, ScalarEvent):
            plain = event.style is None or event.style == ""
            tree = Tree(self.scalar(event) if plain else event.value, *self.position(event))
            if event.anchor is not None:
                self.anchors[event.anchor] = tree
            self.attach(tree, event)
            return
        if len(self.stack) >= MAX_DEPTH:
            raise self.wrong("it is nested too deeply", self.position(event), f"use at most {MAX_DEPTH} levels")
        empty: Any = {} if isinstance(event, MappingStartEvent) else []
        self.stack.append((Tree(empty, *self.position(event)), None, event.anchor))

    def attach(self, tree: Tree, event: Any) -> None:
        if not self.stack:
            self.root = tree
            return
        parent, key, anchor = self.stack[-1]
        parent.size += tree.size
        if parent.size > MAX_NODES:
            raise self.wrong(
                f"more than {MAX_NODES} values, aliases expanded", self.position(event), "write a smaller file"
            )
        if isinstance(parent.value, list):
            parent.value.append(tree)
        elif key is None:
            self.check_key(parent, tree)
            self.stack[-1] = (parent, tree, anchor)
        else:
            parent.value[str(key.value)] = tree
            parent.keys[str(key.value)] = key
            self.stack[-1] = (parent, None, anchor)

    def check_key(self, parent: Tree, tree: Tree) -> None:
        if not isinstance(tree.value, str):
            raise self.wrong("a key is not text", tree, "put it in quotes, or correct the indentation")
        if tree.value in parent.value:
            first = parent.keys[tree.value].line
            raise self.wrong(f"the key '{tree.value}' stands here a second time", tree, f"it was given at line {first}")

    def scalar(self, event: Any) -> Any:
        text: str = event.value
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            if len(text) > 40:
                raise self.wrong("the number is too long", self.position(event), "write a smaller number")
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        return float(text) if _FLOAT.fullmatch(text) else text

    @staticmethod
    def position(event: Any) -> tuple[int, int]:
        return event.start_mark.line + 1, event.start_mark.column + 1
