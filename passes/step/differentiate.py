"""`Differentiate`: generate the backward of a rewritten forward, as one explicit joint graph."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from amp_compiler.errors import BUG, AmpError, LoweringError, first_line
from amp_compiler.fx.capture.errors import user_frame
from amp_compiler.fx.checkpoints import checkpoint_of
from amp_compiler.fx.graph import (
    copy_graph,
    node_tensor,
    rename_placeholder,
    replace_call,
    results_of,
    upcast_behind_inputs,
)
from amp_compiler.fx.kept_graphs import KeptGraph
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.runtime import autograd_sequence, function_sequence
from amp_compiler.fx.torch_private.tracing import new_graph_module, own_decompositions, traced_graph
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.passes.precision.type_backward import gradient_type

# Which argument of a lookup says that the gradient of its table is to be a sparse tensor.
_SPARSE = {torch.ops.aten.embedding.default: 4, torch.ops.aten.embedding_bag.padding_idx: 5}
_INHERITED = ("nn_module_stack", "stack_trace")


@dataclass(frozen=True)
class Differentiate(FunctionalPass[fx.GraphModule]):
    """Trace autograd over a forward graph, so that forward and backward stand in one graph.

    The types of the backward follow from the casts in the forward: the adjoint of a cast is the cast back; a `typed_op`
    brings its own. No ambient autocast takes part. A 16-bit placeholder that only nodes with FP32 gradients read gets
    an FP32 gradient; one marked `wide` becomes the cast that it stands for, whose adjoint would have rounded that.
    Tied weights are one placeholder and get one summed gradient; a placeholder that the loss does not
    depend on gets `None`.

    Before::

        def forward(self, w: "f32[4]", x: "f32[4]"):
            mul: "f32[4]" = aten.mul.Tensor(w, x)
            sum_1: "f32[]" = aten.sum.default(mul)
            return (sum_1,)

    After (`wrt=("w",)`)::

        def forward(self, w: "f32[4]", x: "f32[4]"):
            mul: "f32[4]" = aten.mul.Tensor(w, x)
            sum_1: "f32[]" = aten.sum.default(mul)
            ones_like: "f32[]" = aten.ones_like.default(sum_1)      # backward, the seed
            expand: "f32[4]" = aten.expand.default(ones_like, [4])  # backward
            mul_1: "f32[4]" = aten.mul.Tensor(expand, x)            # backward
            return (sum_1, mul_1)

    Left alone: the forward itself, which stands in front as it was, but that lookups with `sparse=True` make dense
    gradients; a placeholder that is not asked for.

    Args:
        wrt: names of the placeholders to differentiate by. The loss is the first output and must be a float scalar.
    """

    wrt: tuple[str, ...]
    exact: ClassVar[bool] = True

    def requires(self, subject: fx.GraphModule) -> str | None:
        """The first output is a floating-point scalar, and every name in `wrt` is a placeholder."""
        results = results_of(subject.graph)
        loss = results[0] if results else None
        tensor = node_tensor(loss) if isinstance(loss, fx.Node) else None
        if tensor is None or tensor.numel() != 1 or not tensor.is_floating_point():
            return f"the loss must be one floating-point number, not {_describe(tensor)}"
        known = {node.name for node in subject.graph.find_nodes(op="placeholder")}
        missing = [name for name in self.wrt if name not in known]
        return f"'{missing[0]}' is no placeholder of the graph" if missing else None

    def remember(self, subject: fx.GraphModule) -> int:
        """The number of results of the forward."""
        return len(results_of(subject.graph))

    def ensures(self, subject: fx.GraphModule, remembered: int) -> str | None:
        """There is one gradient, or `None`, for every name, in the shape of its placeholder."""
        gradients = results_of(subject.graph)[remembered:]
        if len(gradients) != len(self.wrt):
            return f"there are {len(gradients)} gradients for {len(self.wrt)} placeholders"
        shapes = {node.name: node_tensor(node) for node in subject.graph.find_nodes(op="placeholder")}
        for name, gradient in zip(self.wrt, gradients, strict=True):
            source, value = shapes.get(name), node_tensor(gradient) if isinstance(gradient, fx.Node) else None
            if value is not None and source is not None and value.shape != source.shape:
                return f"the gradient of '{name}' has the shape {tuple(value.shape)}"
        return None

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Trace, or take what an earlier process traced from the same graph; the given graph stays as it is."""
        types = {name: str(gradient_type(node)) for name, node in _requested(subject, self.wrt).items()}
        kept = KeptGraph.of(subject.graph, [self.wrt, types], __name__)
        joint = kept.load() if kept is not None else None
        if joint is not None:
            result = new_graph_module(torch.nn.Module(), joint)
        else:
            traced, origins = self._traced(subject)
            if kept is not None:
                kept.store(traced.graph, origins)
            # A graph remembers the names of erased nodes and numbers new ones behind them, unless it was read.
            result = copy_graph(traced)
        if _restore_upcasts(result.graph):
            result.recompile()
        return PassResult(result, True)

    def _traced(self, subject: fx.GraphModule) -> tuple[fx.GraphModule, dict[str, int]]:
        """The joint graph, and for its nodes, by name, the place of the forward node that each was made for."""
        placeholders = subject.graph.find_nodes(op="placeholder")
        requested = {name: gradient_type(node) for name, node in _requested(subject, self.wrt).items()}
        wanted = [place for place, node in enumerate(placeholders) if node.name in requested]
        by_name = {placeholders[place].name: position for position, place in enumerate(wanted)}
        trace = _Trace(subject)

        def joint(*inputs: Any) -> list[Any]:
            leaves = list(inputs)
            for place in wanted:
                # Autograd gives a gradient the type of its leaf.
                wide = requested[placeholders[place].name] is torch.float32
                leaves[place] = (inputs[place].float() if wide else inputs[place]).detach().requires_grad_()
            with torch.enable_grad():
                results = trace.run(*leaves)
                trace.watch_backward(results[0])
                gradients = _gradients(results[0], [leaves[place] for place in wanted])
            trace.order = {node.name: place for place, node in enumerate(_tracer_graph().nodes)}
            return [*results, *[gradients[by_name[name]] for name in self.wrt]]

        examples = [node.meta["val"] for node in placeholders]
        with warnings.catch_warnings(), fx_traceback.preserve_node_meta(), own_decompositions():
            warnings.simplefilter("ignore")
            try:
                traced = traced_graph(joint, *examples, _allow_non_fake_inputs=True)
            except AmpError:
                raise
            except Exception as cause:  # autograd and the operators raise many types
                raise LoweringError(
                    f"the backward is not one graph: {type(cause).__name__}: {first_line(cause)}",
                    where=user_frame(cause),
                    hint="keep sizes that depend on values out of the loss",
                ) from cause
        sources = trace.tag(traced.graph)
        for placeholder, original in zip(traced.graph.find_nodes(op="placeholder"), placeholders, strict=True):
            rename_placeholder(placeholder, original.name)
            placeholder.meta.update({key: value for key, value in original.meta.items() if key != "val"})
            placeholder.meta.setdefault("val", original.meta["val"])  # a trace has none of numbers and texts
            sources[placeholder.name] = original
        _drop_detach(traced.graph)
        _narrow(traced.graph, [requested[name] for name in self.wrt])
        traced.graph.eliminate_dead_code()
        traced.graph.lint()
        places = {node: place for place, node in enumerate(subject.graph.nodes)}
        return traced, {name: places[node] for name, node in sources.items()}


class _Trace(fx.Interpreter):
    """Runs the forward in a trace, and notes for which of its nodes each node of the joint graph is made.

    Attributes:
        order: place of each node, by name, when it was traced.
    """

    def __init__(self, subject: fx.GraphModule) -> None:
        super().__init__(subject)
        self.order: dict[str, int] = {}
        self._functions: dict[int, fx.Node] = {}  # by autograd's number of a backward function
        self._forward: list[tuple[int, fx.Node]] = []  # number of nodes when one was run
        self._backward: list[tuple[int, fx.Node | None]] = []  # the same as each backward function started
        self._done = 0  # number of nodes when the forward was done

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        place = _SPARSE.get(target)
        if place is not None and len(args) > place:
            args = (*args[:place], False, *args[place + 1 :])
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        self._forward.append((len(_tracer_graph().nodes), n))
        first = autograd_sequence()
        result = super().run_node(n)
        self._functions.update(dict.fromkeys(range(first, autograd_sequence()), n))
        return result

    def watch_backward(self, loss: torch.Tensor) -> None:
        """Note, as each backward function starts, how many nodes are traced by then: the forward is done."""
        self._done = len(_tracer_graph().nodes)
        pending, seen = [loss.grad_fn], set()
        while pending:
            function = pending.pop()
            if function is None or function in seen:
                continue
            seen.add(function)
            pending += [following for following, _ in function.next_functions]
            source = self._functions.get(function_sequence(function))

            def note(_: Any, source: fx.Node | None = source) -> None:
                self._backward.append((len(_tracer_graph().nodes), source))

            function.register_prehook(note)

    def tag(self, graph: fx.Graph) -> dict[str, fx.Node]:
        """Mark the phase of every node, and give backward nodes the module and source line of their forward node.

        Returns:
            The forward node that each call was made for, by name, where there is one.
        """
        seeded = False
        sources: dict[str, fx.Node] = {}
        before = {"forward": _Before(self._forward), "backward": _Before(self._backward)}
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            position = self.order[node.name]
            phase = node.meta[Key.PHASE] = "forward" if position < self._done else "backward"
            source = before[phase].at(position)
            if source is not None:
                sources[node.name] = source
                node.meta[Key.PLANNED] = source.name
            if phase == "forward":
                if (region := checkpoint_of(node)) is not None:
                    node.meta[Key.CHECKPOINT] = region
                continue
            if not seeded and node_tensor(node) is not None:  # autograd makes its seed before any other tensor
                node.meta[Key.SEED] = seeded = True
            for key in _INHERITED:
                node.meta.pop(key, None)
                if source is not None and key in source.meta:
                    node.meta[key] = source.meta[key]
        return sources


class _Before:
    """Says, for places that are asked in order, which of what was noted in order began last."""

    def __init__(self, noted: Sequence[tuple[int, fx.Node | None]]) -> None:
        self._noted, self._begun = noted, 0

    def at(self, place: int) -> fx.Node | None:
        while self._begun < len(self._noted) and self._noted[self._begun][0] <= place:
            self._begun += 1
        return self._noted[self._begun - 1][1] if self._begun else None


def _requested(subject: fx.GraphModule, wrt: Sequence[str]) -> dict[str, fx.Node]:
    """The placeholders that the loss is differentiated by, in the order of the graph."""
    return {node.name: node for node in subject.graph.find_nodes(op="placeholder") if node.name in wrt}


def _describe(tensor: torch.Tensor | None) -> str:
    return "no tensor" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _tracer_graph() -> fx.Graph:
    """The graph in the making, with the size queries that tracing takes out again where nothing reads them."""
    mode = get_proxy_mode()
    if mode is None:
        raise LoweringError("the backward was asked for outside of tracing", hint=BUG)
    return mode.tracer.graph


def _gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    if not loss.requires_grad:
        return (None,) * len(leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def _narrow(graph: fx.Graph, types: list[torch.dtype | None]) -> None:
    """Return a gradient that was made in the 16-bit type asked for as it was made, not the FP32 copy of it."""
    outputs = results_of(graph)
    first = len(outputs) - len(types)
    for place, dtype in enumerate(types):
        gradient = outputs[first + place]
        if dtype is None or not isinstance(gradient, fx.Node) or gradient.target is not torch.ops.aten._to_copy.default:
            continue
        (source,) = gradient.all_input_nodes
        value = node_tensor(source)
        if value is not None and value.dtype is dtype and dtype is not torch.float32:
            outputs[first + place] = source
    graph.output_node().args = (outputs,)


def _drop_detach(graph: fx.Graph) -> None:
    # Within one graph of values there is nothing left to detach from.
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.detach.default:
            replace_call(node, node.args[0])


def _restore_upcasts(graph: fx.Graph) -> bool:
    """Replace the placeholders marked `wide` by the casts that they stand for; whether there were any."""
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    marked = [node for node in placeholders.values() if Key.WIDE in node.meta]
    for node in marked:
        cast = upcast_behind_inputs(graph, placeholders[node.meta[Key.WIDE]])
        cast.meta[Key.PHASE] = "forward"
        replace_call(node, cast)
    return bool(marked)
