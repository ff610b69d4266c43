"""Example arguments as users give them."""

from typing import Any

import torch

from amp_compiler.errors import AmpError


def split_example(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Example arguments as `(args, kwargs)`.

    Raises:
        AmpError: where they are neither a tuple, a dict, a pair of both nor a tensor.
    """
    if example is None:
        return (), {}
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        if len(example) == 2 and isinstance(example[0], (tuple, list)) and isinstance(example[1], dict):
            return tuple(example[0]), dict(example[1])
        return tuple(example), {}
    raise AmpError(
        f"example_args is a {type(example).__name__}",
        hint="pass a tuple of arguments, a dict of keyword arguments, or both",
    )
