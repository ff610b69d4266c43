"""`Ranks`: the processes that train one model, and what they tell one another beside their gradients."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from amp_compiler.errors import RankError, first_line

Result = TypeVar("Result")
_ERROR = "error"  # key of what a rank says that failed


class Ranks:
    """The processes of a group.

    What they tell one another goes through the CPU, whatever the gradients go through, so that no message waits for a
    device. A group without a CPU backend (NCCL alone) gets a second one over gloo.

    Args:
        group: an initialized group that this process is in.

    Attributes:
        name: torch's name of the group, as collectives in a graph take it.
        size: number of ranks.
        rank: of this process in the group, from 0.
        host: the group by which they tell one another what does not wait for a device.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.name = group, group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.host = group
        if "cpu:" not in dist.get_backend_config(group):
            ranks = dist.get_process_group_ranks(group)
            self.host = self._send(lambda: dist.new_group(ranks, backend="gloo", use_local_synchronization=True))

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks for all of them."""
        return self.rank == 0

    def numbers(self, number: int) -> tuple[int, ...]:
        """One whole number of each rank, in their order; all wait for all.

        Raises:
            RankError: a rank did not come.
        """
        own = torch.tensor([number], dtype=torch.int64)
        received = [torch.empty_like(own) for _ in range(self.size)]
        self._send(lambda: dist.all_gather(received, own, group=self.host))
        return tuple(int(one) for one in received)

    def exchange(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What each rank says, in their order; all wait for all.

        Args:
            message: plain values that can be pickled.

        Raises:
            RankError: a rank says that it failed (its own error is raised there), or did not come.
        """
        received: list[Any] = [None] * self.size
        self._send(lambda: dist.all_gather_object(received, dict(message), group=self.host))
        failed = [rank for rank, one in enumerate(received) if _ERROR in one]
        if failed and _ERROR not in message:
            raise RankError(
                f"rank {failed[0]} failed: {received[failed[0]][_ERROR]}", hint="correct that; no rank went on"
            )
        return received

    def each(self, run: Callable[[], Result]) -> list[Result]:
        """What a function gives on each rank, in their order; where it fails on one, that is an error on all of them.

        Args:
            run: gives a plain value that can be pickled, without a message of its own.

        Raises:
            RankError: it failed on another rank, or a rank did not come.
        """
        with self.announcing_failure():
            return [one["result"] for one in self.exchange({"result": run()})]

    def failed(self, error: BaseException) -> None:
        """Let the others, who come to `exchange`, know that this rank will not go on."""
        self.exchange({_ERROR: f"{type(error).__name__}: {error}"})

    @contextlib.contextmanager
    def announcing_failure(self, announce: Callable[[Exception], None] | None = None) -> Iterator[None]:
        """Within it the ranks come to one `exchange`; where this one fails before, the others are told there.

        Args:
            announce: tells them, where it takes more than `failed`.
        """
        try:
            yield
        except RankError:  # raised on every rank
            raise
        except Exception as error:
            with contextlib.suppress(RankError):  # the others are gone: the first error says more
                (announce or self.failed)(error)
            raise

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the first one's values of these tensors, in place."""
        with torch.no_grad():
            for tensor in tensors:
                if tensor.numel():
                    self._broadcast(tensor)

    def gather(self, part: Tensor) -> Tensor:
        """The equal parts of all ranks behind one another; all wait for all.

        Args:
            part: [n], of one type and length on all ranks.

        Raises:
            RankError: a rank did not come.
        """
        received = [torch.empty_like(part) for _ in range(self.size)]
        self._send(lambda: dist.all_gather(received, part, group=self.group))
        return torch.cat(received)

    def _broadcast(self, tensor: Tensor) -> None:
        packed = tensor.detach().contiguous()
        sent = packed.reshape(-1).view(torch.uint8)  # whatever the type: not all can be sent
        self._send(lambda: dist.broadcast(sent, group=self.group, group_src=0))
        if not self.is_first and packed.data_ptr() != tensor.data_ptr():
            tensor.copy_(packed)

    def guarded(self, run: Callable[[], Result]) -> Result:
        """Run what sends messages, with an error of these named.

        Raises:
            RankError: a message did not come.
        """
        try:
            return run()
        except RuntimeError as cause:
            if not _is_of_messages(cause):
                raise
            raise self._lost(cause) from cause

    def _send(self, run: Callable[[], Result]) -> Result:
        try:
            return run()
        except (RuntimeError, ValueError) as cause:
            raise self._lost(cause) from cause

    def _lost(self, cause: Exception) -> RankError:
        return RankError(
            f"rank {self.rank} of {self.size} lost the others: {first_line(cause)}",
            hint="see the error of the rank that stopped first; how long one waits is the group's timeout"
            " (init_process_group(timeout=…))",
        )


def _is_of_messages(error: RuntimeError) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "nccl", "timed out", "peer"))


def check_equal(messages: Sequence[Mapping[str, Any]], hint: str) -> None:
    """Refuse ranks that differ, in the same words on each of them.

    Args:
        messages: what each rank says: under the name of a thing what it has there, text or lists of text.
        hint: what to do.

    Raises:
        RankError: names the first rank that has something else than rank 0, and what.

    Example:
        >>> check_equal([{"rules": "a"}, {"rules": "b"}], "give all ranks the same")
        Traceback (most recent call last):
        ...
        amp_compiler.errors.RankError: the ranks differ in rules: rank 1 has b, rank 0 has a; give all ranks the same
    """
    for name in messages[0]:
        for rank, one in enumerate(messages):
            if one[name] != messages[0][name]:
                own, first = _difference(one[name], messages[0][name])
                raise RankError(f"the ranks differ in {name}: rank {rank} has {own}, rank 0 has {first}", hint=hint)


def _difference(own: Any, first: Any) -> tuple[str, str]:
    """The first entries in which two values differ, as text."""
    if not isinstance(own, (list, tuple)) or not isinstance(first, (list, tuple)):
        return str(own), str(first)
    for a, b in zip(own, first, strict=False):
        if a != b:
            return str(a), str(b)
    shared = min(len(own), len(first))
    return (str(own[shared]), "nothing there") if len(own) > shared else ("nothing there", str(first[shared]))


def token(value: Any) -> int:
    """A positive number of a value that is the same in every process.

    Args:
        value: whose `repr` says it.
    """
    return zlib.crc32(repr(value).encode()) + 1
