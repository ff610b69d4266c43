"""`ChannelsLast`: images and the weights of convolutions lie with the channels last, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import node_tensor, results_of, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private import puts_channels_last
from amp_compiler.ops.layout import is_channels_last, is_dense, same_layout
from amp_compiler.passes.base import InPlacePass, PassResult

_aten = torch.ops.aten
_CONVOLUTION, _BACKWARD = _aten.convolution.default, _aten.convolution_backward.default
_LAST = torch.channels_last
_DEVICE = "cuda"  # where convolutions read images so
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
# What reads memory as it lies, not elements.
_BY_STRIDES = frozenset({"aten::as_strided", "aten::as_strided_scatter", "aten::new_empty_strided", "aten::set_"})


@dataclass(frozen=True)
class ChannelsLast(InPlacePass):
    """On a GPU, let images lie with the channels last, forward and backward, and the 16-bit copies of weights too.

    Torch's compiler decides so for convolutions when it meets them. It then turns every weight at each step, lets
    cuDNN turn it once more for the gradients, and turns the weight's gradient back. Here the update writes the copy as
    cuDNN reads it, and reads the gradient as cuDNN makes it.

    Before::

        in w: fp32[64, 64, 3, 3]@cuda
        in w_low0: bf16[64, 64, 3, 3]@cuda  # low=w:bf16
        x: bf16[8, 64, 16, 16]@cuda = aten._to_copy.default(images, dtype=torch.bfloat16)
        made: bf16[8, 64, 16, 16]@cuda = aten.convolution.default(x, w_low0, …)

    After::

        in w: fp32[64, 64, 3, 3]@cuda
        in w_low0: bf16[64, 64, 3, 3]{576, 1, 192, 64}@cuda  # low=w:bf16
        x: bf16[8, 64, 16, 16]{16384, 1, 1024, 64}@cuda = aten._to_copy.default(…, memory_format=torch.channels_last)
        made: bf16[8, 64, 16, 16]{16384, 1, 1024, 64}@cuda = aten.convolution.default(x, w_low0, …)

    What the graph returns, and fills memory, keeps its strides, but for the gradients of weights.

    Left alone: other devices, FP32 convolutions, symbolic sizes, graphs for which torch's compiler finds that it would
    not pay, those that read memory by strides, and a step without cuDNN.

    Args:
        results: number of outputs before the new buffers.
        buffers: placeholder names of the buffers whose new values follow the results.
        laid_out: gives for the placeholder of a 16-bit copy that other programs of the step use already whether its
            channels are last; such a copy keeps its layout.
    """

    results: int
    buffers: tuple[str, ...] = ()
    laid_out: Mapping[str, bool] = field(default_factory=dict)
    name: ClassVar[str] = "channels_last"
    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        weights = _weights(subject.graph)
        kept = [node for node in weights if self.laid_out.get(node.name)]
        taken = [node for node in weights if self.laid_out.get(node.name, True)]
        pays = bool(taken) and _takes_channels_last(subject.graph)
        chosen = taken if pays else kept
        changed = [node for node in chosen if not is_channels_last(node.meta["val"])]
        if not changed:
            return PassResult(subject, False)
        for node in changed:
            node.meta["val"] = torch.empty_like(node.meta["val"], memory_format=_LAST)
        if pays:
            before = {node: node_tensor(node) for node in results_of(subject.graph) if isinstance(node, fx.Node)}
            _Turned(subject.graph, set(chosen), set(changed)).propagate()
            self._keep_results(subject.graph, before)
        else:
            for node in changed:
                _read_as_before(node)
        subject.recompile()
        return PassResult(subject, True)

    def _keep_results(self, graph: fx.Graph, before: Mapping[fx.Node, Tensor | None]) -> None:
        """Copies of what is returned and would lie otherwise than it did."""
        outputs, output = results_of(graph), graph.output_node()
        for place, node in enumerate(outputs[: self.results + len(self.buffers)]):
            old, new = before.get(node), node_tensor(node) if isinstance(node, fx.Node) else None
            if old is not None and new is not None and is_dense(old) and not same_layout(old, new):
                with graph.inserting_before(output):
                    outputs[place] = _laid_out_as(graph, node, old)
        output.args = (tuple(outputs),)


def _weights(graph: fx.Graph) -> list[fx.Node]:
    """The 16-bit copies of weights, on a GPU, that nothing but convolutions reads."""
    found = []
    for node in graph.find_nodes(op="placeholder"):
        tensor = node_tensor(node)
        if Key.LOW not in node.meta or tensor is None or tensor.dim() != 4 or tensor.device.type != _DEVICE:
            continue
        used = [(user, "weight") for user in node.users if user.target in (_CONVOLUTION, _BACKWARD)]
        if used and len(used) == len(node.users) and all(schema_argument(user, name) is node for user, name in used):
            found.append(node)
    return found


def _takes_channels_last(graph: fx.Graph) -> bool:
    """Whether the images of a graph may lie so, and torch's compiler would have convolutions read them so."""
    for node in graph.nodes:
        name = node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""
        if name in _BY_STRIDES:
            return False
    values = [node_tensor(node) for node in graph.find_nodes(op="call_function", target=_CONVOLUTION)]
    known = all(value is not None and all(isinstance(size, int) for size in value.shape) for value in values)
    return known and bool(torch.backends.cudnn.enabled) and puts_channels_last(graph)


def _read_as_before(weight: fx.Node) -> None:
    """Read a copy of a weight, which has its channels last for other programs, as it would lie without that."""
    users = list(weight.users)
    with weight.graph.inserting_after(weight.graph.find_nodes(op="placeholder")[-1]):
        copy = _copy(weight.graph, weight, torch.contiguous_format)
    copy.meta[Key.PHASE] = "forward"
    for user in users:
        user.replace_input_with(weight, copy)


def _copy(graph: fx.Graph, node: fx.Node, layout: torch.memory_format) -> fx.Node:
    """A call that copies a value to another layout."""
    made = graph.create_node("call_function", _aten.clone.default, (node,), {"memory_format": layout}, name="clone")
    kept = (Key.PHASE, "nn_module_stack", "stack_trace")
    made.meta = {key: node.meta[key] for key in kept if key in node.meta}
    made.meta["val"] = torch.empty_like(node.meta["val"], memory_format=layout)
    return made


def _laid_out_as(graph: fx.Graph, node: fx.Node, value: Tensor) -> fx.Node:
    """A copy of a value that lies as another, which is dense: its dimensions in the order in which that lies."""
    if value.is_contiguous():
        return _copy(graph, node, torch.contiguous_format)
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    ordered = _permuted(graph, node, order)
    copy = _copy(graph, ordered, torch.contiguous_format)
    return _permuted(graph, copy, [order.index(dim) for dim in range(value.dim())])


def _permuted(graph: fx.Graph, node: fx.Node, order: list[int]) -> fx.Node:
    made = graph.create_node("call_function", _aten.permute.default, (node, order), name="permute")
    made.meta = {**node.meta, "val": node.meta["val"].permute(order)}
    return made


class _Turned:
    """A graph whose convolutions with certain weights read and make images with the channels last.

    Args:
        graph: it.
        weights: placeholders of the weights.
        changed: those of them that have just been laid out anew.
    """

    def __init__(self, graph: fx.Graph, weights: set[fx.Node], changed: set[fx.Node]) -> None:
        self._graph, self._weights, self._moved = graph, weights, set(changed)

    def propagate(self) -> None:
        """Compute what lies otherwise from here on, and turn the images that convolutions read."""
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            if node.target in (_CONVOLUTION, _BACKWARD) and schema_argument(node, "weight") in self._weights:
                for place in range(1 if node.target is _CONVOLUTION else 2):
                    self._turn(node, place)
                value = node.meta["val"]
                self._note(node, _last(value) if isinstance(value, Tensor) else tuple(map(_last, value)))
            elif not self._moved.isdisjoint(node.all_input_nodes):
                self._note(node, _value_of(node))

    def _turn(self, node: fx.Node, place: int) -> None:
        image: Any = node.args[place]
        if is_channels_last(image.meta["val"]):
            return
        readers = [user for user in image.users if user.target in (_CONVOLUTION, _BACKWARD)]
        if image.target is _aten._to_copy.default and len(readers) == len(image.users):
            image.kwargs = {**image.kwargs, "memory_format": _LAST}
            self._note(image, _last(image.meta["val"]))
            return
        with self._graph.inserting_before(node):
            turned = _copy(self._graph, image, _LAST)
        turned.meta[Key.PHASE] = node.meta[Key.PHASE]
        for user in readers:
            user.replace_input_with(image, turned)

    def _note(self, node: fx.Node, value: Any) -> None:
        if _strides(value) != _strides(node.meta["val"]):
            node.meta["val"] = value
            self._moved.add(node)


def _last(value: Any) -> Any:
    """As cuDNN makes an image or the gradient of a weight; other values as they are."""
    is_image = isinstance(value, Tensor) and value.dim() == 4
    return torch.empty_like(value, memory_format=_LAST) if is_image else value


def _strides(value: Any) -> list[Any]:
    return [
        one.stride() if isinstance(one, Tensor) else None
        for one in (value if isinstance(value, (list, tuple)) else [value])
    ]


def _value_of(node: fx.Node) -> Any:
    """What a node makes of values that lie otherwise now; a view may have to copy them."""
    if node.target in _VIEWS:
        node.target = _aten.reshape.default
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]
