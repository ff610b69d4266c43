"""`Rerun`: what is differentiated twice runs again node by node, for compiled code has no such backward."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.backends import find_backend
from amp_compiler.errors import DoubleBackwardError
from amp_compiler.forward.redraw import Build, NotRedrawnError, Redraw, is_redrawable
from amp_compiler.forward.settings import device_of
from amp_compiler.forward.tensor_versions import versions
from amp_compiler.fx.alias import is_view, readers, source_of, takes_statistics, written_operands
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.generators import random_state, set_random_state
from amp_compiler.fx.graph import copy_graph, user_source
from amp_compiler.fx.torch_private.inductor import compiled_node, take_over_backward
from amp_compiler.fx.torch_private.tracing import forward_of
from amp_compiler.passes.step.separate_buffers import written_placeholders

logger = logging.getLogger("amp_compiler")
MOST_KEPT = 1 << 20  # bytes of one tensor that a call reads and then writes


class Rerun:
    """Makes the gradients of compiled calls where their compiled backward cannot: see `take_over_backward`.

    The forward runs again on the inputs of the call, node by node under autograd. It writes no buffer again, and takes
    the random numbers of the compiled call (`Redraw`). What would draw others, or read what was written, is refused;
    of what a call reads and then writes, a copy is kept until its backward where that is small.

    Args:
        graph_module: the graph before it is rewritten, in place.
        name: how messages call it.
    """

    def __init__(self, graph_module: fx.GraphModule, name: str) -> None:
        self._graph_module, self._name, self._said = graph_module, name, False
        nodes = graph_module.graph.find_nodes(op="placeholder")
        written = written_placeholders(graph_module.graph, [node.name for node in nodes])
        self._written = [node.name in written for node in nodes]
        is_tensor = [isinstance(node.meta["val"], Tensor) for node in nodes]
        self._read = [i for i, known in enumerate(is_tensor) if known and not self._written[i]]
        before = [(i, node) for i, node in enumerate(nodes) if node.name in written and not _is_unread(node)]
        sizes = {node.name: node.meta["val"].nbytes for _, node in before}
        large = [name for name, size in sizes.items() if not isinstance(size, int) or size > MOST_KEPT]
        self._refused = (
            f"it reads '{large[0]}', which it writes too, of more than {MOST_KEPT >> 20} MB" if large else ""
        )
        self._before = [] if large else [i for i, _ in before]
        self._run: Callable[..., Any] | None = None
        self._build: Build | None = None  # of a graph that draws random numbers
        self._kept: dict[str, Any] = {}

    def around(self, run: Callable[..., Any], build: Build) -> Callable[..., Any]:
        """The compiled graph, each call of which notes what another run needs.

        Args:
            run: the graph, rewritten and compiled.
            build: compiles another graph in the same way.
        """
        graph_module = self._graph_module = copy_graph(self._graph_module)
        graph_module.graph.eliminate_dead_code(_is_seen)  # as compilers do
        graph_module.recompile()
        self._build = build if is_redrawable(graph_module) else None

        def noting(*inputs: Any) -> Any:
            grad, states, read = torch.is_grad_enabled(), list[Sequence[Tensor]](), [*inputs]
            if grad:
                for i, one in enumerate(inputs):
                    if self._written[i] and (i in self._before or not one.requires_grad):
                        read[i] = one.clone() if i in self._before else one.detach()
            if grad and self._build is not None:
                device = device_of(inputs)
                if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                    states.append(random_state(device))  # which cannot be had while a stream is captured
            results = run(*inputs)
            if grad and (node := compiled_node(results)):
                states += [random_state(device_of(inputs)) for _ in states]
                returned = [*results, *compress(inputs, self._written)]
                take_over_backward(node, _Call(self, read, returned, node, states).gradients)
            return results

        return noting

    def again(self, inputs: Sequence[Any], states: Sequence[Sequence[Tensor]]) -> Sequence[Any]:
        """The results once more, differentiable, and behind them what was written.

        Args:
            inputs: of the call.
            states: the random state before the call and behind it, where it draws.

        Raises:
            DoubleBackwardError: they would be others.
        """
        if self._refused:
            raise self.error(self._refused)
        if self._run is None:
            # What is checkpointed would draw once more in its backward.
            build = find_backend("eager").build
            self._run = build(self._graph_module, [], True) if self._build is None else forward_of(self._graph_module)
        run, device = self._run, device_of(inputs)

        def once() -> Sequence[Any]:  # it writes buffers of its own
            own = [one.clone() if written else one for one, written in zip(inputs, self._written, strict=True)]
            return [*run(*own), *compress(own, self._written)]

        now = random_state(device)
        try:
            if self._build is None or not states:
                results = once()
            else:
                set_random_state(device, states[0])
                redraw = Redraw(self._build, self._kept)
                redraw.draw(once)
                with redraw:
                    results = once()
            if not all(map(torch.equal, states[1] if states else now, random_state(device))):
                raise self.error("it draws other random numbers than the compiled call")
        except NotRedrawnError as cause:
            raise self.error(f"it draws random numbers by {cause}, which cannot be drawn again") from cause
        finally:
            set_random_state(device, now)
        if not self._said:
            self._said = True
            logger.warning(
                "%s is differentiated twice, or its backward runs twice (create_graph=True, retain_graph=True), which"
                " compiled code does not allow: such calls run once more, node by node",
                self._name,
            )
        return results

    def versions(self, inputs: Sequence[Any]) -> list[int | None]:
        """Of what a call reads; what it writes has others after each call, and no result hangs on it."""
        return versions([inputs[i] for i in self._read])

    def error(self, why: str) -> DoubleBackwardError:
        """The error of a call that cannot run once more."""
        return DoubleBackwardError(
            f"{self._name} is compiled code, which has no backward that can be differentiated or run twice"
            f" (create_graph=True, retain_graph=True), and it cannot run once more node by node: {why}",
            where=user_source("".join(traceback.format_stack())),
            hint="use backend='eager' for this model",
        )


class _Call:
    """One compiled call: what it read, and which gradients of its backward are those of its results."""

    def __init__(
        self, rerun: Rerun, inputs: Sequence[Any], results: Sequence[Any], node: Any, states: Sequence[Sequence[Tensor]]
    ) -> None:
        self._rerun, self._inputs, self._versions, self._states = rerun, inputs, rerun.versions(inputs), states
        self._places: dict[int, tuple[int, bool]] = {}  # by number of the node's: a result, or what it is a view of
        for i, one in enumerate(results):
            if isinstance(one, Tensor) and one.requires_grad:
                for by_base, source in enumerate((one, one._base)):
                    if source is not None and source.grad_fn is node:
                        self._places.setdefault(source.output_nr, (i, bool(by_base)))
                # A result was copied into what the call writes.
                for before, number in one.grad_fn.next_functions if one.grad_fn is not None else ():
                    if before is node:
                        self._places.setdefault(number, (i, False))

    def gradients(self, node: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Those of the inputs, differentiable where grad mode is on.

        Args:
            node: that of the call.
            gradients: of what the compiled forward returned.

        Raises:
            DoubleBackwardError: the call cannot run once more.
        """
        rerun = self._rerun
        needed = [isinstance(one, Tensor) and one.requires_grad for one in self._inputs]
        arrived = [(number, gradient) for number, gradient in enumerate(gradients) if gradient is not None]
        earlier = any(isinstance(one, Tensor) and one.grad_fn is node for one in self._inputs)
        if earlier or [*node.needs_input_grad] != needed or any(number not in self._places for number, _ in arrived):
            raise rerun.error("what it is given is written, or shares memory, and has a gradient")
        if rerun.versions(self._inputs) != self._versions:
            raise rerun.error("what it read was written in place since")
        create_graph = torch.is_grad_enabled()
        with autocast_off(), torch.enable_grad():
            # Views, so that hooks on the inputs themselves run once, by the backward around this one.
            read = [x.view_as(x) if isinstance(x, Tensor) and x.requires_grad else x for x in self._inputs]
            results = rerun.again(read, self._states)
            pairs = []
            for number, gradient in arrived:
                i, by_base = self._places[number]
                result = results[i]._base if by_base else results[i]
                if result is None or result.shape != gradient.shape:
                    raise rerun.error("its results share memory otherwise than those of a run node by node")
                pairs.append((result, gradient))
            wanted = [one for one in read if isinstance(one, Tensor) and one.requires_grad]
            outputs, theirs = zip(*pairs, strict=True) if pairs else ((), ())
            grad = functools.partial(torch.autograd.grad, create_graph=create_graph, allow_unused=True)
            computed = iter(grad(outputs, wanted, theirs) if pairs else [None] * len(wanted))
        return tuple(next(computed) if isinstance(one, Tensor) and one.requires_grad else None for one in read)


def _is_seen(node: fx.Node) -> bool:
    """Whether it matters that a node runs whose result nobody reads: not where it writes what nobody else reads."""
    memory = [source_of(one) for one in written_operands(node)]
    fresh = all(one.op == "call_function" and all(map(is_view, readers(one))) for one in memory)
    return node.is_impure(impure_random=False) and not (memory and fresh)


def _is_unread(node: fx.Node) -> bool:
    """Whether all that reads a value writes it, and nothing else hangs on it: running statistics, a counter."""
    return all(node in written_operands(user) and (takes_statistics(user) or not user.users) for user in node.users)
