"""The docstrings of the public API say what a reader looks for: arguments, what is returned and raised, examples."""

import doctest
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import amp_compiler as amp
from amp_compiler.errors import AmpError

PUBLIC = {name: getattr(room, name) for room in (amp, amp.callbacks) for name in room.__all__}
FUNCTIONS = [name for name, one in PUBLIC.items() if inspect.isfunction(one)]
CLASSES = [name for name, one in PUBLIC.items() if inspect.isclass(one)]
KINDS = (amp.LossScale, amp.callbacks.Callback)  # which users make; others come as results
MADE_BY_USERS = [name for name in CLASSES if issubclass(PUBLIC[name], KINDS)]
PUBLIC["TrainingStep.to_html"] = amp.TrainingStep.to_html


def sections(text: str) -> dict[str, str]:
    """The sections of a docstring in Google style, by name."""
    parts = re.split(r"^([A-Z][A-Za-z]+):$", inspect.cleandoc(text), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(text: str) -> set[str]:
    """The arguments that a section tells of; several may share a line."""
    heads = re.findall(r"^    (\w+(?:, \w+)*)(?: \([^)]*\))?:", text, flags=re.MULTILINE)
    return {name for head in heads for name in head.split(", ")}


def parameters(function: Any) -> set[str]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {name for name, one in inspect.signature(function).parameters.items() if one.kind not in kinds} - {
        "self",
        "cls",
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_takes_gives_and_raises(name: str) -> None:
    function = PUBLIC[name]
    parts = sections(function.__doc__)
    assert parameters(function) == described(parts["Args"])
    assert "Raises" in parts and "Example" in parts
    assert "Returns" in parts or inspect.signature(function).return_annotation in (None, "None")


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_says_what_it_holds(name: str) -> None:
    kind = PUBLIC[name]
    parts = sections(kind.__doc__)
    own = {one for one in vars(kind).get("__annotations__", {}) if not one.startswith("_") and one in parameters(kind)}
    inherited = issubclass(kind, AmpError) and "__init__" not in vars(kind)
    assert inherited or own <= described(parts.get("Args", "") + parts.get("Attributes", ""))
    assert name not in MADE_BY_USERS or inspect.isabstract(kind) or "Example" in parts


def methods() -> Iterator[tuple[str, Any]]:
    for name in CLASSES:
        for method, one in vars(PUBLIC[name]).items():
            function = getattr(one, "fget", None) or getattr(one, "__func__", one)
            if not method.startswith("_") and inspect.isfunction(function):
                yield f"{name}.{method}", function


@pytest.mark.parametrize(
    ("name", "function"), list(methods()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_method_speaks_of_its_arguments(name: str, function: Any) -> None:
    text = inspect.getdoc(function) or ""
    shared = f"as in `LossScale.{function.__name__}`" in text
    assert text and (
        shared or parameters(function) <= described(sections(text).get("Args", "")) | set(re.findall(r"`(\w+)`", text))
    )


RUN = ["AmpError", "LossScaleError", "load_rules", "read_run", "to_html", "to_svg", "TrainingStep.to_html"]


@pytest.mark.parametrize("name", [*MADE_BY_USERS, *RUN])
def test_the_example_runs(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = PUBLIC[name]
    (test,) = doctest.DocTestFinder(recurse=False).find(one, name, globs=dict(vars(inspect.getmodule(one))))
    assert inspect.isabstract(one) or test.examples
    assert not doctest.DocTestRunner().run(test).failed
