"""Graphs as Dynamo hands them to a backend, traced again to ATen training IR: inputs by their names in the model."""

import inspect
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from amp_compiler.errors import CaptureError, ValuesReadError
from amp_compiler.fx.capture.autocast_state import regions_in
from amp_compiler.fx.capture.errors import name_of, user_frame
from amp_compiler.fx.capture.exact_numbers import settle_numbers
from amp_compiler.fx.capture.exchanged_data import assign_data, refuse_unless_copied
from amp_compiler.fx.capture.mixed_types import refuse_mixed_types
from amp_compiler.fx.capture.tracing import tracing_context
from amp_compiler.fx.captured import Captured, Input, Source
from amp_compiler.fx.checkpoints import mark_checkpoint
from amp_compiler.fx.graph import LOW_TYPES, rename_placeholder, replace_call, user_source
from amp_compiler.fx.meta import CUSTOM_REGION, Key, region_pin
from amp_compiler.fx.torch_private.dynamo import AUTOGRAD_FUNCTION, TENSOR_OF_NUMBER, is_restart, source_text
from amp_compiler.fx.torch_private.tracing import (
    is_of_transform,
    new_graph_module,
    opaque_call,
    restored_transforms,
    traced_graph,
    with_regions,
)


@dataclass(frozen=True)
class Names:
    """How the graphs of a model name what they are of.

    Args:
        modules: path of each module, by `str(id(module))`, as Dynamo has it in `nn_module_stack`.
        tensors: of each parameter and buffer where it comes from and its qualified name, by `id(tensor)`.
        arguments: names of the model's positional arguments.
        traced: path of the module that is a graph itself, by the `id` of each stack of modules that its nodes hold:
            Dynamo hands on what an exported program says of its own modules, and leaves out those around it.
        model: how the model is called: its class.
        root: name of the model in the module whose graphs these are; empty where it is that module.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[int, tuple[Source, str]] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    traced: Mapping[int, str] = field(default_factory=dict)
    model: str = ""
    root: str = ""

    @classmethod
    def of(cls, model: nn.Module, forward: Callable[..., Any] | None = None) -> Self:
        """The names of a model, as they are now.

        Args:
            model: the module; what is tied has the first of its names.
            forward: whose arguments a call gives; that of the model where it is `None`.
        """
        tensors: dict[int, tuple[Source, str]] = {}
        for source, named in (
            (Source.PARAMETER, model.named_parameters()),
            (Source.BUFFER, model.named_buffers()),
        ):
            for name, tensor in named:
                tensors.setdefault(id(tensor), (source, name))
        try:
            shown = inspect.signature(model.forward if forward is None else forward).parameters.values()
        except (TypeError, ValueError):  # written in C
            shown = {}.values()
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        arguments = tuple(one.name for one in shown if one.kind not in several)
        modules = {str(id(one)): name for name, one in model.named_modules()}
        graphs = [(name, one) for name, one in model.named_modules() if isinstance(one, fx.GraphModule)]
        stacks = [(name, node.meta.get("nn_module_stack")) for name, one in graphs for node in one.graph.nodes]
        return cls(modules, tensors, arguments, {id(stack): name for name, stack in stacks if stack}, name_of(model))


def captured_from_dynamo(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    low: torch.dtype | None,
    names: Names,
    is_wide: Callable[[Tensor], bool] = lambda parameter: False,
) -> Captured:
    """Trace one of Dynamo's graphs again to ATen training IR, before autograd.

    Args:
        graph_module: Dynamo's graph of torch functions and methods.
        inputs: the example inputs that Dynamo gives with it.
        low: the low type that is planned for; `None` where nothing is planned.
        names: of the model.
        is_wide: which 16-bit parameters are traced as FP32, for which the model was written.

    Returns:
        The ATen graph, with one placeholder per placeholder of Dynamo's; its example inputs are the `val` of these.

    Raises:
        CaptureError: it cannot be traced; names the line of the model.
    """
    settle_numbers(graph_module)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("example_value", real) for node, real in zip(placeholders, inputs, strict=True)]
    pairs = zip(examples, inputs, strict=True)
    examples = [widened_example(one) if isinstance(real, Tensor) and is_wide(real) else one for one, real in pairs]
    _name_modules(graph_module, names)
    # Before autograd, unless a transform of torch.func has to be carried out: it is gone behind that alone.
    before = not any(map(is_of_transform, graph_module.graph.nodes))
    body = _prepared(graph_module, before)
    # Dynamo's own fake mode: constants that are made while it is traced must be of the same.
    fake_mode = next((value.fake_mode for value in examples if isinstance(value, FakeTensor)), None)
    try:
        with (
            tracing_context(),
            regions_in(low),
            restored_transforms(),
            fx_traceback.preserve_node_meta(),
        ):
            traced = traced_graph(
                _Retrace(body).run_traced, *examples, pre_dispatch=before, _allow_non_fake_inputs=True
            )
    except Exception as cause:  # tracing runs the model's own calls, which may raise anything
        if is_restart(cause):
            raise
        raise CaptureError(
            f"a graph of the model cannot be traced to ATen: {type(cause).__name__}: {cause}",
            where=user_frame(cause),
            hint="exclude that part with torch.compiler.disable, or keep it out of the compiled module",
        ) from cause
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default):
        if "val" not in node.meta:
            raise ValuesReadError(
                "an index or a size is read from a tensor while the graph is made",
                where=user_source(node.meta.get("stack_trace")),
                hint="index with a tensor of one dimension, or use index_select",
            )
    if before:
        traced = with_regions(traced)
    else:
        traced.graph.eliminate_dead_code()  # checks of sizes, which have no value
        for node in traced.graph.nodes:
            region = (node.meta.get("custom") or {}).get(CUSTOM_REGION)
            if region is not None and node.op == "call_function":
                node.meta[Key.PIN] = region_pin(region, user_source(node.meta.get("stack_trace")))
    refuse_mixed_types(traced, low is not None)
    entries = _entries(traced.graph.find_nodes(op="placeholder"), placeholders, inputs, names)
    constants = _lifted(traced, fake_mode)
    traced.recompile()
    entries += tuple(Input(name, Source.CONSTANT, name) for name in constants)
    return Captured(traced, entries, constants)


def widened_example(example: Any) -> Any:
    """A stand-in of a parameter as a step computes with it: FP32 where it has 16 bits."""
    if not isinstance(example, FakeTensor) or example.dtype not in LOW_TYPES:
        return example
    with example.fake_mode, torch.no_grad():
        return example.detach().float().requires_grad_(example.requires_grad)


def _lifted(traced: fx.GraphModule, fake_mode: Any) -> dict[str, Tensor]:
    """Make the tensors that the trace has made inputs behind the others, as those of torch.export are."""
    constants: dict[str, Tensor] = {}
    last = next(iter(reversed(traced.graph.find_nodes(op="placeholder"))), None)
    for node in traced.graph.find_nodes(op="get_attr"):
        value = getattr(traced, node.target)
        if not isinstance(value, Tensor):
            continue
        if isinstance(value, FakeTensor):
            what = "a weight is a tensor of a class of its own, such as those that torchao quantizes"
            raise ValuesReadError(what, hint="torch.compile(model) under torch.autocast takes such a model")
        name = f"c_{node.target.strip('_')}"
        if name not in constants:
            with traced.graph.inserting_after(last) if last is not None else traced.graph.inserting_before():
                last = traced.graph.placeholder(name)
            last.meta["val"] = value if fake_mode is None else fake_mode.from_tensor(value, static_shapes=True)
            constants[name] = value
        placeholder = next(one for one in traced.graph.find_nodes(op="placeholder") if one.name == name)
        replace_call(node, placeholder)
    return constants


class _Retrace(fx.Interpreter):
    """Runs Dynamo's graph while it is traced. What has a backward of its own stays one node.

    Args:
        graph_module: the graph.
        within: the number of the region of checkpointing that it is of; `None` for a graph that is of none.
    """

    def __init__(self, graph_module: fx.GraphModule, within: int | None = None) -> None:
        super().__init__(graph_module)
        self._within, self._numbers = within, itertools.count(1)

    def run_traced(self, *inputs: Any) -> Any:
        """Run it; a region of autocast that an error leaves open is closed."""
        self._regions: list[torch.autocast] = []
        try:
            return self.run(*inputs)
        finally:
            while self._regions:
                self._regions.pop().__exit__(None, None, None)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As it is, but for what would lose its backward or its recomputation."""
        name = getattr(target, "__name__", "")
        if name == "_enter_autocast":  # which alone would be noted, and change no types
            device, dtype, enabled, cached = args
            self._regions.append(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached))
            return self._regions[-1].__enter__()
        if name == "_exit_autocast":
            return self._regions.pop().__exit__(None, None, None)
        if target is operator.getitem and (places := _read_places(*args)):
            return torch.ops.aten.index.Tensor(args[0], places)
        if target is AUTOGRAD_FUNCTION:
            return opaque_call(target, args, kwargs)
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            inner, *operands = args
            number = next(self._numbers) if self._within is None else self._within
            mark_checkpoint(inner, number)
            return _Retrace(inner, number).run_traced(*operands)
        return super().call_function(target, args, kwargs)


def _read_places(value: Any, index: Any) -> list[Tensor | None]:
    """The places of an index that has tensors of no dimension, which torch would read; empty for any other index."""
    places = index if isinstance(index, tuple) else (index,)
    read = [isinstance(one, Tensor) and not one.dim() and one.dtype in (torch.int64, torch.int32) for one in places]
    plain = isinstance(value, Tensor) and any(read)
    if not plain or not all(known or one == slice(None) for known, one in zip(read, places, strict=True)):
        return []
    return [one if known else None for known, one in zip(read, places, strict=True)]


def _entries(
    traced: Sequence[fx.Node], placeholders: Sequence[fx.Node], inputs: Sequence[Any], names: Names
) -> tuple[Input, ...]:
    """What each input is; the placeholders are named after it."""
    entries = []
    for place, (node, original, value) in enumerate(zip(traced, placeholders, inputs, strict=True)):
        source, target = names.tensors.get(id(value), (None, ""))
        text = source_text(original)
        if source is None and isinstance(value, nn.Parameter):
            source, target = Source.PARAMETER, _readable(text)
        if source is None and not isinstance(value, Tensor):
            source = Source.NUMBER
        if source is None:
            source = Source.USER if re.match(r"L\['(?!self'|model')", text) else Source.CONSTANT
        said = target or _argument(text, names.arguments) or original.name
        rename_placeholder(node, placeholder_name(source, said))
        if not isinstance(value, Tensor):
            node.meta.setdefault("val", original.meta.get("example_value"))
        called = re.sub(r"^L\['(\w+)'\]", r"\1", text) if source is Source.USER else _readable(text)
        entries.append(Input(node.name, source, target or called, place))
    return tuple(entries)


def placeholder_name(source: Source, said: str) -> str:
    """The name of a placeholder, as torch.export gives it.

    Args:
        source: where it comes from.
        said: its name there.
    """
    prefix = {Source.PARAMETER: "p_", Source.BUFFER: "b_", Source.CONSTANT: "c_"}.get(source, "")
    return prefix + re.sub(r"\W+", "_", said).strip("_")


def _argument(text: str, arguments: Sequence[str]) -> str:
    """The name of a user's input, as its source `L['args'][0]['x']` or `L['kwargs']['mask']` gives it."""
    match = re.match(r"L\['(args|batch)'\]\[(\d+)\](.*)", text)
    if match:
        place = int(match[2])
        return (arguments[place] if place < len(arguments) else f"{match[1]}_{place}") + _readable(match[3])
    return _readable(re.sub(r"^L\['kwargs'\]|^L", "", text))


def _readable(text: str) -> str:
    """A source without Python's punctuation."""
    text = re.sub(r"\._(?:modules|parameters|buffers)\b|\.__dict__\b|\['_(?:modules|parameters|buffers)'\]", "", text)
    text = re.sub(r"^[LG]\['(?:self|model)'\]", "", text)
    return re.sub(r"\['?([^\]']*)'?\]", r".\1", text).strip(".")


def _name_modules(graph_module: fx.GraphModule, names: Names) -> None:
    """Paths of modules as the model has them, in the graph and in what it calls."""
    for inner in graph_module.modules():
        if isinstance(inner, fx.GraphModule):
            for node in inner.graph.nodes:
                stack = node.meta.get("nn_module_stack")
                if stack:
                    above = names.traced.get(id(stack), "")
                    node.meta["nn_module_stack"] = {
                        key: (names.modules.get(key.partition("@")[0], f"{above}.{path}".strip(".")), kind)
                        for key, (path, kind) in stack.items()
                    }


def _prepared(graph_module: fx.GraphModule, keep_regions: bool) -> fx.GraphModule:
    """A copy that can be traced: data is detached; nodes are marked where the trace loses regions of autocast."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    regions: list[tuple[str, bool]] = []
    for node in graph_module.graph.nodes:
        called = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if called in ("_enter_autocast", "_exit_autocast") and not keep_regions:
            if called == "_exit_autocast":
                regions.pop()
            else:
                regions.append((str(node.args[0]), bool(node.args[2])))
            continue
        copied = graph.node_copy(node, lambda old: environment[old])
        copied.meta.pop("grapharg", None)  # a weak reference to an input, with which torch swaps no parameter
        if called == "_get_data_attr":  # of `x.data`, which no tracer takes note of
            copied.target = torch.Tensor.detach
        if called == "set_":  # of `x.data = y`, which would move the copy that is traced to other memory
            refuse_unless_copied(node)
            copied.target = assign_data
        if node.target is TENSOR_OF_NUMBER:  # Dynamo's for `torch.tensor` of a number that is an input
            _as_stacked_numbers(copied)
        environment[node] = copied
        if regions and not regions[-1][1]:
            copied.meta["custom"] = {**copied.meta.get("custom", {}), CUSTOM_REGION: regions[-1][0]}
    return new_graph_module(graph_module, graph)


def _as_stacked_numbers(node: fx.Node) -> None:
    """Have `torch.tensor` of numbers, in lists or not, made by what a trace can follow."""
    values = [
        one.meta.get("example_value") if isinstance(one, fx.Node) else one for one in pytree.tree_leaves(node.args)
    ]
    if values and all(isinstance(one, (float, int, torch.SymFloat, torch.SymInt)) for one in values):
        node.target = _stacked_numbers


def _stacked_numbers(
    data: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **unused: Any
) -> Tensor:
    """`torch.tensor` of numbers. Torch's own form for a trace ends in `detach_`, which a stack of several refuses."""
    if dtype is None:
        kinds = {type(one) for one in pytree.tree_leaves(data)}
        real = kinds & {float, torch.SymFloat}
        dtype = torch.get_default_dtype() if real else torch.bool if kinds == {bool} else torch.int64
    if not isinstance(data, (list, tuple)):
        return torch.scalar_tensor(data, dtype=dtype, device=device)
    return torch.stack([_stacked_numbers(one, dtype=dtype, device=device) for one in data])
