"""Value classes of which a graph holds one a node: frozen to the type checker, quick to make."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_class(cls: type[_T]) -> type[_T]:
    """A dataclass with slots, compared and hashed by its fields, that nobody may change.

    mypy refuses an assignment to a field. At run time nothing does: a frozen dataclass sets each field through
    `object.__setattr__`, and takes four times as long to make.

    Args:
        cls: the class.

    Example:
        >>> @value_class
        ... class Point:
        ...     x: int
        ...     y: int = 0
        >>> Point(1) == Point(1, 0), len({Point(1), Point(1)})
        (True, 1)
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
