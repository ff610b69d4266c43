"""A compiled step replayed as one CUDA graph: captured when its tensors stay in place, again when they moved.

No call runs anything twice. The first calls run the step as it is, on a side stream; they are training steps like any
other and at the same time the warm-up that a capture needs (libraries start, autotuning, cached workspaces). The next
call records the step, which executes nothing, and replays it. From then on a call copies the batch into the buffers of
the graph and replays. Weights, moments and loss scale are used where they lie: a graph holds them, so that no address
in it can be given to something else, and every call compares addresses, shapes and strides with those of the capture.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from amp_compiler.backends.batch_buffers import Buffers
from amp_compiler.errors import AmpError, first_line

logger = logging.getLogger("amp_compiler")

WARM_UPS = 3  # as torch.cuda.make_graphed_callables
MOST_GRAPHS = 16  # of one training step: each keeps batch buffers of its own, and what the device needs to launch it
MOST_MOVES = 16  # of one graph's state tensors, until capturing again is given up
Run = Callable[..., Sequence[Any]]
_CONSTANTS = frozenset({torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default})  # scalars on the host


class GraphApi(Protocol):
    """What a graph needs of the device; `backends.cuda_capture` has the real one."""

    def refuses(self, device: torch.device) -> str:
        """Why there are no graphs on a device; empty where there are."""

    def warm_up(self, run: Run, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run a step once, before a capture."""

    def capture(self, run: Run, inputs: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Record a step without executing it; gives what replays it and the tensors that it writes its results to."""


@dataclass
class GraphSettings:
    """What all graphs of one training step share.

    Args:
        api: the device's graphs.
        most: largest number of graphs held at a time.
        live: the graphs that are held.
        said: reasons that were logged.
    """

    api: GraphApi
    most: int = MOST_GRAPHS
    live: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    said: set[str] = field(default_factory=set)


@dataclass(eq=False)
class _Captured:
    """A graph, with everything whose address is in it."""

    replay: Callable[[], None]
    outputs: Sequence[Any]
    inputs: Sequence[Any]
    buffers: Buffers

    def fill(self, inputs: Sequence[Any]) -> None:
        """Copy the batch in."""
        self.buffers.fill(inputs)


class GraphedRun:
    """A compiled step that is replayed as one CUDA graph where it can be. Call it like the step.

    Args:
        run: the compiled step, a function of its flat inputs.
        names: of the inputs, for messages.
        batch: places of the inputs that come from the batch; all others are state and stay where they are.
        copied: number of leading outputs that outlive the next step, so that they are copied out of the graph.
        settings: what the graphs of a training step share.
        reason: why there will be no graph, where that is known beforehand.
    """

    def __init__(
        self,
        run: Run,
        names: Sequence[str],
        batch: Sequence[int],
        copied: int,
        settings: GraphSettings,
        reason: str = "",
    ) -> None:
        self._run, self._names, self._batch, self._copied = run, tuple(names), frozenset(batch), copied
        self._settings, self._reason = settings, ""
        self._graph: _Captured | None = None
        self._layout: list[Any] | None = None
        self._moves, self._warm, self._needed = 0, 0, WARM_UPS
        if reason:
            self._give_up(reason)

    @property
    def reason(self) -> str:
        """Why there is no graph; empty where there is one or will be."""
        return self._reason

    @property
    def execution(self) -> str:
        """How a call runs, in words."""
        if self._reason:
            return f"as one graph, without a CUDA graph: {self._reason}"
        if self._graph is not None:
            return "as one graph, replayed as a CUDA graph"
        return f"as one graph, without a CUDA graph so far: {self._warm} of {self._needed} warm-up steps done"

    @property
    def beside(self) -> Sequence[Any]:
        """What the graph gives behind the outputs that are copied: the same tensors at every replay."""
        return () if self._graph is None else self._graph.outputs[self._copied :]

    def again(self, inputs: Sequence[Any]) -> list[Any] | None:
        """Replay the step once, where all state lies as at the last call; the batch may lie elsewhere, in one form.

        Returns:
            The outputs that are copied; `None` where there is no graph, and nothing was done.
        """
        if self._graph is None:
            return None
        self._graph.fill(inputs)
        self._graph.replay()
        return self._copies(self._graph)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the step once."""
        if self._reason:
            return self._run(*inputs)
        layout = [_layout(value) if place not in self._batch else None for place, value in enumerate(inputs)]
        if layout != self._layout and not self._start_anew(inputs, layout):
            return self._run(*inputs)
        if self._graph is not None:
            self._graph.fill(inputs)
            return self._replayed(self._graph)
        if self._warm < self._needed:
            self._warm += 1
            return self._settings.api.warm_up(self._run, inputs)
        self._graph = self._capture(inputs)
        return self._run(*inputs) if self._graph is None else self._replayed(self._graph)

    def _start_anew(self, inputs: Sequence[Any], layout: list[Any]) -> bool:
        """Begin the warm-up for tensors that are in a new place; false where no graph can be made of them."""
        if self._layout is not None:
            self._moves += 1
            self._needed = 1  # libraries have started
        reason = self._obstacle(inputs)
        if not reason and self._moves > MOST_MOVES:
            pairs = zip(self._names, layout, self._layout or layout, strict=True)
            moved = next((name for name, new, old in pairs if new != old), "")
            reason = f"the state was moved in memory {self._moves} times, '{moved}' was the last"
        self._graph, self._layout, self._warm = None, layout, 0
        if reason:
            self._give_up(reason)
        return not reason

    def _obstacle(self, inputs: Sequence[Any]) -> str:
        device: torch.device | None = None
        for name, value in zip(self._names, inputs, strict=True):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return f"'{name}' is a symbolic number"
            if not isinstance(value, Tensor):
                continue  # a number that the step was compiled for
            if value.layout is not torch.strided or type(value) not in (Tensor, torch.nn.Parameter):
                return f"'{name}' is a {type(value).__name__} of layout {value.layout}"
            if device is not None and value.device != device:
                return f"the tensors are on {device} and '{name}' on {value.device}"
            device = value.device
        return "it has no tensors" if device is None else self._settings.api.refuses(device)

    def _capture(self, inputs: Sequence[Any]) -> _Captured | None:
        """The graph; `None` where it cannot be had, and then nothing has changed."""
        settings = self._settings
        if len(settings.live) >= settings.most:
            self._give_up(f"{settings.most} graphs are held already, each with buffers of its own", logging.WARNING)
            return None
        try:
            tensors = [place for place in self._batch if isinstance(inputs[place], Tensor)]
            buffers = Buffers(inputs, sorted(tensors))
            buffers.fill(inputs)
            fixed = buffers.put_into(inputs)
            replay, outputs = settings.api.capture(self._run, fixed)
        except (RuntimeError, AmpError) as error:  # the step still runs; the reason is kept and logged
            self._give_up(f"the capture failed: {type(error).__name__}: {first_line(error)}", logging.WARNING)
            return None
        graph = _Captured(replay, outputs, fixed, buffers)
        settings.live.add(graph)
        return graph

    def _replayed(self, graph: _Captured) -> list[Any]:
        graph.replay()
        return [*self._copies(graph), *graph.outputs[self._copied :]]

    def _copies(self, graph: _Captured) -> list[Any]:
        return [value.clone() if isinstance(value, Tensor) else value for value in graph.outputs[: self._copied]]

    def _give_up(self, reason: str, level: int = logging.INFO) -> None:
        self._reason, self._graph, self._layout = reason, None, None
        if reason not in self._settings.said:
            self._settings.said.add(reason)
            logger.log(level, "the training step runs without a CUDA graph: %s", reason)


def _layout(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.layout is not torch.strided:
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype, value.device


def graph_obstacle(graph: fx.Graph) -> str:
    """Why an ATen graph cannot be replayed: a shape is symbolic, or a value is computed on the host.

    A host value would be recorded once and stay as it was. Scalars that are constants may.

    Args:
        graph: with `meta["val"]` on its nodes.

    Returns:
        The reason, empty where there is none.
    """
    home: torch.device | None = None
    for node in graph.nodes:
        for value in _values(node.meta.get("val")):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return f"'{node.name}' is a number that is known only when the step runs"
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                return f"the shape of '{node.name}' is dynamic"
            home = value.device if home is None or home.type == "cpu" else home
    for node in graph.nodes:
        for value in _values(node.meta.get("val")):
            if isinstance(value, Tensor) and value.device != home and not _is_constant(node, value):
                return f"'{node.name}' is on {value.device}, other values are on {home}"
    return ""


def _values(meta: Any) -> Iterator[Any]:
    if isinstance(meta, (list, tuple)):
        for item in meta:
            yield from _values(item)
    elif isinstance(meta, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield meta


def _is_constant(node: fx.Node, value: Tensor) -> bool:
    moved = any(user.target is torch.ops.aten._to_copy.default for user in node.users)
    return node.target in _CONSTANTS and value.numel() == 1 and not moved
