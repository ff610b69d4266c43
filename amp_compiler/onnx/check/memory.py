"""A limit on the memory of a run whose inputs are drawn, and their sizes chosen, here: no user has asked for them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.infer import infer, stripped

MEMORY = 2 << 30  # bytes that the values between may take
NO_ROOM = "Available memory of"  # how an arena of ONNX Runtime says that it is at its limit


def told_limit() -> str:
    """The limit, as messages say it."""
    return f"{MEMORY / 2**30:g} GiB"


class MemoryLimitError(OnnxError):
    """A run would take more memory than it may."""

    @classmethod
    def on_batch(cls, model: str) -> MemoryLimitError:
        """That of the values between."""
        what = f"its values take more than {told_limit()} on this batch"
        return cls(what, where=model, hint="give batches of smaller inputs")


@functools.cache
def limited_arena() -> None:
    """Give sessions that share an allocator, which none does by itself, one that holds no more than `MEMORY`.

    Raises:
        OnnxError: the process has registered an allocator of its own.
    """
    import onnxruntime as ort

    place = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    try:
        ort.create_and_register_allocator(place, ort.OrtArenaCfg({"max_mem": MEMORY, "arena_extend_strategy": 1}))
    except Exception as cause:
        raise OnnxError(
            f"onnxruntime takes no allocator with a limit: {cause}", hint="give batches of inputs"
        ) from cause


def kept_bytes(proto: onnx.ModelProto, batch: Mapping[str, Any]) -> int:
    """What all values take on a batch, as far as their shapes can be inferred: the reference evaluator keeps them."""
    light = stripped(proto, external=False)
    for value in (one for one in light.graph.input if one.type.HasField("tensor_type")):
        for dim, size in zip(value.type.tensor_type.shape.dim, np.shape(batch.get(value.name, ())), strict=False):
            dim.dim_value = size
    graph = infer(light).graph
    return sum(
        math.prod(dim.dim_value for dim in kind.shape.dim) * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
        for kind in (value.type.tensor_type for value in (*graph.value_info, *graph.output))
        if kind.elem_type
    )
