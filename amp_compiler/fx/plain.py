"""Values of Python that never change."""

import enum
from typing import Any

import torch

_PLAIN = (
    int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice, enum.Enum,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a text or the like, or a tuple of such: it never changes.

    Example:
        >>> is_plain((1, "a")), is_plain([1])
        (True, False)
    """
    return isinstance(value, _PLAIN) or (type(value) is tuple and all(map(is_plain, value)))
