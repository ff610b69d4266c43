"""`Redraw`: the random numbers of a compiled call, drawn once more for a run node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from amp_compiler.fx.capture.generators import generators_kept, random_state
from amp_compiler.fx.checkpoints import checkpoints_in

aten = torch.ops.aten
Build = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_DROPOUTS = frozenset({aten.dropout.default, aten.feature_dropout.default})  # which scale or drop what they are given
_PLAIN = frozenset({"rand", "rand_like", "randn", "randn_like", "randint", "randint_like"})  # which read no number
_BERNOULLI = frozenset({aten.bernoulli.p, aten.bernoulli_.float})


class NotRedrawnError(Exception):
    """Which operator draws numbers that cannot be drawn again."""


class Redraw(TorchFunctionMode):
    """Within it random operators give what a compiled call of their graph drew.

    A compiler draws a row of seeds at the start of a call, one for each random operator, and makes numbers of a seed
    and the place of an element. So a compiled graph of the random operators alone draws the same of the same state.

    Args:
        device: on which it draws.
        build: compiles a graph as that of the call was compiled.
        compiled: those graphs, by their text and what they take; kept for the next run.
    """

    def __init__(self, device: torch.device, build: Build, compiled: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self._device, self._build, self._compiled = device, build, compiled
        self._calls: list[tuple[Any, Any, Any] | None] | None = None
        self._drawn: Iterator[Tensor | None] = iter(())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or give what was drawn."""
        kwargs = kwargs or {}
        if not draws(func):
            return func(*args, **kwargs)
        if self._calls is not None:
            before = random_state(self._device)
            result = func(*args, **kwargs)
            drew = not all(map(torch.equal, before, random_state(self._device)))  # and no attention without dropout
            self._calls.append((func, args, kwargs) if drew else None)
            return result
        drawn = next(self._drawn)
        if drawn is None:
            return func(*args, **kwargs)
        if func in _DROPOUTS:
            return args[0] * (drawn != 0) * (1 / (1 - args[1]))
        return args[0].copy_(drawn) if func is aten.bernoulli_.float else drawn

    def find(self, run: Callable[[], object]) -> None:
        """Draw what a run will ask for; the random state is that before the compiled call.

        Args:
            run: the graph, node by node; nothing of it is kept.

        Raises:
            NotRedrawnError: it has an operator for which that is not known.
        """
        calls = self._calls = list[tuple[Any, Any, Any] | None]()
        try:
            with torch.no_grad(), generators_kept(), self:
                run()
        finally:
            self._calls = None
        graph, inputs = fx.Graph(), list[Tensor]()

        def like(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            inputs.append(torch.ones_like(value, memory_format=torch.contiguous_format))
            return graph.placeholder(f"x{len(inputs)}")

        drawing = [call for call in calls if call is not None]
        operands = [(func, *pytree.tree_map(like, (args, kwargs))) for func, args, kwargs in drawing]
        masks = []
        for func, args, kwargs in operands:
            if func not in _DROPOUTS | _BERNOULLI and func._schema.name.partition("::")[2] not in _PLAIN:
                raise NotRedrawnError(str(func))
            first = graph.call_function(aten.clone.default, (args[0],)) if func in _BERNOULLI else None
            masks.append(graph.call_function(func, args if first is None else (first, *args[1:]), kwargs))
        graph.output(tuple(masks))
        key = f"{graph} {[(one.shape, one.dtype, one.device) for one in inputs]}"
        with torch.no_grad():
            if masks and key not in self._compiled:
                self._compiled[key] = self._build(fx.GraphModule({}, graph), inputs)
            drawn = iter(self._compiled[key](*inputs) if masks else ())
        self._drawn = iter([None if call is None else next(drawn) for call in calls])


def draws(target: Any) -> bool:
    """Whether an operator draws random numbers."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_redrawable(graph_module: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers, none of them again in its backward."""
    inner = [one for one in graph_module.modules() if isinstance(one, fx.GraphModule)]
    nodes = [node for one in inner for node in one.graph.nodes]
    return any(draws(node.target) for node in nodes) and not checkpoints_in(nodes)
