"""`Program`: one captured and rewritten forward, ready to run for inputs of one signature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.errors import CaptureError
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.forward.shape_guards import InputForm
from amp_compiler.forward.tensor_versions import write_mark
from amp_compiler.fx.capture import Captured, Source, capture_module, tensor_getter
from amp_compiler.fx.graph import CAST, torch_dtype
from amp_compiler.fx.lower import apply_plan, lower, lower_graph
from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.graph import ValueKind
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.capture.canonicalize import normalize
from amp_compiler.passes.device.multiply_convolutions import MultiplyConvolutions
from amp_compiler.passes.pipeline import make_plan
from amp_compiler.passes.precision.legalize import Legalize
from amp_compiler.passes.precision.type_backward import BACKWARD, BACKWARD_RULE, TypeBackward, emulates
from amp_compiler.policy.rules import RuleSet


def rewrite(
    graph_module: fx.GraphModule,
    plan: PrecisionPlan,
    rules: RuleSet,
    *,
    differentiable: bool = True,
    past_weights: bool = False,
    compiled: bool = False,
) -> bool:
    """Carry a plan out on the normal-form graph that it was made for, in place, and fit it to the device.

    Args:
        graph_module: the graph.
        plan: its plan.
        rules: the rules that it was made by.
        differentiable: whether gradients will be asked for; without, what the plan says of them is left out.
        past_weights: as for `TypeBackward`.
        compiled: whether a compiler will run it, which is then given the forms that it does fastest.

    Returns:
        Whether the low type is emulated for want of hardware, so that every down-cast must really round.
    """
    apply_plan(graph_module, plan)
    if differentiable:
        _mark_backward(graph_module.graph, plan)
        TypeBackward(rules.ops, past_weights)(graph_module)
    emulated = Legalize(rules.ops)(graph_module).modified or emulates(graph_module.graph)
    if compiled:
        MultiplyConvolutions()(graph_module)
    return emulated and plan.device == "cpu"


def _mark_backward(graph: fx.Graph, plan: PrecisionPlan) -> None:
    """Note on each node the type that the plan gives its gradients."""
    types = {"low": torch_dtype(dtype_from_short(plan.dtype)), "fp32": torch.float32}
    planned = {node.name: node for node in plan.nodes if node.backward}
    for node in graph.nodes:
        if node.op == "call_function" and node.name in planned:
            node.meta[BACKWARD] = types[planned[node.name].backward]
            node.meta[BACKWARD_RULE] = planned[node.name].rule


def plan_captured(captured: Captured, rules: RuleSet, low: DType) -> PrecisionPlan:
    """Normalise a captured graph in place and plan it."""
    normalize(captured.graph_module)
    return make_plan(lower(captured), rules, low)


def rewrite_piece(
    graph_module: fx.GraphModule, kinds: dict[str, ValueKind], rules: RuleSet, low: DType, compiled: bool
) -> tuple[PrecisionPlan, bool]:
    """Plan and rewrite one flat ATen graph in place; returns the plan and what `rewrite` returns."""
    normalize(graph_module)
    plan = make_plan(lower_graph(graph_module, kinds), rules, low)
    return plan, rewrite(graph_module, plan, rules, past_weights=True, compiled=compiled)


@dataclass
class Program:
    """One rewritten forward of a module.

    Args:
        captured: its graph (rewritten) with the origin of each placeholder.
        plan: what was decided.
        run: the graph as a function of the flat inputs.
        weights: low-precision copies of weights that are kept between calls (inference only).
        fetch: for each placeholder, how to get its tensor; `None` for a user input.
        form: which inputs it can be used for.
    """

    captured: Captured
    plan: PrecisionPlan
    run: Callable[..., Any]
    weights: KeptWeights
    fetch: tuple[Callable[[], torch.Tensor] | None, ...]
    form: InputForm

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph."""
        return self.captured.graph_module

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """Run on the flattened user arguments."""
        inputs = [
            leaves[entry.index] if get is None else get()
            for entry, get in zip(self.captured.inputs, self.fetch, strict=True)
        ]
        results = self.run(*inputs, *self.weights.current(inputs))
        return pytree.tree_unflatten(list(results), self.captured.out_spec)


class KeptWeights:
    """Low-precision copies of weights, made once and made again when a parameter changes.

    A change is seen as `write_mark` says: after a step of any optimizer of torch all copies are made again.
    `parameter.data.mul_()` shows nowhere: after such a write call `.train()` or `.eval()`, which drops the copies.
    """

    def __init__(self, casts: Sequence[tuple[int, torch.dtype]] = ()) -> None:
        self._casts = tuple(casts)
        self._seen: list[tuple[int, ...] | None] = [None] * len(self._casts)
        self._copies: list[torch.Tensor | None] = [None] * len(self._casts)

    def current(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies for today's inputs."""
        copies: list[torch.Tensor] = []
        for slot, (index, dtype) in enumerate(self._casts):
            tensor = inputs[index]
            counted = not tensor.is_inference()  # an inference tensor has no version counter: its copy is never kept
            mark = (id(tensor), *write_mark(tensor)) if counted else None
            copy = self._copies[slot]
            if copy is None or mark is None or self._seen[slot] != mark:
                copy = tensor.detach().to(dtype)
                self._copies[slot], self._seen[slot] = copy, mark
            copies.append(copy)
        return copies

    def drop(self) -> None:
        """Forget the copies; the next call makes them again."""
        self._seen = [None] * len(self._casts)


def hoist_weight_casts(captured: Captured) -> KeptWeights:
    """Move casts of parameters and buffers out of the graph, in place: each becomes a further placeholder.

    Only for runs without autograd, where a cast of a weight gives the same result on every call.
    """
    graph = captured.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    index = {
        node: position
        for position, (node, entry) in enumerate(zip(placeholders, captured.inputs, strict=True))
        if entry.source in (Source.PARAMETER, Source.BUFFER) and not node.meta.get("amp_volatile")
    }
    last, casts = placeholders[-1] if placeholders else None, []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not CAST or node.args[0] not in index:
            continue
        casts.append((index[node.args[0]], node.args[1]))
        with graph.inserting_after(last):
            last = graph.placeholder(f"{node.args[0].name}_kept_{len(casts)}")
        last.meta = dict(node.meta)
        node.replace_all_uses_with(last)
        graph.erase_node(node)
    if casts:
        graph.lint()
        captured.graph_module.recompile()
    return KeptWeights(casts)


def build_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, keep_weights: bool
) -> Program:
    """Capture, plan, rewrite and compile a module for these arguments.

    Args:
        model: the module, in the mode in which it is to run.
        args: positional arguments.
        kwargs: keyword arguments.
        settings: the options.
        keep_weights: keep low-precision weights between calls (no autograd).

    Raises:
        CaptureError: the module cannot be taken as one graph.
        LoweringError: it cannot be rewritten or compiled.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    captured = capture_module(model, args, kwargs, settings.dynamic_shapes)
    users = sum(entry.source is Source.USER for entry in captured.inputs)
    if users != len(leaves) or captured.in_spec != spec:
        raise CaptureError(
            f"capture saw {users} inputs where the call has {len(leaves)}",
            where=type(model).__name__,
            mend="pass arguments that pytree can flatten (tensors, numbers, lists, dicts, dataclasses)",
        )
    form = InputForm.of(captured, leaves)
    low = settings.low(device_of([*leaves, *model.parameters()]))
    plan = plan_captured(captured, settings.rules, low)
    emulated = rewrite(
        captured.graph_module, plan, settings.rules, differentiable=not keep_weights, past_weights=True,
        compiled=settings.runs_on.compiled,
    )  # fmt: skip
    weights = hoist_weight_casts(captured) if keep_weights else KeptWeights()
    fetch = tuple(
        None if entry.source is Source.USER else tensor_getter(model, captured, entry) for entry in captured.inputs
    )
    examples = _examples(captured, leaves, fetch, weights, settings)
    run = settings.runs_on.build(captured.graph_module, examples, emulated)
    return Program(captured, plan, run, weights, fetch, form)


def _examples(
    captured: Captured, leaves: Sequence[Any], fetch: Sequence[Any], weights: KeptWeights, settings: Settings
) -> list[Any]:
    """Inputs to compile for: the real ones, or the symbolic ones of the capture where shapes are dynamic."""
    real = [leaves[entry.index] if get is None else get() for entry, get in zip(captured.inputs, fetch, strict=True)]
    if settings.dynamic_shapes is None:
        return [*real, *weights.current(real)]
    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    return [
        _symbolic(node.meta.get("val", value), value)
        for node, value in zip(nodes, [*real, *weights.current(real)], strict=True)
    ]


def _symbolic(captured: Any, real: Any) -> Any:
    """The captured stand-in of an input, requiring a gradient where the real one does: capture does not note that."""
    if isinstance(captured, torch.Tensor) and isinstance(real, torch.Tensor) and real.requires_grad:
        return captured.detach().requires_grad_()
    return captured
