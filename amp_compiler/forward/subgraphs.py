"""The graphs that Dynamo makes of a model: each planned, rewritten and compiled."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.errors import AmpError, CaptureError, ValuesReadError
from amp_compiler.forward.forms import Forms
from amp_compiler.forward.kept_weights import KeptWeights, kept_weights
from amp_compiler.forward.low_weights import LowWeights
from amp_compiler.forward.module_hooks import ModuleHooks
from amp_compiler.forward.notices import course, silent_dynamo, telling, warn_of_static
from amp_compiler.forward.program import build_run, plan_captured, rewrite
from amp_compiler.forward.rerun import Rerun
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.errors import known_error, user_frame
from amp_compiler.fx.capture.frontend import MOST_FORMS, Frontend, ModelError, place_of, words_of
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.capture.retrace import Names, captured_from_dynamo
from amp_compiler.fx.capture.spread import refuse_spread
from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.checkpoints import compiled_checkpoints
from amp_compiler.fx.garbage import without_full_collections
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.stand_in import FunctionModule
from amp_compiler.fx.torch_private.breaks import Break, break_before
from amp_compiler.fx.torch_private.dynamo import functions_given_up, restart_with_plain_numbers, why_not_captured
from amp_compiler.fx.torch_private.runtime import modes_around, no_saved_tensor_hooks
from amp_compiler.fx.torch_private.tracing import BUILDING
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.step.place_weights import PlaceWeights
from amp_compiler.passes.step.separate_buffers import written_placeholders

logger = logging.getLogger("amp_compiler")
Run = Callable[..., Any]
Around = Callable[[str, fx.GraphModule, Run], Run]


@dataclass(eq=False)
class Subgraph:
    """One of Dynamo's graphs, rewritten.

    Args:
        captured: the rewritten graph with the origin of each placeholder.
        plan: what was decided.
        run: the graph as a function of its flat inputs.
        weights: low-precision copies of weights that are kept between calls (inference only).
        stages: the text of the graph behind each pass.
        broken: the graph break that ends it; `None` where it ends with the function.
    """

    captured: Captured
    plan: PrecisionPlan
    run: Callable[..., Any]
    weights: KeptWeights
    stages: Stages
    broken: Break | None = None

    @property
    def graph_module(self) -> fx.GraphModule:
        """The rewritten graph."""
        return self.captured.graph_module

    def __call__(self, *args: Any) -> Any:
        """Run it on what Dynamo gives."""
        with autocast_off():
            return self.run(*args, *self.captured.constants.values(), *self.weights.current(args))


@without_full_collections()
def build_subgraph(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    settings: Settings,
    low: DType,
    names: Names | None = None,
    stages: Stages | None = None,
    called: str = "a compiled graph",
    low_weights: LowWeights | None = None,
) -> Subgraph:
    """Plan, rewrite and compile one of Dynamo's graphs.

    Args:
        graph_module: Dynamo's graph.
        inputs: its example inputs.
        settings: the options.
        low: the 16-bit type.
        names: of the model.
        stages: takes the text behind each pass; new ones where it is `None`.
        called: how messages call the graph.
        low_weights: stores its parameters in 16 bits; `None` where they stay as they are.

    Raises:
        CaptureError: it cannot be traced.
        LoweringError: it cannot be rewritten or compiled.
        ValuesReadError: it needs the values of a tensor while it is traced.
    """
    stages, names = Stages() if stages is None else stages, names or Names()
    with generators_kept(), no_saved_tensor_hooks():
        captured = captured_from_dynamo(graph_module, inputs, torch_dtype(low), names)
        plan = plan_captured(captured, settings, low, stages, names.root, name=names.model)
        stored = low_weights.store(captured, inputs, plan, torch_dtype(low)) if low_weights is not None else {}
        rerun = Rerun(captured.graph_module, called) if settings.runs_on.compiled and torch.is_grad_enabled() else None
        protected: tuple[str, ...] = ()
        if settings.rules.buffers == "skip_nonfinite":
            buffers = [entry.name for entry in captured.inputs if entry.source is Source.BUFFER]
            protected = written_placeholders(captured.graph_module.graph, buffers)
        if torch.is_grad_enabled():
            emulated = rewrite(captured.graph_module, plan, settings, stages, protected=protected)
        else:
            held = (Source.PARAMETER, Source.BUFFER)
            kept = tuple(entry.name for entry in captured.inputs if entry.source in held and entry.name not in stored)
            emulated = rewrite(
                captured.graph_module, plan, settings, stages, "INFERENCE", weights=kept, protected=protected
            )
        if stored:
            PlaceWeights(stored, ()).run(captured.graph_module)
            stages.note(PlaceWeights.name, stages.texts.of(captured.graph_module))
        weights = kept_weights(captured)
        nodes = captured.graph_module.graph.find_nodes(op="placeholder")
        # A trace does not note whether an input requires a gradient, and is a leaf, to which a write gives none.
        wanted = [one if getattr(one, "requires_grad", False) else None for one in inputs]
        pairs = ((node.meta["val"], needs) for node, needs in zip_longest(nodes, wanted))
        with torch.enable_grad():
            grown = [(one.detach().requires_grad_() if needs is not None else one, needs) for one, needs in pairs]
            examples = [one if needs is None or needs.is_leaf else one.view_as(one) for one, needs in grown]
        run = build_run(captured.graph_module, examples, settings, emulated, stages)
        if rerun is not None:
            run = rerun.around(run, lambda graph, examples: settings.builder(graph, examples, emulated))
        return Subgraph(captured, plan, run, weights, stages, break_before(graph_module))


class Subgraphs:
    """A model as Dynamo captures it.

    Args:
        model: the module.
        settings: the options.
        name: how messages call it.
        around: makes of each graph what is called in its place, from its name, its rewritten graph and what runs it.
        said: the warnings that were given, each once.
        root: name of the model that rules are for, where it stands within this one.

    Attributes:
        graphs: all of them, in the order in which they were made.
        last: those that ran in the last call.
        without: how the last call ran, in words, where none of them did.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        name: str,
        around: Around | None = None,
        said: set[str] | None = None,
        root: str = "",
    ) -> None:
        self.graphs: list[Subgraph] = []
        self.last: tuple[Subgraph, ...] = ()
        self.without = self._unplanned = ""
        self._around = around or (lambda graph_name, graph_module, run: run)
        self._said = set() if said is None else said
        self._model, self._settings, self._name, self._root = model, settings, name, root
        self._called, self._breaks, self._cut = threading.local(), False, ""
        self._low_weights = LowWeights(model) if settings.weights == "low" else None
        # Layers of one kind that break have one function, which is compiled for each of them.
        self._forms = Forms(name, MOST_FORMS + max(Counter(map(type, model.modules())).values()) - 1)

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling() and (reason := why_not_captured(left_alone=True)):
                raise ModelError(reason, hint="leave out fullgraph=True")  # else it runs under autocast
            return model(*args, **kwargs)

        # Of a function modules are known by the names of its arguments, and hooks of modules to Dynamo alone.
        self._captured = model.function if isinstance(model, FunctionModule) else run
        self._hooks = ModuleHooks(model)
        self._frontends: dict[object, Frontend] = {}  # by the hooks that stand, and whether it has to be one graph
        self._regions: dict[object, Frontend] = {}  # of checkpointing, by their code

    def forget(self) -> None:
        """Drop what was compiled."""
        self._frontends.clear()
        self._regions.clear()
        self.graphs.clear()
        self._forms = Forms(self._name, self._forms.most)

    def _frontend(self, whole: bool) -> Frontend:
        key = self._hooks.key(), whole or self._settings.fullgraph
        if key not in self._frontends:
            refuse_spread(self._model)
            self._frontends.setdefault(key, self._frontend_of(self._captured, key[1]))
        return self._frontends[key]

    def _frontend_of(self, function: Callable[..., Any], whole: bool = False) -> Frontend:
        dynamic, most = self._settings.dynamic, self._forms.most + 1
        hooks = isinstance(self._model, FunctionModule)
        return Frontend(function, self._build, self._name, dynamic, whole, self._capturing, most, hooks=hooks)

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """What its captures run within."""
        widened = contextlib.nullcontext() if self._low_weights is None else self._low_weights.widened()
        with silent_dynamo(), telling(self._name), widened:
            yield

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model; under `torch.autocast`, said once, where Dynamo would run it as it is.

        Raises:
            AmpError: one of its graphs cannot be rewritten or compiled.
            ModelError: the model raises with these inputs.
        """
        modes = modes_around()  # which are to see all that a call runs: of one graph, or under autocast
        cut = f"a dispatch mode is around the call, and {self._cut}" if modes and self._cut else ""
        reason = self._forms.given_up or why_not_captured() or cut
        if reason and self._settings.fullgraph:
            raise CaptureError(f"{self._name} is not one graph: {reason}", hint="leave out fullgraph=True")
        if reason:
            return self._under_autocast(reason, args, kwargs)
        graphs: list[Subgraph] = []
        try:
            return self._run(self._frontend(whole=bool(modes)), args, kwargs, graphs)
        except ModelError as error:
            if graphs or self._settings.fullgraph:
                raise
            return self._without_capture(error, args, kwargs)
        except CaptureError as error:
            if not modes or graphs:
                raise
            self._cut = error.what
            return self(args, kwargs)

    def _run(self, frontend: Frontend, args: tuple[Any, ...], kwargs: dict[str, Any], graphs: list[Subgraph]) -> Any:
        """Call the model through Dynamo; `graphs` takes those that begin to run."""
        before, self._called.graphs = getattr(self._called, "graphs", None), graphs
        skipped = functions_given_up()
        # Dynamo's guards on functions that are called between two graphs fail now and then while another thread calls.
        # A capture widens parameters that are stored in 16 bits.
        alone = self._breaks or not self.graphs or self._low_weights is not None
        turn = BUILDING if alone else contextlib.nullcontext()
        try:
            held = self._model.buffers() if self._settings.rules.buffers == "skip_nonfinite" else ()
            buffers = [(one, one.detach().clone()) for one in held if _has_where(one)]
            with turn, compiled_checkpoints(self._checkpointed), autocast_off():
                result = frontend(*args, **kwargs)
            if buffers and len(graphs) != 1:  # of one graph the pass `protect_buffers` does so
                _keep_finite(buffers, result)
        finally:
            self._called.graphs = before
        self.last = tuple(graphs) or self.last
        self.without = "" if graphs else f"as it is written: {self._unplanned or 'Dynamo captured nothing of it'}"
        if functions_given_up() > skipped or not (graphs or self.graphs or self._unplanned):
            self._forms.note_skipped(any(True for _ in self._model.parameters()))
        if self._forms.given_up and not self.graphs:
            self._warn("%s ran as it is, and runs under torch.autocast from now on: %s", self._forms.given_up)
        return result

    def _without_capture(self, error: CaptureError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model does with inputs with which it raises while it is captured: it may catch that itself."""
        try:
            return self._under_autocast(error.what, args, kwargs)
        except Exception as own:  # the model's own, whatever that is
            what = f"{self._name} raises {type(own).__name__}: {own}"  # Dynamo's has sizes without a number
            hint = "the call or the model is wrong: it raises the same without amp.compile"
            raise ModelError(what, where=error.where or user_frame(own), hint=hint) from own

    def _under_autocast(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that no graph can take: torch's own mixed precision."""
        self.last, self.without = (), f"under torch.autocast: {reason}"
        device = device_of([*pytree.tree_leaves((args, kwargs)), *self._model.parameters()])
        with self._settings.autocast(device):
            result = self._model(*args, **kwargs)
        self._warn("%s runs under torch.autocast, which knows no rules: %s", reason)
        return result

    def _warn(self, message: str, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            logger.warning(message, self._name, reason)

    def _checkpointed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compile what is checkpointed, once for all functions of the same code: most are made anew at every call."""
        code = _code_of(function)
        if code not in self._regions:
            self._regions[code] = self._frontend_of(_call)
        return functools.partial(self._regions[code], function)

    def _build(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if not any(node.op.startswith("call") for node in graph_module.graph.nodes):
            return graph_module.forward  # of a call that computes nothing there is no plan
        stages = Stages()
        low, name = self._settings.low(device_of([*inputs, *self._model.parameters()])), f"graph{len(self.graphs)}"
        names, called = replace(Names.of(self._model), root=self._root), f"{name} of {self._name}"
        try:
            if (progress := course()) is not None:
                progress.stages = stages
            subgraph = build_subgraph(
                graph_module, inputs, self._settings, low, names, stages, called, self._low_weights
            )
            if progress is not None:
                progress.plan = subgraph.plan
        except AmpError as cause:
            restart_with_plain_numbers(graph_module)
            if not isinstance(cause, ValuesReadError):
                raise
            self._unplanned = f"a graph of it runs in the model's types, without a plan: {cause}"
            logger.warning("%s: %s", self._name, self._unplanned)
            return graph_module.forward
        self.graphs.append(subgraph)
        self._breaks |= subgraph.broken is not None
        self._forms.note()
        if self._settings.dynamic and not any(map(_has_dynamic_size, subgraph.graph_module.graph.nodes)):
            warn_of_static(called)
        subgraph.run = self._around(name, subgraph.graph_module, subgraph.run)

        def run(*values: Any) -> Any:
            graphs = getattr(self._called, "graphs", None)
            if graphs is not None:
                graphs.append(subgraph)
            return subgraph(*values)

        return run


def _has_where(tensor: torch.Tensor) -> bool:
    """Whether torch compares and chooses numbers of such a tensor: not of 8-bit floating point, nor sparse."""
    return tensor.layout is torch.strided and not (tensor.is_floating_point() and tensor.itemsize == 1)


def _keep_finite(buffers: Sequence[tuple[torch.Tensor, torch.Tensor]], result: Any) -> None:
    """Give buffers what they held before where a result, or what was written to one, is not finite."""
    read = [one.detach() for one in pytree.tree_leaves(result) if isinstance(one, torch.Tensor) and _has_where(one)]
    device = buffers[0][0].device
    with torch.no_grad():
        flags = [torch.isfinite(one).all().to(device) for one in read]
        for now, before in buffers:
            kept = (now == before) | (now.isnan() & before.isnan())
            flags.append((torch.isfinite(now) | kept).all().to(device))
        finite = torch.stack(flags).all()
        for now, before in buffers:
            now.data.copy_(torch.where(finite.to(now.device), now, before))  # their versions stay


def _has_dynamic_size(node: fx.Node) -> bool:
    shape = getattr(node.meta.get("val"), "shape", ()) if node.op == "placeholder" else ()
    return any(isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None for size in shape)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _code_of(function: Callable[..., Any]) -> object:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", type(function))


def plan_of(subgraphs: Sequence[Subgraph]) -> PrecisionPlan:
    """The plans of several graphs as one; names carry the number of their graph.

    Args:
        subgraphs: one at least.
    """
    plans = [one.plan for one in subgraphs]
    if len(plans) == 1:
        return plans[0]
    nodes = tuple(
        replace(
            node,
            name=f"graph{i}/{node.name}",
            inputs=tuple(f"graph{i}/{value}" for value in node.inputs),
            outputs=tuple((f"graph{i}/{value}", dtype) for value, dtype in node.outputs),
        )
        for i, plan in enumerate(plans)
        for node in plan.nodes
    )
    casts = tuple(
        replace(
            cast,
            value=f"graph{i}/{cast.value}",
            users=tuple((f"graph{i}/{user}", place) for user, place in cast.users),
        )
        for i, plan in enumerate(plans)
        for cast in plan.casts
    )
    inputs = tuple((f"graph{i}/{value}", dtype) for i, plan in enumerate(plans) for value, dtype in plan.inputs)
    outputs = tuple(f"graph{i}/{value}" for i, plan in enumerate(plans) for value in plan.outputs)
    unmatched = [{rule.rule for rule in plan.unused_rules} for plan in plans]
    unused = tuple(rule for rule in plans[0].unused_rules if all(rule.rule in rules for rules in unmatched))
    model = replace(
        plans[0].model,
        parameters=0,  # several graphs may read one
        inputs=tuple(shape for plan in plans for shape in plan.model.inputs),
        names={f"graph{i}/{value}": name for i, plan in enumerate(plans) for value, name in plan.model.names.items()},
    )
    return replace(plans[0], nodes=nodes, casts=casts, inputs=inputs, outputs=outputs, unused_rules=unused, model=model)


def stages_of(subgraphs: Sequence[Subgraph]) -> Stages:
    """The stages of several graphs as one; names carry the number of their graph. None without a graph."""
    if len(subgraphs) == 1:
        return subgraphs[0].stages
    stages = Stages()
    for number, one in enumerate(subgraphs):
        for stage in one.stages:
            stages.note(f"graph{number}/{stage.name}", stage.text)
    return stages


def execution_of(subgraphs: Sequence[Subgraph]) -> str:
    """How a call ran, in words: as one graph, or as several and what broke them."""
    breaks = [one.broken for one in subgraphs if one.broken is not None]
    if not breaks:
        return "as one graph" if len(subgraphs) == 1 else f"as {len(subgraphs)} graphs"
    first = breaks[0]
    place, words = place_of(first), words_of(first)
    known = known_error("it", words, place)
    words, hint = (words, first.hint) if known is None else (known.what, known.hint)
    return (
        f"as {len(subgraphs)} subgraphs, with a graph break{f' at {place}' if place else ''}: {words}"
        f"{f' ({hint})' if hint else ''}"
    )
