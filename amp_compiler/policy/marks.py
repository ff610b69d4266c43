"""Places in a rule file, and the errors that name them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from amp_compiler.errors import RuleError


@dataclass(frozen=True)
class Mark:
    """A place in a rule file, for errors and for `Rule.where`.

    Args:
        file: name of the file as shown.
        line: line from 1; `None` for rules that have none.
        column: column from 1.
        key: dotted path of the key.
    """

    file: str = ""
    line: int | None = None
    column: int | None = None
    key: str = ""

    @property
    def where(self) -> str:
        """`file:line`; for a dict, which has no lines, `<dict>:rules.0`."""
        return f"{self.file}:{self.line if self.line is not None else self.key}"

    def error(self, what: str, hint: str) -> RuleError:
        """The error that says `what` at this place."""
        return RuleError(what, file=self.file, line=self.line, column=self.column, key=self.key, hint=hint)


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The hint for a wrong name: the nearest known one, or all of them where they are few.

    Example:
        >>> nearest("matmull", ["matmul", "loss"])
        "did you mean 'matmul'?"
    """
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    listed = f"use one of {', '.join(names)}" if 0 < len(names) <= 40 else ""
    return "; ".join(part for part in (listed, otherwise) if part)


def error_at(where: str, what: str, hint: str) -> RuleError:
    """An error at a rule of which only `Rule.where` is known.

    Args:
        where: `file:line`, or `<dict>:rules.0`.
        what: what is wrong.
        hint: what to do.
    """
    file, _, place = where.rpartition(":")
    line = int(place) if place.isdecimal() else None
    return RuleError(what, file=file, line=line, key="" if line is not None else place, hint=hint)
