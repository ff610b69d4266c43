"""Limits on memory and time of a run whose inputs are drawn, and their sizes chosen: no user has asked for them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.cost import Cost

MEMORY = 10**9  # bytes that the values between may take
SECONDS = 10.0  # that a batch may take in both models, as far as shapes tell
SLACK = 3  # by how much a run may take longer, on a slow machine or in a loop, before it is stopped
_LOOKS = 0.5  # seconds between looks at how long a run takes
STOPPED = "terminate flag"  # how ONNX Runtime says that a run was stopped
NO_ROOM = "Available memory of"  # how an arena of ONNX Runtime says that it is at its limit


@dataclass(frozen=True)
class Limits:
    """What a batch may take.

    Args:
        memory: bytes of the values between; weights do not count.
        seconds: of both models, estimated from shapes for one core.
    """

    memory: float
    seconds: float


class LimitError(OnnxError):
    """A run would take more memory or time than it may."""

    @classmethod
    def on_batch(cls, model: str, amount: str) -> LimitError:
        """That of the values between, or of the run."""
        return cls(f"it takes more than {amount} on this batch", where=model, hint="give batches of smaller inputs")


def memory_text(memory: float) -> str:
    """A number of bytes, as messages say it."""
    return f"{memory / 1e9:g} GB of memory"


_REGISTERING = threading.Lock()


def limited_arena() -> bool:
    """Give sessions that share an allocator, which none does by itself, one that holds no more than `MEMORY`.

    Returns:
        False where ONNX Runtime takes none, because the process has registered one of its own.
    """
    with _REGISTERING:  # one process has one, whichever thread comes first
        return _register_arena()


@functools.cache
def _register_arena() -> bool:
    import onnxruntime as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    try:
        ort.create_and_register_allocator(place, ort.OrtArenaCfg({"max_mem": MEMORY, "arena_extend_strategy": 1}))
    except Exception:  # noqa: BLE001  its errors share no base class but Exception
        return False
    return True


def kept_bytes(proto: onnx.ModelProto, batch: Mapping[str, Any]) -> int:
    """What all values take on a batch, for a run that no arena limits; the reference evaluator does keep them all."""
    values = Cost(proto).values({name: np.shape(value) for name, value in batch.items()})
    outputs = {name for node in proto.graph.node for name in node.output}
    return sum(size for name, (_, size) in values.items() if name in outputs)


@contextlib.contextmanager
def stopped_after(options: Any, seconds: float) -> Iterator[None]:
    """Let a run of ONNX Runtime end by an error between two of its nodes when it takes longer.

    Args:
        options: those of the run.
        seconds: how many of the processor it may take, which other work on a machine does not add to.
    """

    begun, ended = time.process_time(), threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOKS):
            if time.process_time() - begun > seconds:
                options.terminate = True

    options.terminate = False
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
