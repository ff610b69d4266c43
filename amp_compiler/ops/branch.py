"""A branch of a CUDA graph: some kernels of a captured step run beside others, until `join_branch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    of memory, has changed nothing that the part would have, and keeps nothing of it.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._waiting: Callable[..., Any] | None = None

    def forked(self, run: Callable[..., Any], given: int, changed: Sequence[int]) -> Callable[..., tuple[()]]:
        """The part as a call that begins the branch.

        Args:
            run: the part; what it gives is not used.
            given: how many of the inputs it is given. The others are read beside it: where what it changes shares
                memory with one of them, as a weight may with a buffer, the part waits.
            changed: places of the inputs that it changes.
        """

        def beside(*inputs: Any) -> tuple[()]:
            self._stream = self._waiting = None
            captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            if not captured or share_memory([inputs[place] for place in changed], inputs[given:]):
                self._waiting = run
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
            waiting(*given)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        return ()


def share_memory(changed: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether a tensor that is changed lies where another one does.

    Args:
        changed: tensors.
        others: tensors that are read; anything else among them is passed over, and so are sparse ones.
    """
    spans = [(*_span(one), change) for change, found in ((1, changed), (0, others)) for one in found if _lies(one)]
    of_any = of_changed = 0  # where the ones before end
    for start, end, change in sorted(spans):
        if start < (of_any if change else of_changed):
            return True
        of_any, of_changed = max(of_any, end), max(of_changed, end * change)
    return False


def _lies(one: Any) -> bool:
    return isinstance(one, Tensor) and one.layout is torch.strided and one.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and behind the last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
