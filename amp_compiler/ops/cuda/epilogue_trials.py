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
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import first_line
from amp_compiler.ops import epilogues
from amp_compiler.ops.cuda import cublaslt
from amp_compiler.ops.cuda.cublaslt import Call, Refused
from amp_compiler.ops.epilogues import ACTIVATION, GELU, GRADIENT, WITH_SUM, composed, prepared

logger = logging.getLogger("amp_compiler")
_LAUNCHES, _ROUNDS = 10, 3
_SEED = 0
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
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "not-tried-within-a-capture", False
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), _on(device):
            return _compared(operator, arguments), True
    except torch.OutOfMemoryError:
        return "no-memory-to-try-it", False
    except RuntimeError as cause:
        return f"it failed: {first_line(cause)}".replace(" ", "-").replace(",", ""), False
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what a trial took is not the step's


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _compared(operator: Any, arguments: Sequence[Any]) -> str:
    library = cublaslt.CUBLASLT
    given = _numbers(operator, arguments)
    call, results = prepared(operator, *given)
    expected, spread = composed(operator, *given), _spread(operator, *given)
    try:
        right, refused = [], None
        for choice in range(library.choices(call)):
            try:
                _run(library, call, results, choice)
            except Refused as reason:
                refused = reason
                continue
            if _agrees(operator, given, results, expected, spread):
                right.append(choice)
        if not right:
            return _refused(refused) if refused is not None else "wrong:-other-numbers"
        if GELU in given:
            right = [choice for choice in right if _is_by_tanh(library, call, choice, operator, given, results)]
            if not right:
                return "wrong:-another-GELU"
        given[0][1, 0] = torch.nan
        if operator is WITH_SUM and not given[2]:
            given[1][0, 1] = torch.nan
        expected = composed(operator, *given)
        right = [choice for choice in right if _spreads_nan(library, call, choice, operator, given, results, expected)]
        if not right:
            return "wrong:-NaN-is-lost-or-made"
        seconds = {
            choice: seconds_of(functools.partial(library.run, call, choice), call.out.device) for choice in right
        }
        best = min(right, key=lambda one: seconds[one])
        loops = seconds_of(_loops(operator, *given), call.out.device)
        if seconds[best] >= loops:
            return f"slower:-{seconds[best] / loops:.2f}-of-the-time"
        library.prefer(call, best)
    except Refused as reason:
        return _refused(reason)
    return ""


def _refused(reason: Refused) -> str:
    return f"refused:-{reason}".replace(" ", "-")


def _run(library: Any, call: Call, results: Sequence[Tensor], choice: int) -> None:
    """Into what holds other numbers before: what is not written must not look like a result."""
    for one in results:
        one.fill_(77)
    library.run(call, choice)


def _loops(operator: Any, left: Tensor, right: Tensor, *rest: Any) -> Callable[[], Any]:
    """What would run in the place of an operator: without a mask, as ReLU's gradient reads its result."""
    if operator is WITH_SUM or GELU in rest:
        return functools.partial(composed, operator, left, right, *rest)
    if operator is ACTIVATION:
        return lambda: torch.relu(torch.mm(left, right) if rest[0] is None else torch.addmm(rest[0], left, right))
    result = epilogues.bits_of(rest[0], right.shape[1]).to(left.dtype)

    def gradient() -> Any:
        found = torch.ops.aten.threshold_backward.default(torch.mm(left, right), result, 0)
        return found, found.sum(0) if rest[2] else None

    return gradient


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Time of one call on a device, the least of a few rounds of several."""
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


def _numbers(operator: Any, arguments: Sequence[Any]) -> list[Any]:
    """Random operands whose product is of about 1, drawn beside the user's own random numbers."""
    device = arguments[0].device
    generator = torch.Generator(device).manual_seed(_SEED)
    made = []
    for place, one in enumerate(arguments):
        if not isinstance(one, Tensor):
            made.append(one)
            continue
        values = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=device)
        if one.dtype is torch.uint8:
            made.append(values.random_(256, generator=generator))
            continue
        values.normal_(generator=generator)
        made.append(values.mul_(one.shape[0] ** -0.5) if place == 1 else values)
    return made


def _spread(operator: Any, left: Tensor, right: Tensor, *rest: Any) -> tuple[Any, Any]:
    """For each result, how large what it is made of may be: see `_near`."""
    if operator is WITH_SUM:
        return 0.0, 0.0
    product = torch.mm(left, right) if operator is GRADIENT or rest[0] is None else torch.addmm(rest[0], left, right)
    if operator is ACTIVATION:
        return product.float().abs_(), product.float().abs_()
    gradient = composed(operator, left, right, *rest)[0] if rest[2] else None
    return product.float().abs_(), 0.0 if gradient is None else gradient.float().square_().sum(0).sqrt_()


def _agrees(
    operator: Any, given: Sequence[Any], results: Sequence[Tensor], expected: Sequence[Tensor], spread: Sequence[Any]
) -> bool:
    if not _near(results[0], expected[0], spread[0]):
        return False
    if operator is ACTIVATION and given[3] != GELU:
        columns = results[0].shape[1]
        found, wanted = (epilogues.bits_of(one, columns) for one in (results[1], expected[1]))
        eps = torch.finfo(results[0].dtype).eps
        return bool(((found == wanted) | (spread[1] < eps / 8)).all())  # about 0 the sign is that of the last sum
    return _near(results[1], expected[1], spread[1])


def _near(found: Tensor, expected: Tensor, spread: Any) -> bool:
    """Whether two roundings explain a difference.

    One side rounds what the other does not (`spread`; the slope of GELU is at most 1.13), and both round their result.
    So they differ by at most one unit in the last place (`eps`) of each. Twice that is allowed, and an eighth of a unit
    of 1, for sums in FP32 in another order and for a hyperbolic tangent in hardware. Sums over rows differ by what was
    rounded in each row, which goes with the root of the sum of squares.
    """
    eps = torch.finfo(expected.dtype).eps
    room = 2 * eps * (expected.float().abs() + spread) + eps / 8
    return bool(((found.float() - expected.float()).abs() <= room).all())


def _is_by_tanh(
    library: Any, call: Call, choice: int, operator: Any, given: Sequence[Any], results: Sequence[Tensor]
) -> bool:
    """Whether GELU is the one by the hyperbolic tangent. No element by itself tells: both are within its rounding."""
    _run(library, call, results, choice)
    argument, found = (results[1] if operator is ACTIVATION else given[2]).float(), results[0].float()
    away = []
    for form in ("tanh", "none"):
        if operator is ACTIVATION:
            expected = torch.nn.functional.gelu(argument, approximate=form)
        else:
            gradient = torch.mm(given[0], given[1]).float()
            expected = torch.ops.aten.gelu_backward.default(gradient, argument, approximate=form)
        away.append((found - expected).square().sum(dtype=torch.float64))
    return bool(away[0] < away[1])


def _spreads_nan(
    library: Any, call: Call, choice: int, operator: Any, given: Sequence[Any], results: Sequence[Tensor],
    expected: Sequence[Tensor],
) -> bool:  # fmt: skip
    """Whether NaN comes through where it does in the loops, and nowhere else: it tells that a step has overflowed."""
    _run(library, call, results, choice)
    pairs = list(zip(results, expected, strict=True))
    if operator is ACTIVATION and given[3] != GELU:
        columns = results[0].shape[1]
        row = [epilogues.bits_of(one[1:2], columns) for one in pairs.pop()]
        if not torch.equal(*row):
            return False
    return all(torch.equal(found.isnan(), wanted.isnan()) for found, wanted in pairs)
