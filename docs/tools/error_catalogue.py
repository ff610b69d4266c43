"""Reads the message of every error from the sources, with its hint, for `docs/errors.md`.

python docs/tools/error_catalogue.py           # prints the table
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from amp_compiler import errors

ROOT = Path(__file__).parents[2]
CLASSES = {
    name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.AmpError)
}
INTERNAL = {"Unrecordable", "LimitError", "_Reached"}  # caught by the library itself
HEAD = """# Errors

Every error that the library raises on purpose is an `AmpError`. Its text says where, what, and what to do:
`WHERE: WHAT; HINT`. The parts are its attributes `where`, `what` and `hint`; what it was raised from is `__cause__`.

```
my.yaml:3: the rule matches no op; use 'aten.linear'
```

To find a message, search for its fixed words; `…` stands for names and numbers. A traceback and a command
name the section behind the text: `see: docs/errors.md#ruleerror`.
`python docs/tools/error_catalogue.py` prints the same table.
"""


@dataclass(frozen=True)
class Message:
    """One place that makes an error."""

    kind: str
    what: str
    hint: str
    place: str


def messages() -> list[Message]:
    """All of them, by class and text."""
    paths = [path for room in ("amp_compiler", "passes") for path in sorted((ROOT / room).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    everywhere: dict[str, ast.AST] = {
        one.name: one for tree in trees.values() for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)
    }
    everywhere |= {name: value for tree in trees.values() for name, value in _constants(tree)}
    kinds = {*CLASSES, *(name for tree in trees.values() for name in _derived(tree))} - INTERNAL
    makers = {one.name: one for tree in trees.values() for one in _makers(tree, kinds)}
    results = {
        Message(kind, what, _text(hint, names), path.relative_to(ROOT).as_posix())
        for path, tree in trees.items()
        for scope in [everywhere | dict(_constants(tree))]
        for node, names in _calls(tree, scope)
        for kind, text, hint in _parts(node, names, kinds, makers)
        for what in [_text(text, names)]
        if what.replace("…", "").strip()
    }
    order = {name: place for place, name in enumerate(CLASSES)}
    return sorted(
        results, key=lambda one: (order.get(one.kind, len(order)), one.kind, one.what.lower(), one.hint, one.place)
    )


def _derived(tree: ast.Module) -> Iterator[str]:
    """Classes of a file that derive from an error of the library."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(
            isinstance(base, ast.Name) and base.id in CLASSES for base in node.bases
        ):
            yield node.name


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _makers(tree: ast.Module, kinds: set[str]) -> Iterator[ast.FunctionDef]:
    """Functions and methods that make an error of the parameters `what` and `hint`."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for one in functions:
        makes = isinstance(one.returns, ast.Name) and one.returns.id in kinds
        if makes and {"what", "hint"} <= {parameter.arg for parameter in one.args.args}:
            yield one


def _calls(tree: ast.Module, scope: dict[str, ast.AST]) -> Iterator[tuple[ast.Call, dict[str, ast.AST]]]:
    """Every call of a file, and what names stand for there: constants, defaults, and what was assigned above."""
    for place in _places(tree.body):
        names = dict(scope)
        for one in ast.walk(place):
            if isinstance(one, ast.arguments) and one.defaults:
                names |= dict(zip((arg.arg for arg in one.args[-len(one.defaults) :]), one.defaults, strict=True))
        nodes = [node for node in ast.walk(place) if isinstance(node, ast.Assign | ast.Call)]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Call):
                yield node, dict(names)
            elif isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value


def _places(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Functions, methods and other statements, each with names of its own."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _places(node.body)
        else:
            yield node


def _parts(
    call: ast.Call, names: dict[str, ast.AST], kinds: set[str], makers: dict[str, ast.FunctionDef]
) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """The class, text and hint of an error that a call makes."""
    parts = {one.arg: one.value for one in call.keywords if one.arg}
    if isinstance(call.func, ast.Name) and call.args:
        default = names.get(call.func.id)
        kind = default.id if isinstance(default, ast.Name) else call.func.id
        if kind in kinds:
            yield kind, call.args[0], parts.get("hint", ast.Constant(""))
            return
    maker = makers.get(getattr(call.func, "attr", getattr(call.func, "id", "")))
    if maker is not None and maker.returns is not None:
        places = [one.arg for one in maker.args.args if one.arg != "self"]
        parts = dict(zip(places[::-1], maker.args.defaults[::-1], strict=False)) | parts
        parts |= dict(zip(places, call.args, strict=False))
        if {"what", "hint"} <= parts.keys() <= set(places):
            yield ast.unparse(maker.returns), parts["what"], parts["hint"]


def _text(node: ast.AST, names: dict[str, ast.AST]) -> str:
    """What an expression says, with `…` in the place of what is known only at run time."""
    if isinstance(node, ast.Constant):
        return str(node.value or "")
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, names) + _text(node.right, names)
    if isinstance(node, ast.IfExp):
        return " / ".join(text for text in (_text(node.body, names), _text(node.orelse, names)) if text != "…") or "…"
    if isinstance(node, ast.Name) and node.id in names:
        return _text(names[node.id], {} if isinstance(names[node.id], ast.Name) else names | {node.id: ast.Pass()})
    if isinstance(node, ast.Attribute) and node.attr == "hint":
        return "what the error says that this one comes from"
    return _called(node, names) if isinstance(node, ast.Call) else "…"


def _called(call: ast.Call, names: dict[str, ast.AST]) -> str:
    """What a call returns, of a function whose texts can be read; `….get(key, text)` is one of a table."""
    name = getattr(call.func, "id", "")
    if name == "nearest":  # of names that are known
        otherwise = [_text(one, names) for one in call.args[2:]]
        return ", ".join(["did you mean '…'? / use one of …", *otherwise])
    if getattr(call.func, "attr", "") == "get" and len(call.args) == 2:
        return _text(call.args[1], names)
    function = names.get(name)
    returns = [one for one in ast.walk(function) if isinstance(one, ast.Return)] if function is not None else []
    texts = dict.fromkeys(_text(one.value, {}) for one in returns if one.value is not None)
    return " / ".join(text for text in texts if text != "…") or "…"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())


def page() -> str:
    """The page of the reference."""
    results = messages()
    parts = [HEAD]
    for kind in dict.fromkeys(one.kind for one in results):
        known = CLASSES.get(kind)
        about = (inspect.getdoc(known) or "").partition("\n\n")[0] if known else "An error of one place."
        parents = [base.__name__ for base in known.__bases__ if base.__name__ in CLASSES] if known else []
        note = f" Catch it as `{'` or `'.join([kind, *parents])}`." if parents else ""
        rows = [f"| {_cell(one.what)} | {_cell(one.hint)} | `{one.place}` |" for one in results if one.kind == kind]
        parts.append(
            f"## {kind}\n\n{about}{note}\n\n| what is wrong | what to do | raised in |\n|---|---|---|\n"
            + "\n".join(rows)
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    for one in messages():
        print(f"{one.kind}: {one.what}; {one.hint or 'NO HINT'}  ({one.place})")
