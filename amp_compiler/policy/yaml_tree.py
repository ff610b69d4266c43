"""YAML text, or plain Python data, as a small tree that knows line and column of every key and value.

Nothing is ever constructed from the text but text, numbers, truth values, lists and mappings. Other tags are refused,
aliases are counted by what they expand to, and plain scalars follow YAML 1.2: `on`, `yes` and `off` are text, no truth
values.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from amp_compiler.errors import RuleError

MAX_BYTES = 1 << 20
MAX_NODES = 50_000  # the op table of this package, the largest file that is read, has about 3,000
MAX_DEPTH = 32

_WORDS = ("null", "bool", "int", "float")  # tags of YAML for scalars that are no text
_TEXTS = ("str", "timestamp", "merge", "value")  # what is a date, `<<` or `=` to YAML is text here
_LONGEST = 40  # characters of a number


@dataclass(slots=True)
class Tree:
    """A key or value of a rule file.

    Args:
        value: text, number, truth value or `None` of a scalar; a list of trees; or a mapping of text to trees.
        line: line in the file from 1; `None` for data that comes from Python.
        column: column from 1.
        keys: of a mapping, the trees of its keys, for their positions.
    """

    value: Any
    line: int | None = None
    column: int | None = None
    keys: dict[str, Tree] = field(default_factory=dict)

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
    reader = _Reader(file)
    try:
        node = reader.yaml.compose(io.StringIO(text))
        return Tree(None, 1, 1) if node is None else reader.tree(node)
    except YAMLError as cause:
        mark = getattr(cause, "problem_mark", None) or getattr(cause, "context_mark", None)
        parts = [part for part in (getattr(cause, "context", None), getattr(cause, "problem", None)) if part]
        problem = ", ".join(parts) or str(cause).splitlines()[0]
        raise RuleError(
            f"this is not YAML: {problem}",
            file=file,
            line=None if mark is None else mark.line + 1,
            column=None if mark is None else mark.column + 1,
            hint="correct the syntax",
        ) from cause
    except (ValueError, OverflowError, RecursionError, LookupError, AttributeError, TypeError, AssertionError) as cause:
        # The parser lets these escape on malformed escapes and directives, without a position.
        raise RuleError(f"this is not YAML: {cause}", file=file, hint="correct the syntax") from cause


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


def tree_error(what: str, file: str, at: Tree, hint: str) -> RuleError:
    """The error that says what is wrong at a place in a file."""
    return RuleError(what, file=file, line=at.line, column=at.column, hint=hint)


class _Reader:
    """Makes trees of the nodes of a document.

    Args:
        file: its name for error messages.
    """

    def __init__(self, file: str) -> None:
        self.file, self.size = file, 0
        self.yaml = YAML(typ="safe", pure=True)
        self.yaml.composer.warn_double_anchors = False  # the later one counts

    def tree(self, node: Any, depth: int = 0) -> Tree:
        """The tree of a node, what its aliases stand for written out."""
        tree = Tree(None, node.start_mark.line + 1, node.start_mark.column + 1)
        self.size += 1
        if self.size > MAX_NODES:
            raise tree_error(f"more than {MAX_NODES} values, aliases expanded", self.file, tree, "write a smaller file")
        if depth >= MAX_DEPTH:
            raise tree_error("it is nested too deeply", self.file, tree, f"use at most {MAX_DEPTH} levels")
        tag = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if tag == "map":
            tree.value = {}
            for key, value in node.value:
                self.add(tree, self.tree(key, depth + 1), self.tree(value, depth + 1))
        elif tag == "seq":
            tree.value = [self.tree(item, depth + 1) for item in node.value]
        elif tag in _TEXTS and isinstance(node.value, str):
            tree.value = node.value
        elif tag in _WORDS:
            if len(node.value) > _LONGEST:
                raise tree_error("the number is too long", self.file, tree, "write a smaller number")
            tree.value = self.yaml.constructor.construct_object(node)
        else:
            raise tree_error(f"the tag '{node.tag}' has no place in a rule file", self.file, tree, "remove it")
        return tree

    def add(self, parent: Tree, key: Tree, value: Tree) -> None:
        """Add an entry to a mapping."""
        if not isinstance(key.value, str):
            raise tree_error("a key is not text", self.file, key, "put it in quotes, or correct the indentation")
        if key.value in parent.value:
            first = parent.keys[key.value].line
            what = f"the key '{key.value}' stands here a second time"
            raise tree_error(what, self.file, key, f"remove it: the first is at line {first}")
        parent.value[key.value], parent.keys[key.value] = value, key
