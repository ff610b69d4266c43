"""What `amp-compiler passes` prints: the passes of each pipeline, or all that one pass says of itself."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from amp_compiler.passes import find_pass
from amp_compiler.passes.base import InPlacePass, Pass
from amp_compiler.passes.pipeline import PIPELINES


def catalogue() -> Iterator[str]:
    """A line for each pipeline and for each of its passes, in the order of the run."""
    for pipeline in PIPELINES:
        yield f"{pipeline.name}: {pipeline.about}"
        for name in pipeline.names:
            kind = find_pass(name)
            works, numbers, skip = traits(kind)
            yield f"  {name:<22} {works:<9}  {numbers:<7}  {skip:<6}  {summary(kind)}"


def entry(name: str) -> Iterator[str]:
    """All that one pass says of itself.

    Args:
        name: of the pass.

    Raises:
        PassError: no pass has this name.
    """
    kind = find_pass(name)
    yield f"{name}: {facts(kind)}"
    yield ""
    yield inspect.getdoc(kind) or ""


def traits(kind: type[Pass[Any]]) -> tuple[str, str, str]:
    """How a pass works on its subject, whether it keeps the numbers, and whether it may be left out."""
    return (
        "in place" if issubclass(kind, InPlacePass) else "makes new",
        "kept" if kind.exact else "changed",
        "may be" if kind.skippable else "",
    )


def summary(kind: type[Pass[Any]]) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def facts(kind: type[Pass[Any]]) -> str:
    """The file, the traits, and those options that the docstring leaves out."""
    works, numbers, skip = traits(kind)
    docstring = inspect.getdoc(kind) or ""
    words = [
        f"`{kind.__module__.removeprefix('amp_compiler.').replace('.', '/')}.py`",
        "in place" if works == "in place" else "gives a new object",
        "changes no number" if numbers == "kept" else "changes numbers",
        *(["may be skipped"] if skip else []),
        *(f"option `{one}`" for one in _options(kind) if f"\n    {one.partition(':')[0]}:" not in docstring),
    ]
    return " · ".join(words)


def _options(kind: type[Pass[Any]]) -> list[str]:
    """The fields of a pass as `name: type = default`."""
    options = []
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # every pass is a dataclass
        plain = isinstance(field.default, str | int | float | bool | tuple | None)
        default = f" = {field.default!r}" if field.default is not dataclasses.MISSING and plain else ""
        options.append(f"{field.name}: {field.type}{default}")
    return options
