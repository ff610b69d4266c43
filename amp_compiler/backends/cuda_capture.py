"""CUDA graphs by way of torch, for `backends.cuda_graph`."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.backends.cuda_graph import Run
from amp_compiler.fx.torch_private.runtime import clear_cublas_workspaces, end_failed_capture, without_owning
from amp_compiler.ops.cuda.pointer_tables import GraphTables
from amp_compiler.ops.cuda.update import TABLES

# Graphs whose capture failed. torch's allocator of pinned memory goes on asking them whether a stream is theirs, by a
# pointer, so they must not go.
_FAILED: list[Any] = []


class TorchGraphs:
    """One side stream and one memory pool for all graphs of a training step.

    Graphs that share a pool reuse each other's memory, for results and gradients too. That is safe here because they
    run one after another, and because what outlives a replay is copied out, save the gradients, which are read before
    the next. A new signature so needs no more memory than the largest before it did, if it is no larger itself.
    """

    def __init__(self) -> None:
        self._stream: Any = None
        self._pool: Any = None
        self._live: weakref.WeakKeyDictionary[Any, GraphTables] = weakref.WeakKeyDictionary()  # with what they read

    def refuses(self, device: torch.device) -> str:
        """As in `cuda_graph.GraphApi`."""
        return "" if device.type == "cuda" else f"the tensors are on the {device.type}"

    def warm_up(self, run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
        """As in `cuda_graph.GraphApi`: on the stream that captures, so that cuBLAS has its workspace for it."""
        device = _device_of(inputs)
        with torch.cuda.device(device):
            current = torch.cuda.current_stream()
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                outputs = run(*inputs)
            current.wait_stream(self._stream)
            for output in outputs:
                if isinstance(output, Tensor):
                    output.record_stream(current)
        return outputs

    def capture(self, run: Run, inputs: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        """As in `cuda_graph.GraphApi`, on the stream of the warm-up.

        Raises:
            Exception: whatever the step raises, or what torch does where a call cannot be captured. Nothing has run,
                and torch is as it was.
        """
        device = _device_of(inputs)
        collecting = gc.isenabled()
        with torch.cuda.device(device):
            if self._pool is None or not self._live:  # the allocator does not take a pool again whose graphs are gone
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # it may destroy events and graphs, which is forbidden during a capture
            # cuBLAS keeps its workspaces from call to call, in the memory of who called first. One from outside could
            # be freed while the graph uses it, and one of the graph's must not be used beside it.
            clear_cublas_workspaces()
            try:
                with TABLES.of_graph() as tables:
                    outputs = self._recorded(graph, run, inputs)
                tables.fill()
            except Exception:
                end_failed_capture(device, self._pool)
                self._forget(graph, device)
                raise
            finally:
                clear_cublas_workspaces()
                if collecting:
                    gc.enable()
        self._live[graph] = tables
        own = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
        return graph.replay, [_given_back(value, own) for value in outputs]

    def _recorded(self, graph: Any, run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
        first: Exception | None = None
        current = torch.cuda.current_stream()
        try:
            # Other threads, such as one that pins batches, may go on allocating.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                try:
                    return run(*inputs)
                except Exception as error:
                    first = error  # what ends the capture raises another, which says less
                    raise
        except Exception:
            if first is not None:
                raise first from None
            raise
        finally:
            torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own behind where the capture fails

    def _forget(self, graph: Any, device: torch.device) -> None:
        """Bring torch back to where it was before the capture of a graph that failed.

        The generator of random numbers stays in the capture (up to torch 2.11 at least), so that every random number on
        the device is an error, until a capture succeeds. The pool stays open in the allocator of pinned memory, so that
        nothing can be captured into it any more.
        """
        _FAILED.append(graph)
        self._pool = None
        mark, stream = torch.zeros(1, device=device), torch.cuda.Stream()
        with contextlib.suppress(RuntimeError):  # a device that is lost says so at the next call
            graph.reset()
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                mark.zero_()


def _given_back(output: Any, own: set[int]) -> Any:
    """A result of a capture, whose memory the pool may use again; as it is where it lies in an input."""
    if not isinstance(output, Tensor) or output.untyped_storage().data_ptr() in own:
        return output
    return without_owning(output)


def _device_of(inputs: Sequence[Any]) -> torch.device:
    return next(value.device for value in inputs if isinstance(value, Tensor))
