"""The loss of a training step, captured by Dynamo as one graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from amp_compiler.errors import CaptureError
from amp_compiler.forward.notices import silent_dynamo
from amp_compiler.fx.capture import frontend
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.capture.retrace import Names, captured_from_dynamo, placeholder_name, widened_example
from amp_compiler.fx.captured import Captured, Input, Source
from amp_compiler.fx.graph import add_placeholder, copy_graph, replace_call, results_of
from amp_compiler.fx.synchronized_norms import mark_norms, norms_apart
from amp_compiler.fx.torch_private.runtime import no_saved_tensor_hooks
from amp_compiler.ops.loss_mark import MARK, mark_loss
from amp_compiler.passes.step.separate_buffers import written_placeholders
from amp_compiler.training.loss_module import LossModule
from amp_compiler.training.weights import is_stored_low

NAME, SUBJECT = "the training step", "the loss function"


@dataclass(eq=False)
class CapturedLoss:
    """The loss as a graph, one of Dynamo's.

    Args:
        captured: the graph; its first result is the loss.
        inputs: what it was captured with, one for each of Dynamo's inputs.
        place: where the loss stands among the results that Dynamo waits for.
        held: the parameters and buffers among the inputs of the last call, by placeholder.

    Attributes:
        trained: ids of the parameters that it was given last and that require a gradient.
    """

    captured: Captured
    inputs: tuple[Any, ...]
    place: int
    held: dict[str, Tensor]

    def __post_init__(self) -> None:
        names = [entry.name for entry in self.captured.inputs]
        self._places = [names.index(name) for name in self.held]
        self._note_trained()

    def _note_trained(self) -> None:
        self.trained = tuple(id(one) for one in self.held.values() if one.requires_grad)

    def takes(self, inputs: Sequence[Any]) -> bool:
        """Take the inputs of a call: whether its parameters and buffers are those of the last one."""
        held = [inputs[place] for place in self._places]
        same = all(map(is_, held, self.held.values()))
        if not same:
            self.held.update(zip(self.held, held, strict=True))
            self._note_trained()
        return same

    def copy(self) -> Captured:
        """The graph, to be rewritten."""
        graph_module = copy_graph(self.captured.graph_module)
        pairs = zip(self.captured.graph_module.graph.nodes, graph_module.graph.nodes, strict=True)
        for node, copied in pairs:
            copied.name = node.name  # a copy gives names of Python's own, such as `input`, a number
        return replace(self.captured, graph_module=graph_module)

    def returned(self, results: Sequence[Any]) -> list[Any]:
        """The results in the order in which Dynamo waits for them."""
        loss, *others = results
        return [*others[: self.place], loss, *others[self.place :]]

    @property
    def is_dynamic(self) -> bool:
        """Whether a size or a number of it is symbolic."""
        values = [node.meta.get("val") for node in self.captured.graph_module.graph.find_nodes(op="placeholder")]
        sizes = (size for value in values if isinstance(value, Tensor) for size in value.shape)
        symbols = (one for one in (*values, *sizes) if not isinstance(one, (int, Tensor)))
        return any(not isinstance(one, torch.SymInt) or one.node.maybe_as_int() is None for one in symbols)


def with_parameters(captured: Captured, model: LossModule, wanted: Collection[int]) -> Captured:
    """The graph with placeholders of parameters that it does not read, and that may get a gradient from elsewhere.

    Args:
        captured: a captured loss, which is changed.
        model: the loss as a module.
        wanted: ids of the parameters that other ranks, or batches before, have a gradient of.
    """
    graph = captured.graph_module.graph
    known = {entry.target for entry in captured.inputs}
    missing = [(name, one) for name, one in model.named_parameters() if id(one) in wanted and name not in known]
    if not missing:
        return captured
    placeholders = graph.find_nodes(op="placeholder")
    fake_mode = next(one.fake_mode for node in placeholders if isinstance(one := node.meta["val"], FakeTensor))
    last, entries = placeholders[-1], list(captured.inputs)
    for name, parameter in missing:
        example = fake_mode.from_tensor(parameter, static_shapes=True)
        meta = {"val": widened_example(example) if is_stored_low(parameter) else example}
        last = add_placeholder(last, placeholder_name(Source.PARAMETER, name), meta)
        entries.append(Input(last.name, Source.PARAMETER, name))
    captured.graph_module.recompile()
    return replace(captured, inputs=tuple(entries))


@contextmanager
def around_capture(model: LossModule) -> Iterator[None]:
    """What captures of a loss run within."""
    with norms_apart(model), silent_dynamo():
        yield


def captured_loss(
    graph_module: fx.GraphModule, inputs: Sequence[Any], model: LossModule, low: torch.dtype | None
) -> CapturedLoss:
    """The loss in one of Dynamo's graphs.

    Args:
        graph_module: Dynamo's graph of `loss_of`.
        inputs: its example inputs.
        model: the loss as a module.
        low: the low type that is planned for; `None` in plain FP32.

    Raises:
        CaptureError: it cannot be traced, or the loss is no result of it.
        AmpError: it multiplies what torch does not.
    """
    with generators_kept(), no_saved_tensor_hooks():
        captured = captured_from_dynamo(graph_module, inputs, low, Names.of(model), is_stored_low)
    place = _loss_first(captured.graph_module)
    captured = _with_owners(captured, inputs, model)
    mark_norms(captured.graph_module, model)
    pairs = zip(captured.inputs, inputs, strict=False)
    held = {entry.name: value for entry, value in pairs if entry.source in (Source.PARAMETER, Source.BUFFER)}
    return CapturedLoss(captured, tuple(inputs), place, held)


def _loss_first(graph_module: fx.GraphModule) -> int:
    """Put the loss in front of the other results, and take its mark away; gives the place where it stood."""
    output, marks = graph_module.graph.output_node(), graph_module.graph.find_nodes(op="call_function", target=MARK)
    results = results_of(graph_module.graph)
    place = next((place for place, node in enumerate(results) if node in marks), None)
    if place is None:
        raise CaptureError("the loss is no result of the captured graph", hint="return it as loss_fn has computed it")
    loss, others = results[place].args[0], [*results[:place], *results[place + 1 :]]
    output.args = ((loss, *others),)
    for mark in marks:
        replace_call(mark, mark.args[0])
    graph_module.recompile()
    return place


def _with_owners(captured: Captured, inputs: Sequence[Any], model: LossModule) -> Captured:
    """Take in what the loss function holds beside the model: parameters, and tensors that the graph writes to."""
    graph = captured.graph_module.graph
    names = [entry.name for entry in captured.inputs]
    written = {*written_placeholders(graph, names)}
    known = {id(one) for one in (*model.parameters(), *model.buffers())}
    entries: list[Input] = []
    for entry, value in zip(captured.inputs, inputs, strict=False):
        kind = entry.source
        if kind is Source.CONSTANT and entry.name in written:
            kind = Source.BUFFER
        if kind in (Source.PARAMETER, Source.BUFFER) and id(value) not in known:
            target = model.adopt_tensor(_outer_name(entry.target), value, kind is Source.PARAMETER)
            entry = replace(entry, source=kind, target=target)
        entries.append(entry)
    return replace(captured, inputs=(*entries, *captured.inputs[len(inputs) :]))


def _outer_name(target: str) -> str:
    """How the code of a loss calls what it holds, as far as the source of an input tells."""
    name = re.sub(r".*(?:cell_contents|__globals__|loss_fn)\.?", "", target).strip(".")
    return name or "value"


def _marked(model: LossModule) -> Callable[..., Any]:
    """The loss, marked, and aux."""

    def loss_of(*batch: Any) -> Any:
        loss, aux = model(*batch)
        return mark_loss(loss), aux

    return loss_of


def loss_frontend(
    model: LossModule,
    run: Callable[[CapturedLoss], Callable[..., Any]],
    low: torch.dtype | None,
    dynamic: bool | None,
    around: Callable[[], AbstractContextManager[Any]],
) -> frontend.Frontend:
    """The loss behind Dynamo: gives it and aux, by what `run` gave.

    Args:
        model: the loss as a module.
        run: makes of a captured loss what Dynamo calls in its place.
        low: the low type that is planned for; `None` in plain FP32.
        dynamic: as for `torch.compile`.
        around: a context for captures.
    """

    def build(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return run(captured_loss(graph_module, inputs, model, low))

    return frontend.Frontend(
        _marked(model), build, NAME, dynamic, whole=True, around=around, subject=SUBJECT, values=True
    )


def capture_once(model: LossModule, batch: Sequence[Any], low: torch.dtype | None) -> CapturedLoss:
    """The loss as one graph for a batch; nothing runs.

    Args:
        model: the loss as a module.
        batch: arguments of the loss function behind the model.
        low: the low type that is planned for; `None` in plain FP32.

    Raises:
        CaptureError: it is not one graph.
    """

    def make(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> CapturedLoss:
        return captured_loss(graph_module, inputs, model, low)

    with torch.enable_grad():
        captured: CapturedLoss = frontend.capture_once(
            _marked(model), make, SUBJECT, batch, {}, around=lambda: around_capture(model), values=True
        )
    return captured
