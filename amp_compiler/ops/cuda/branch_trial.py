"""Whether updates run beside the end of the backward: one is tried out beside a product on the device.

Both want multiprocessors, and a product may leave none free while it runs. What is saved is known when it is measured:
so before a step is compiled, a part of its update and repetitions of its dearest product run one behind the other, and
beside each other.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from amp_compiler.ops.cuda.epilogue_numbers import random_like
from amp_compiler.ops.cuda.trying import attempt, seconds_of

logger = logging.getLogger("amp_compiler")
_WORTH_IT = 0.97  # of the time in turn
_REPETITIONS = 64  # of the product, at most
_PRODUCT_SHARE = 2  # how much longer than the update the products take, as there is more left of the backward than that


def try_beside(update: Any, arguments: tuple[Any, ...], product: Any, operands: tuple[Any, ...]) -> str:
    """Why an update is not to run beside a product, in words joined by hyphens; empty where it is.

    Args:
        update: an update operator.
        arguments: of it, with fake tensors on a GPU, for as many weights as are to be tried.
        product: an operator that multiplies.
        operands: of it, with fake tensors.
    """
    device = next(one.device for one in pytree.tree_leaves(operands) if isinstance(one, Tensor))
    if device.type != "cuda":
        return "there-is-no-GPU"

    def trial() -> str:
        in_turn, beside = _seconds(update, _zeros(arguments), product, random_like(operands), device)
        share = beside / in_turn
        logger.info("%s beside %s takes %.2f of the time of both in turn", update, product, share)
        return "" if share < _WORTH_IT else f"takes-{share:.2f}-of-the-time-of-both-in-turn"

    return attempt(trial, device)[0]


def _zeros(given: Any) -> Any:
    """Tensors of zeros, in the layouts of fake ones: nothing is skipped, and no number becomes NaN."""

    def made(one: Tensor) -> Tensor:
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=one.device).zero_()

    return pytree.tree_map_only(Tensor, made, given)


def _seconds(update: Any, arguments: Any, product: Any, operands: Any, device: torch.device) -> tuple[float, float]:
    """Seconds of both in turn, and beside each other."""
    branch = torch.cuda.Stream()

    def multiply() -> None:
        for _ in range(count):
            product(*operands)

    def in_turn() -> None:
        update(*arguments)
        multiply()

    def beside() -> None:
        current = torch.cuda.current_stream()
        branch.wait_stream(current)
        with torch.cuda.stream(branch):
            update(*arguments)
        multiply()
        current.wait_stream(branch)

    count = 1
    one, alone = seconds_of(multiply, device), seconds_of(lambda: update(*arguments), device)
    count = min(max(1, math.ceil(_PRODUCT_SHARE * alone / max(one, 1e-9))), _REPETITIONS)
    return seconds_of(in_turn, device), seconds_of(beside, device)
