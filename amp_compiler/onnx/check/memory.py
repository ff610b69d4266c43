"""A limit on the memory of a run whose inputs are drawn, and their sizes chosen, here: no user has asked for them."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.infer import infer, is_open, stripped

MEMORY = 2 << 30  # bytes that the values between may take
NO_ROOM = "Available memory of"  # how an arena of ONNX Runtime says that it is at its limit


def limit_text() -> str:
    """The limit, as messages say it."""
    return f"{MEMORY / 2**30:g} GiB"


class MemoryLimitError(OnnxError):
    """A run would take more memory than it may."""

    @classmethod
    def on_batch(cls, model: str) -> MemoryLimitError:
        """That of the values between."""
        what = f"its values take more than {limit_text()} on this batch"
        return cls(what, where=model, hint="give batches of smaller inputs")


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
    """What all values take on a batch, for a run that no arena limits; the reference evaluator does keep them all.

    A dimension that inference leaves open has the size that the batch gives to its name; one of another name, or of
    none, counts as large as the largest of the batch.
    """
    light = stripped(proto, external=False)
    sizes: dict[str, int] = {}
    for value in (one for one in light.graph.input if one.type.HasField("tensor_type")):
        for dim, size in zip(value.type.tensor_type.shape.dim, np.shape(batch.get(value.name, ())), strict=False):
            if dim.dim_param:
                sizes[dim.dim_param] = size
            dim.dim_value = size
    graph = infer(light).graph
    largest = max((size for value in batch.values() for size in np.shape(value)), default=1)
    return sum(
        math.prod(sizes.get(dim.dim_param, largest) if is_open(dim) else dim.dim_value for dim in kind.shape.dim)
        * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
        for kind in (value.type.tensor_type for value in (*graph.value_info, *graph.output))
        if kind.elem_type
    )
