"""What Inductor is to open operators into, where that is better than what it would."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from amp_compiler.backends import wide_norms as norms

Decomposition = Callable[..., Any]
_MAX_POOL = torch.ops.aten.max_pool2d_with_indices_backward.default
# Another text whenever one of these functions may give something else.
IDENTITY = hashlib.sha256(b"".join(Path(str(one)).read_bytes() for one in (__file__, norms.__file__))).hexdigest()


def own_decompositions(theirs: Mapping[Any, Decomposition]) -> dict[Any, Decomposition]:
    """Those that take the place of Inductor's.

    Args:
        theirs: Inductor's, by operator.
    """
    table = norms.wide_norms(theirs)
    if _MAX_POOL in theirs:
        table[_MAX_POOL] = _max_pool_backward(theirs[_MAX_POOL])
    return table


def _max_pool_backward(theirs: Decomposition) -> Decomposition:
    """The gradient of a max-pool, left whole on a CPU where its windows do not overlap.

    torch 2.13 opens it into a scatter in FP32, with places in 64 bits. As it is, it becomes a loop that gathers; where
    windows overlap, that loop takes Inductor seconds to write and is no faster.
    """

    def opened(grad: Any, image: Any, kernel: Sequence[int], stride: Sequence[int], *rest: Any) -> Any:
        sizes, steps = (list(kernel) * 2)[:2], (list(stride or kernel) * 2)[:2]
        apart = all(step >= size for size, step in zip(sizes, steps, strict=True))
        if apart and image.device.type == "cpu":
            return NotImplemented
        return theirs(grad, image, kernel, stride, *rest)

    return opened
