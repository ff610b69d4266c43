"""An optimizer's own update as a graph: traced, made free of writes, and committed where the step counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.errors import OptimizerError
from amp_compiler.fx.alias import is_view, readers
from amp_compiler.fx.graph import call_before, results_of
from amp_compiler.fx.torch_private.tracing import traced_graph
from amp_compiler.ops.update.operators import FUSED_NAMES
from amp_compiler.ops.update.reference import follow

OWN_STATE = "state_"  # before the key of a state tensor, in the name of its placeholder
_aten = torch.ops.aten
# Parameters, their FP32 gradients, states and learning rates in; new parameters and states out.
Update = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]
]


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state.

    Args:
        key: its key in the state of the parameter.
        parameter: place of the parameter in `TracedUpdate.masters`.
        shape: its shape.
        stride: its strides.
        dtype: its type.
    """

    key: str
    parameter: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class TracedUpdate:
    """The parameters of an optimizer that has no fused kernel.

    Args:
        name: class of the optimizer, for messages.
        masters: placeholder names of the weights.
        low_weights: placeholder name of the 16-bit copy of each weight, `None` for one without.
        states: the state tensors.
        rates: number of learning rates, one for each group of parameters.
        update: the optimizer's own code.
        takes: of which weights the copy is the parameter itself, which users write; empty for none.
    """

    name: str
    masters: tuple[str, ...]
    low_weights: tuple[str | None, ...]
    states: tuple[StateTensor, ...]
    rates: int
    update: Update
    takes: tuple[bool, ...] = ()

    def watched(self, inputs: int) -> int:
        """How many of so many inputs say which copies are no longer their masters rounded: one, or none."""
        copies = sum(name is not None for name in self.low_weights)
        return inputs - 2 * len(self.masters) - len(self.states) - copies - 3

    def placed(self, copies: Sequence[Any]) -> list[Any]:
        """The 16-bit copies, `None` for a weight without."""
        rest = iter(copies)
        return [None if name is None else next(rest) for name in self.low_weights]


def trace_update(update: TracedUpdate, values: Sequence[Tensor]) -> fx.GraphModule:
    """Trace one update into a graph whose only writes are one `copy_` for each tensor that changes.

    Before (RMSprop's code)::

        square_avg.mul_(alpha).addcmul_(grad, grad, value=1 - alpha)
        param.addcdiv_(grad, square_avg.sqrt().add_(eps), value=-lr)

    After::

        grad = gradient.float() * coef
        new_square_avg = addcmul(mul(square_avg, alpha), grad, grad, value=1 - alpha)
        copy_(square_avg, where(skip != 0, square_avg, new_square_avg))
        ...

    Args:
        update: what to trace.
        values: fake tensors: masters, gradients as they were made, states, `stale` uint8 [masters] where 16-bit copies
            are looked at (see `ops.update.fused.Update`), these, learning rates fp64 [rates], `coef` fp32 [], `skip`
            fp32 []. The placeholders of the graph stand in this order.

    Raises:
        OptimizerError: the code reads values, or cannot be traced for another reason.
    """
    count, held = len(update.masters), len(update.states)
    watched = update.watched(len(values))

    def run(*inputs: Tensor) -> list[Tensor]:
        masters, gradients, states = inputs[:count], inputs[count : 2 * count], inputs[2 * count : 2 * count + held]
        stale, low_weights = inputs[2 * count + held :][:watched], inputs[2 * count + held + watched : -3]
        rates, coef, _ = inputs[-3:]
        current, new_stale = follow(masters, update.placed(low_weights), update.takes or [False] * count, stale)
        grads = [(g.float() * coef).to(m.dtype) for g, m in zip(gradients, masters, strict=True)]
        new_masters, new_states = update.update(current, grads, states, rates.unbind())
        pairs = zip([*masters, *states, *stale], [*new_masters, *new_states, *new_stale], strict=True)
        return [new.to(old.dtype) for old, new in pairs]

    # Inside of the fake mode numbers that the code turns into tensors are fake too.
    with values[0].fake_mode:  # type: ignore[attr-defined]
        try:
            traced = traced_graph(torch.func.functionalize(run), *values, _allow_non_fake_inputs=True)
        except OptimizerError:
            raise
        except Exception as cause:
            reason = str(cause).partition("\n")[0]
            raise OptimizerError(
                f"the update of {update.name} cannot be traced: {type(cause).__name__}: {reason}",
                hint=f"use an optimizer whose step() is made of tensor operations alone, or {FUSED_NAMES}",
            ) from cause
    _tidy(traced, values[-1], update.name)
    _commit(traced, update)
    return traced


def _tidy(traced: fx.GraphModule, like: Tensor, name: str) -> None:
    """Take out copies, which nothing needs where nothing is written, and constant tensors."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.op == "get_attr":
            _inline_constant(traced, node, like, name)
        elif node.target in (_aten.clone.default, _aten.lift_fresh_copy.default, _aten.detach.default):
            source: Any = node.args[0]
            if not node.kwargs or node.meta["val"].stride() == source.meta["val"].stride():
                node.replace_all_uses_with(source)
    graph.eliminate_dead_code()


def _inline_constant(traced: fx.GraphModule, node: fx.Node, like: Tensor, name: str) -> None:
    value = getattr(traced, str(node.target))
    if not isinstance(value, Tensor) or value.dim():
        raise OptimizerError(
            f"the update of {name} uses a tensor that is neither a parameter nor its state",
            hint="keep it in the optimizer's state",
        )
    with like.fake_mode:  # type: ignore[attr-defined]
        options = {"dtype": value.dtype, "device": like.device}
        node.replace_all_uses_with(call_before(node, _aten.full.default, [[], value.item()], "", **options))


def _apart(olds: list[fx.Node], news: list[Any], first: fx.Node) -> list[Any]:
    """The new values, with a copy where one is the old value of another tensor, or a view of it."""
    shared = {*olds, *(user for old in olds for user in readers(old) if is_view(user))}
    tensors = []
    for old, new in zip(olds, news, strict=True):
        if new in shared and new is not old:
            new = call_before((first if new in olds else new).next, _aten.clone.default, [new], "")
        tensors.append(new)
    return tensors


def _commit(traced: fx.GraphModule, update: TracedUpdate) -> None:
    """Write every new value behind the last use of the old one, so that it need not live until the end of the graph."""
    graph = traced.graph
    placeholders = graph.find_nodes(op="placeholder")
    count, held = len(update.masters), len(update.states) + update.watched(len(placeholders))
    olds = [*placeholders[:count], *placeholders[2 * count : 2 * count + held]]
    news = results_of(graph)
    graph.output_node().args = ((),)
    if all(new is old for new, old in zip(news[:count], olds, strict=False)):
        raise OptimizerError(
            f"the update of {update.name} writes no parameter",
            hint="let step() change the parameters in place, under torch.no_grad()",
        )
    low_weights = [*update.placed(placeholders[2 * count + held : -3]), *[None] * held]
    bad = call_before(placeholders[-1].next, _aten.ne.Scalar, [placeholders[-1], 0], "")
    news = _apart(olds, news, bad)
    place: dict[fx.Node, int] = {node: number for number, node in enumerate(graph.nodes)}
    for old, new, low in zip(olds, news, low_weights, strict=True):
        if new is old:
            continue
        last = max([bad, new, *(user for user in readers(old) if user in place)], key=lambda node: place[node])
        kept = call_before(last.next, _aten.where.self, [bad, old, new], "")
        for target in (old,) if low is None else (low, old):
            call_before(kept.next, _aten.copy_.default, [target, kept], "")
