"""`Redraw`: the random numbers of a compiled call, drawn once more for a run node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.fx.torch_private.inductor import draws, opened_draws

Build = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_SEEDED = frozenset({"rand", "randn", "randint"})  # which read no number


class NotRedrawnError(Exception):
    """Which operators draw numbers that cannot be drawn again."""


class _Opened(fx.Interpreter):
    """A call in the operators that a compiler opens it into; what is made of seeded draws alone is handed to it."""

    def __init__(self, opened: fx.GraphModule) -> None:
        super().__init__(opened)
        drawing = [node for node in opened.graph.nodes if draws(node.target)]
        self.draws = bool(drawing)
        self.free: dict[fx.Node, None] = {}  # not the draws alone: a mask is made of numbers that are not rounded yet
        for node in opened.graph.nodes if any(_is_seeded(node.target) for node in drawing) else ():
            own = node.op == "call_function" and (_is_seeded(node.target) or not draws(node.target))
            if own and all(one in self.free for one in node.all_input_nodes):
                self.free[node] = None
        self.seeded = [node for node in self.free if any(user not in self.free for user in node.users)]
        self.drawn: Iterator[Tensor] = iter(())  # those

    def run_node(self, n: fx.Node) -> Any:
        """Its value; of what is made for `seeded` alone none."""
        return next(self.drawn) if n in self.seeded else None if n in self.free else super().run_node(n)


class Redraw(TorchFunctionMode):
    """Within it random operators give what a compiled call of their graph drew.

    A compiler opens them into a few, draws a row of seeds, one for each of these, and makes numbers of a seed and the
    place of an element. So a compiled graph of these few alone draws the same of the same state. What it leaves closed
    draws of the state as plain torch does, in the graph's order, behind the seeds (`ordered_draws`).

    Args:
        build: compiles a graph as that of the call was compiled.
        kept: opened calls and compiled draws, for the next run.
    """

    def __init__(self, build: Build, kept: dict[str, Any]) -> None:
        super().__init__()
        self._build, self._kept = build, kept
        self._draws: list[_Opened] | None = None
        self._drawn: Iterator[Tensor] = iter(())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, or give what it makes of what was drawn."""
        kwargs = kwargs or {}
        if not draws(func):
            return func(*args, **kwargs)
        opened = self._open(func, args, kwargs)
        if self._draws is not None:
            self._draws.append(opened)
        if self._draws is not None or not opened.draws:  # attention without dropout
            return func(*args, **kwargs)
        tensors = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        opened.drawn = self._drawn
        results = opened.run(*tensors)
        if func._schema.is_mutable:
            return args[0].copy_(results[0])
        return results[0] if len(func._schema.returns) == 1 else tuple(results)

    def draw(self, run: Callable[[], object]) -> None:
        """Draw what a run will ask for; the random state is that before the compiled call.

        Args:
            run: the graph, node by node; nothing of it is kept.

        Raises:
            NotRedrawnError: it has operators for which that is not known.
        """
        opened = self._draws = list[_Opened]()
        with torch.no_grad(), generators_kept(), self:
            run()
        self._draws = None
        seeded = [node for one in opened for node in one.seeded]
        if seeded:
            graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
            results = []
            for one in opened:  # of which several may be the same
                for node in one.free:
                    copies[node] = graph.node_copy(node, copies.__getitem__)
                results += [copies[node] for node in one.seeded]
            graph.output(tuple(results))
            with torch.no_grad():
                if (key := str(graph)) not in self._kept:
                    self._kept[key] = self._build(fx.GraphModule({}, graph), [])
                self._drawn = iter(self._kept[key]())

    def _open(self, func: Any, args: Any, kwargs: Any) -> _Opened:
        flat, spec = pytree.tree_flatten((args, kwargs))
        places = [i for i, one in enumerate(flat) if isinstance(one, Tensor)]
        shown = [(one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else one for one in flat]
        if (key := f"{func} {spec} {shown}") in self._kept:
            return self._kept[key]  # type: ignore[no-any-return]

        def call(*inputs: Tensor) -> tuple[Tensor, ...]:
            values = [*flat]
            for i, one in zip(places, inputs, strict=True):
                values[i] = one.clone() if func._schema.is_mutable else one
            args, kwargs = pytree.tree_unflatten(values, spec)
            return tuple(pytree.tree_leaves(func(*args, **kwargs)))

        try:
            opened = self._kept[key] = _Opened(opened_draws(call, [flat[i].detach() for i in places]))
        except RuntimeError as cause:
            raise NotRedrawnError(str(func)) from cause
        rounded = [one for one in opened.seeded if one.meta["val"].dtype in LOW_TYPES]
        if any(user.meta["val"].dtype is torch.bool for one in rounded for user in one.users):
            raise NotRedrawnError(f"{func} in 16 bits")
        return opened


def _is_seeded(target: Any) -> bool:
    return draws(target) and target._schema.name.partition("::")[2] in _SEEDED


def is_redrawable(graph_module: fx.GraphModule) -> bool:
    """Whether a graph draws random numbers."""
    inner = [one for one in graph_module.modules() if isinstance(one, fx.GraphModule)]
    return any(draws(node.target) for one in inner for node in one.graph.nodes)
