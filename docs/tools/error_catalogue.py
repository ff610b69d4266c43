"""Reads the message of every error from the sources, with its hint, for `docs/errors.md`.

python docs/tools/error_catalogue.py           # prints the table
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from amp_compiler import errors

ROOT = Path(__file__).parents[2]
CLASSES = {
    name: one for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.AmpError)
}
INTERNAL = {"Unrecordable", "LimitError", "_Reached"}  # caught by the library itself
SHARED = "… ……, so torch.export cannot take it as one graph: …"  # behind the texts of the table
PLACE, NOWHERE = "the function that a call stands in", ast.FunctionDef(name="")
TABLES = {"_Kind": "CaptureError"}  # rows of `what` and `hint` of which one error is made
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
    scopes = _scopes(trees, everywhere)
    kinds = {*CLASSES, *(name for tree in trees.values() for name in _derived(tree))} - INTERNAL
    makers = {one.name: one for path, tree in trees.items() for one in _makers(tree, kinds, scopes[path])}
    passed = _passed(trees, scopes)
    results = {
        Message(kind, what, _text(hint, names), path.relative_to(ROOT).as_posix())
        for path, tree in trees.items()
        for node, names in _calls(tree, scopes[path], passed)
        for kind, text, hint in _parts(node, names, kinds, makers)
        for what in [_text(text, names)]
        if what != SHARED and (re.search(r"\w", what) or (names[PLACE].name not in makers and what.strip("… ")))
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


def _scopes(trees: dict[Path, ast.Module], everywhere: dict[str, ast.AST]) -> dict[Path, dict[str, ast.AST]]:
    """By file, what names stand for in it: texts of its own, those that it imports, and functions of any file."""
    own = {
        path: {name: ast.Constant(_text(value, everywhere | held)) for name, value in held.items() if _is_text(value)}
        for path, tree in trees.items()
        for held in [dict(_constants(tree))]
    }
    modules = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."): texts for path, texts in own.items()
    }
    return {
        path: everywhere
        | dict(_constants(tree))
        | {
            alias.asname or alias.name: texts[alias.name]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for texts in [modules.get((node.module or "").replace("amp_compiler.passes", "passes"), {})]
            for alias in node.names
            if alias.name in texts
        }
        | own[path]
        for path, tree in trees.items()
    }


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _passed(trees: dict[Path, ast.Module], scopes: dict[Path, dict[str, ast.AST]]) -> dict[str, ast.Constant]:
    """By function with a parameter `hint`, what all of its callers pass as that."""
    places = {
        one.name: ([arg.arg for arg in one.args.args].index("hint"), one)
        for tree in trees.values()
        for one in ast.walk(tree)
        if isinstance(one, ast.FunctionDef) and any(arg.arg == "hint" for arg in one.args.args)
    }
    texts: dict[str, dict[str, None]] = {name: {} for name in places}
    for path, tree in trees.items():
        for call, names in _calls(tree, scopes[path], {}):
            name = getattr(call.func, "id", "")
            if name in places:
                at, function = places[name]
                hints = [one.value for one in call.keywords if one.arg == "hint"] + call.args[at : at + 1]
                default = function.args.defaults[at - len(function.args.args) :][:1] if function.args.defaults else []
                for one in (hints or default)[:1]:
                    texts[name][_text(one, names)] = None
    joined = {name: " / ".join(text for text in held if text != "…") for name, held in texts.items()}
    return {name: ast.Constant(text) for name, text in joined.items() if text}


def _makers(tree: ast.Module, kinds: set[str], scope: dict[str, ast.AST]) -> Iterator[ast.FunctionDef]:
    """Functions and methods that make an error of the parameters `what` and `hint`, with their defaults as texts."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for one in functions:
        makes = isinstance(one.returns, ast.Name) and one.returns.id in kinds
        if makes and {"what", "hint"} <= {parameter.arg for parameter in one.args.args}:
            one.args.defaults = [ast.Constant(_text(default, scope)) for default in one.args.defaults]
            yield one


def _calls(
    tree: ast.Module, scope: dict[str, ast.AST], passed: dict[str, ast.Constant]
) -> Iterator[tuple[ast.Call, dict[str, ast.AST]]]:
    """Every call of a file, and what names stand for there: constants, defaults, and what was passed or assigned."""
    for place in _places(tree.body):
        names = {**scope, PLACE: place if isinstance(place, ast.FunctionDef) else NOWHERE}
        for one in ast.walk(place):
            if isinstance(one, ast.arguments) and one.defaults:
                names |= dict(zip((arg.arg for arg in one.args[-len(one.defaults) :]), one.defaults, strict=True))
        names |= {"hint": passed[names[PLACE].name]} if names[PLACE].name in passed else {}
        nodes = [node for node in ast.walk(place) if isinstance(node, ast.Assign | ast.Call)]
        for node in sorted(nodes, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Call):
                yield node, dict(names)
            elif isinstance(node.targets[0], ast.Name):
                names[node.targets[0].id] = node.value
            elif isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=False)  # of `a, *b` the first alone
                names |= {target.id: value for target, value in pairs if isinstance(target, ast.Name)}


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
    if getattr(call.func, "id", "") in TABLES and len(call.args) > 1:
        yield TABLES[call.func.id], call.args[0], call.args[1]
    elif isinstance(call.func, ast.Name) and call.args:
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
        return "".join(str(one.value) if isinstance(one, ast.Constant) else _filled(one, names) for one in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left, names) + _text(node.right, names)
    if isinstance(node, ast.IfExp):
        return (
            " / ".join(text for text in (_text(node.body, names), _text(node.orelse, names)) if text not in ("…", ""))
            or "…"
        )
    if isinstance(node, ast.Name) and node.id in names:
        return _text(names[node.id], {} if isinstance(names[node.id], ast.Name) else names | {node.id: ast.Pass()})
    if isinstance(node, ast.Attribute) and node.attr == "hint":
        return "what the error says that this one comes from"
    if isinstance(node, ast.Attribute) and node.attr == "refusal":
        return "what stands behind `refuse:` in the rule"
    return _called(node, names) if isinstance(node, ast.Call) else "…"


def _filled(part: ast.expr, names: dict[str, ast.AST]) -> str:
    """What stands in the braces of a text: a constant's text, else `…`."""
    inner = part.value if isinstance(part, ast.FormattedValue) else part
    known = names.get(inner.id) if isinstance(inner, ast.Name) else None
    if isinstance(known, ast.IfExp) and all(_is_text(one) and _text(one, names) for one in (known.body, known.orelse)):
        return _text(known, names)
    return _text(known, names) if known is not None and inner.id.isupper() and _is_text(known) else "…"


def _called(call: ast.Call, names: dict[str, ast.AST]) -> str:
    """What a call returns, of a function whose texts can be read; `….get(key, text)` is one of a table."""
    name = getattr(call.func, "id", "")
    if name == "nearest":  # of names that are known
        otherwise = [_text(one, names) for one in call.args[2:]]
        return ", ".join(["did you mean '…'? / use one of …", *otherwise])
    if getattr(call.func, "attr", "") == "join" and isinstance(call.func.value, ast.Constant):
        return call.func.value.value.join(_text(one, names) for one in getattr(call.args[0], "elts", [call]))
    if getattr(call.func, "attr", "") == "get" and len(call.args) == 2:
        return _text(call.args[1], names)
    function = names.get(name)
    returns = [one for one in ast.walk(function) if isinstance(one, ast.Return)] if function is not None else []
    texts = dict.fromkeys(_text(one.value, {}) for one in returns if one.value is not None)
    return " / ".join(text for text in texts if text != "…") or "…"


def _cell(text: str) -> str:
    return re.sub("…+", "…", " ".join(text.replace("|", "\\|").replace("<", "&lt;").split()))


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
