"""`Differentiate`: generate the backward of a rewritten forward, as one explicit joint graph."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.fx.traceback as fx_traceback
from torch import fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from amp_compiler.errors import LoweringError
from amp_compiler.fx_tools import node_tensor, rename_placeholder, results_of
from amp_compiler.passbase import Pass, PassResult
from amp_compiler.runtime import lstm

PHASE = "amp_phase"  # key in node.meta: "forward" or "backward"
SEED = "amp_seed"  # key in node.meta of the node that starts the backward
_INHERITED = ("nn_module_stack", "stack_trace")


@dataclass(frozen=True)
class Differentiate(Pass[fx.GraphModule]):
    """Trace autograd over a forward graph, so that forward and backward stand in one graph.

    The types of the backward follow from the casts in the forward: the adjoint of a cast is the cast back. No ambient
    autocast takes part. Tied weights are one placeholder and get one summed gradient; a placeholder that the loss does
    not depend on gets `None`.

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

    Args:
        wrt: names of the placeholders to differentiate by. The loss is the first output and must be a float scalar.
    """

    wrt: tuple[str, ...]
    name: ClassVar[str] = "differentiate"

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

    def ensures(self, before: fx.GraphModule, after: fx.GraphModule) -> str | None:
        """There is one gradient, or `None`, for every name, in the shape of its placeholder."""
        gradients = results_of(after.graph)[len(results_of(before.graph)) :]
        if len(gradients) != len(self.wrt):
            return f"there are {len(gradients)} gradients for {len(self.wrt)} placeholders"
        shapes = {node.name: node_tensor(node) for node in after.graph.find_nodes(op="placeholder")}
        for name, gradient in zip(self.wrt, gradients, strict=True):
            source, made = shapes.get(name), node_tensor(gradient) if isinstance(gradient, fx.Node) else None
            if made is not None and source is not None and made.shape != source.shape:
                return f"the gradient of '{name}' has the shape {tuple(made.shape)}"
        return None

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Trace; the given graph stays as it is."""
        placeholders = subject.graph.find_nodes(op="placeholder")
        wanted = [place for place, node in enumerate(placeholders) if node.name in self.wrt]
        by_name = {placeholders[place].name: position for position, place in enumerate(wanted)}
        marks: dict[str, int] = {}

        def joint(*inputs: Any) -> list[Any]:
            leaves = list(inputs)
            for place in wanted:
                leaves[place] = inputs[place].detach().requires_grad_()
            with torch.enable_grad():
                results = _Forward(subject).run(*leaves)
                marks["forward"] = _traced_nodes()
                gradients = _gradients(results[0], [leaves[place] for place in wanted])
            return [*results, *[gradients[by_name[name]] for name in self.wrt]]

        examples = [node.meta["val"] for node in placeholders]
        with warnings.catch_warnings(), fx_traceback.preserve_node_meta():
            warnings.simplefilter("ignore")
            traced = make_fx(joint, _allow_non_fake_inputs=True)(*examples)
        _tag(traced.graph, marks["forward"])
        for made, original in zip(traced.graph.find_nodes(op="placeholder"), placeholders, strict=True):
            rename_placeholder(made, original.name)
            made.meta.update({key: value for key, value in original.meta.items() if key != "val"})
        _drop_detach(traced.graph)
        traced.graph.eliminate_dead_code()
        traced.graph.lint()
        traced.recompile()
        return PassResult(traced, True)


class _Forward(fx.Interpreter):
    """Runs the forward; an LSTM on a CPU runs as an operator whose backward can stand in a graph."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.lstm.input and lstm.can_run(args[0], args[1]):
            return lstm.lstm(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _describe(tensor: torch.Tensor | None) -> str:
    return "no tensor" if tensor is None else f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def _traced_nodes() -> int:
    mode = get_proxy_mode()
    if mode is None:
        raise LoweringError("the backward was asked for outside of tracing", mend="this is a bug; please report it")
    return len(mode.tracer.graph.nodes)


def _gradients(loss: torch.Tensor, leaves: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    if not loss.requires_grad:
        return (None,) * len(leaves)
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def _tag(graph: fx.Graph, forward: int) -> None:
    """Mark the phase of every node, and give backward nodes the module and source line of their forward node."""
    origin: dict[int, dict[str, Any]] = {}
    seeded = False
    for position, node in enumerate(graph.nodes):
        if node.op != "call_function":
            continue
        number = node.meta.get("seq_nr")
        if position < forward:
            node.meta[PHASE] = "forward"
            if number is not None and "nn_module_stack" in node.meta:
                origin[number] = node.meta
            continue
        node.meta[PHASE] = "backward"
        if not seeded:  # autograd makes its seed before anything else
            node.meta[SEED] = seeded = True
        source = origin.get(number, {}) if number is not None else {}
        for key in _INHERITED:
            if key in source:
                node.meta[key] = source[key]


def _drop_detach(graph: fx.Graph) -> None:
    # Within one graph of values there is nothing left to detach from.
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
