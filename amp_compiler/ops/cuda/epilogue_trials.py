"""Whether an operator of `ops.epilogues` is used: it is tried out on the device, against the loops that it replaces.

Which of its epilogues cuBLASLt computes, for which types and layouts, and how fast, differs from version to version and
from GPU to GPU; some are slower than a product and a loop. So each is run on random numbers, once for each form of
call, before a step is compiled.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.cuda import cublaslt
from amp_compiler.ops.cuda.cublaslt import Refused
from amp_compiler.ops.cuda.epilogue_loops import loops_of
from amp_compiler.ops.cuda.epilogue_numbers import Numbers, random_like
from amp_compiler.ops.cuda.trying import attempt, seconds_of
from amp_compiler.ops.epilogues import prepared

logger = logging.getLogger("amp_compiler")
Form = tuple[Any, ...]


class Trials:
    """Tries forms of calls out and remembers what came of it, for as long as the process runs."""

    def __init__(self) -> None:
        self._known: dict[Form, str] = {}
        self._lock = threading.Lock()

    def __call__(self, operator: Any, arguments: Sequence[Any]) -> str:
        """Why an operator is not to be used for a form of call, in words joined by hyphens; empty where it is.

        Args:
            operator: one of `epilogues.OPERATORS`.
            arguments: of it, with fake tensors.
        """
        form = (operator, *(_form(one) for one in arguments))
        with self._lock:
            if form not in self._known:
                found, lasts = _tried(operator, arguments)
                logger.info("%s of %s: %s", operator, form[1:], found or "used")
                if not lasts:
                    return found
                self._known[form] = found
            return self._known[form]


TRIALS = Trials()


def _form(argument: Any) -> Any:
    if not isinstance(argument, Tensor):
        return argument
    return tuple(argument.shape), argument.stride(), argument.dtype, str(argument.device)


def _tried(operator: Any, arguments: Sequence[Any]) -> tuple[str, bool]:
    """The verdict, and whether it would be the same another time."""
    device, library = arguments[0].device, cublaslt.CUBLASLT
    if device.type != library.device or not library.available():
        return "no-cuBLASLt", True
    if torch.are_deterministic_algorithms_enabled():  # nothing is said of the order of an epilogue's sums
        return "not-known-to-be-deterministic", False
    return attempt(lambda: _Trial(operator, arguments).verdict(), device)


class _Trial:
    """One form of call, computed in each of the ways that the library knows."""

    def __init__(self, operator: Any, arguments: Sequence[Any]) -> None:
        self._library, self._operator = cublaslt.CUBLASLT, operator
        self._given = random_like(arguments)
        self._call, self._results = prepared(operator, *self._given)

    def verdict(self) -> str:
        """As `Trials` gives it. The library is told which way is the fastest right one."""
        try:
            right, fault = self._right()
            return fault or self._faster(right)
        except Refused as reason:
            return _refused(reason)

    def _right(self) -> tuple[list[int], str]:
        """The ways that withstand all checks; where there are none, what is wrong with them."""
        checks = Numbers(self._operator, self._given).checks()
        fault, agree = next(checks)
        right, refused = [], None
        for choice in range(self._library.choices(self._call)):
            try:
                right += [choice] if self._withstands(choice, agree) else []
            except Refused as reason:
                refused = reason
        if not right:
            return right, f"wrong:-{fault}" if refused is None else _refused(refused)
        for fault, check in checks:
            right = [choice for choice in right if self._withstands(choice, check)]
            if not right:
                return right, f"wrong:-{fault}"
        return right, ""

    def _withstands(self, choice: int, check: Callable[[Sequence[Tensor]], bool]) -> bool:
        for one in self._results:
            one.fill_(77)  # what is not written must not look like a result
        self._library.run(self._call, choice)
        return check(self._results)

    def _faster(self, right: Sequence[int]) -> str:
        """Have the fastest of these ways preferred; where it is slower than the loops, by how much."""
        device = self._call.out.device
        seconds = {one: seconds_of(functools.partial(self._library.run, self._call, one), device) for one in right}
        best = min(right, key=lambda one: seconds[one])
        loops = seconds_of(loops_of(self._operator, *self._given), device)
        if seconds[best] >= loops:
            return f"slower:-{seconds[best] / loops:.2f}-of-the-time"
        self._library.prefer(self._call, best)
        return ""


def _refused(reason: Refused) -> str:
    return f"refused:-{reason}".replace(" ", "-")
