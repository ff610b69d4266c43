"""A branch of a CUDA graph: some kernels of a captured step run beside others, until `join_branch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def join_branch(*given: Any) -> tuple[()]:
    """Where a branch ends, in a graph; what runs it puts `Branch.join` here.

    Args:
        given: what the branch was given, which is so kept until here.
    """
    return ()


class Branch:
    """Makes a part of a step a branch of its CUDA graph.

    What is not captured runs in order: the part runs where the branch ends. So a call that fails in between, for want
    of memory, has changed nothing that the part would have.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._waiting: Callable[[], Any] | None = None

    def forked(self, run: Callable[..., Any], given: int) -> Callable[..., tuple[()]]:
        """The part as a call that begins the branch.

        Args:
            run: the part; what it gives is not used.
            given: how many of the inputs it is given. The others are read beside it: what shares memory with one of
                them, as a buffer may with a weight, would be written too early, and so the part waits then.
        """

        def beside(*inputs: Any) -> tuple[()]:
            self._stream = self._waiting = None
            captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            if not captured or _memory(inputs[:given]) & _memory(inputs[given:]):
                self._waiting = partial(run, *inputs[:given])
                return ()
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run(*inputs[:given])
            return ()

        return beside

    def join(self, *given: Any) -> tuple[()]:
        """The end of the branch.

        Args:
            given: what the part was given, so that its memory is not used again before.
        """
        waiting, stream, self._waiting, self._stream = self._waiting, self._stream, None, None
        if waiting is not None:
            waiting()
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return ()


def _memory(tensors: Sequence[Any]) -> set[int]:
    return {one.untyped_storage().data_ptr() for one in tensors if isinstance(one, Tensor)}
