"""How something is tried out on a device, which must not fail for that, and how long a call takes there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from amp_compiler.errors import first_line

_LAUNCHES, _ROUNDS = 10, 3


def attempt(trial: Callable[[], str], device: torch.device) -> tuple[str, bool]:
    """The verdict of a trial, in words joined by hyphens and empty where all is well, and whether it lasts.

    Args:
        trial: gives the verdict, which would be the same another time. What it raises is one too.
        device: on which it runs.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and torch.cuda.is_current_stream_capturing():
        return "not-tried-within-a-capture", False
    current: AbstractContextManager[Any] = torch.cuda.device(device) if on_gpu else nullcontext()
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), current:
            return trial(), True
    except torch.OutOfMemoryError:
        return "no-memory-to-try-it", False
    except RuntimeError as cause:
        return f"it failed: {first_line(cause)}".replace(" ", "-").replace(",", ""), False
    finally:
        if on_gpu:
            torch.cuda.empty_cache()  # what a trial took is not the step's


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Time of one call on a GPU, the least of a few rounds of several.

    Args:
        run: the call.
        device: the GPU, which is the current one.
    """
    for _ in range(_ROUNDS):
        run()
    times: list[float] = []
    for _ in range(_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_LAUNCHES):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / _LAUNCHES)
    return min(times)
