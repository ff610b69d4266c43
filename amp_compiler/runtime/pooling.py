"""Max-pooling on a CPU whose backward needs one byte for each result, and no pixels.

ATen notes the place of each largest pixel in its image, in eight bytes, and Inductor adds the gradients up in FP32 with a
scatter. The operators here note its place in the window, in one byte, and each pixel gathers its gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.fx_tools import node_tensor, schema_argument
from amp_compiler.runtime import arena, cpu_pooling

_ATEN = torch.ops.aten
_POOL = _ATEN.max_pool2d_with_indices.default
_POOL_BACKWARD = _ATEN.max_pool2d_with_indices_backward.default
_MOST = 127  # elements of a window, whose places fit into a byte
_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_SETTINGS = "int[] kernel, int[] stride, int[] padding, int[] dilation"
for _schema in (
    f"max_pool(Tensor x, {_SETTINGS}, bool ceil_mode) -> (Tensor, Tensor)",
    f"max_pool_backward(Tensor gradient, Tensor offsets, int[] size, {_SETTINGS}) -> Tensor",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.flexible_layout,))


def max_pool(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The largest pixel of each window, and where it stands there.

    Args:
        x: images [batch, channels, height, width].
        kernel: rows and columns of a window, at most 127 elements.
        stride: pixels from one window to the next, down and across.
        padding: pixels around the image that no window takes, above and below, left and right.
        dilation: pixels from one element of a window to the next.
        ceil_mode: whether a window may reach over the last pixel and its padding.

    Returns:
        The pixels, [batch, channels, rows, columns], and their places in the windows, row by row, in INT8; both with
        channels last in memory where those of `x` are. Of equal pixels it is the first; a NaN is larger than any number.

    Example:
        >>> x = torch.tensor([[[[1.0, 4.0], [3.0, 2.0]]]])
        >>> [one.tolist() for one in max_pool(x, [2, 2], [2, 2], [0, 0], [1, 1], False)]
        [[[[[4.0]]]], [[[[1]]]]]
    """
    settings = (kernel, stride, padding, dilation)
    largest, offsets = _results(x, settings, ceil_mode)
    if cpu_pooling.can_run(x):
        cpu_pooling.pool(x, largest, offsets, settings)
    else:
        made, indices = _POOL(x, *settings, ceil_mode)
        largest.copy_(made)
        offsets.copy_(_offsets(indices, x.shape[3], settings))
    return largest, offsets


def max_pool_backward(
    gradient: Tensor, offsets: Tensor, size: Sequence[int], kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """The gradient of `max_pool`'s images: each pixel's is the sum over the windows that took it, in FP32, rounded once.

    Args:
        gradient: of the pixels that were taken.
        offsets: their places in the windows.
        size: shape of the images.
        kernel: as there.
        stride: as there.
        padding: as there.
        dilation: as there.

    Returns:
        The gradient, with channels last in memory where those of `offsets` are.
    """
    settings = (kernel, stride, padding, dilation)
    made = _like(offsets, size, gradient.dtype)
    if cpu_pooling.can_run(gradient):
        cpu_pooling.pool_backward(gradient, offsets, made, settings)
        return made
    indices = _indices(offsets, size, settings)
    added = torch.zeros(*size[:2], size[2] * size[3], device=gradient.device)
    added.scatter_add_(2, indices.flatten(2), gradient.float().flatten(2))
    return made.copy_(added.view(list(size)))


def _results(x: Tensor, settings: cpu_pooling.Settings, ceil_mode: bool) -> tuple[Tensor, Tensor]:
    size = [*x.shape[:2], *(_places(x.shape[2 + dim], ceil_mode, *(pair[dim] for pair in settings)) for dim in (0, 1))]
    return _like(x, size, x.dtype), _like(x, size, torch.int8)


def _like(images: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Room for images with their channels where those of others are."""
    last = images.stride(1) == 1 and not images.is_contiguous()
    order = (0, 2, 3, 1) if last else (0, 1, 2, 3)
    return arena.empty(size, order, dtype, images.device)


def _places(pixels: int, ceil_mode: bool, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """Windows along one dimension, as `torch.nn.MaxPool2d` counts them."""
    room = pixels + 2 * padding - dilation * (kernel - 1) - 1
    places = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
    return places - 1 if ceil_mode and (places - 1) * stride >= pixels + padding else places


def _firsts(places: Sequence[int], settings: cpu_pooling.Settings, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of the first element of each window; negative in the padding."""
    _, stride, padding, _ = settings
    down, across = (torch.arange(places[dim], device=device) * stride[dim] - padding[dim] for dim in (0, 1))
    return down[:, None], across[None, :]


def _offsets(indices: Tensor, width: int, settings: cpu_pooling.Settings) -> Tensor:
    kernel, _, _, dilation = settings
    down, across = _firsts(indices.shape[2:], settings, indices.device)
    row = (indices // width - down) // dilation[0]
    return row * kernel[1] + (indices % width - across) // dilation[1]


def _indices(offsets: Tensor, size: Sequence[int], settings: cpu_pooling.Settings) -> Tensor:
    kernel, _, _, dilation = settings
    down, across = _firsts(offsets.shape[2:], settings, offsets.device)
    wide = offsets.long()
    return (down + wide // kernel[1] * dilation[0]) * size[3] + across + wide % kernel[1] * dilation[1]


def _fake_pool(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return _results(x, arguments[:4], arguments[4])


def _fake_pool_backward(gradient: Tensor, offsets: Tensor, size: Sequence[int], *settings: Any) -> Tensor:
    return _like(offsets, size, gradient.dtype)


for _name, _function, _fake in (
    ("max_pool", max_pool, _fake_pool),
    ("max_pool_backward", max_pool_backward, _fake_pool_backward),
):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_compiler::{_name}", _fake, lib=_LIBRARY)


def use_offsets(graph: fx.Graph) -> None:
    """Let every max-pooling on a CPU note offsets, where nothing but its own backward reads the indices.

    A ReLU's mask in front of it moves behind it: the gradient is not zero only where the pixel is the one that was
    taken, which is the pooling's result. So neither needs the images any more.

    Args:
        graph: an ATen graph of forward and backward whose nodes carry their fake tensors as `meta["val"]`; changed in
            place, without dead nodes but with no fake tensors for the new ones.
    """
    for node in graph.find_nodes(op="call_function", target=_POOL):
        backward = _backward_of(node)
        if backward is None:
            continue
        settings = [_pair(schema_argument(node, name)) for name in ("kernel_size", "stride", "padding", "dilation")]
        settings[1] = settings[1] or settings[0]
        x, taken = node.args[0], _item(node, 0)
        if settings[0][0] * settings[0][1] > _MOST or taken is None:
            continue
        _move_mask(graph, backward, taken)
        size = list(x.meta["val"].shape)
        with graph.inserting_before(node):
            made = graph.call_function(
                torch.ops.amp_compiler.max_pool.default, (x, *settings, bool(schema_argument(node, "ceil_mode")))
            )
            largest, offsets = (graph.call_function(operator.getitem, (made, place)) for place in (0, 1))
        with graph.inserting_before(backward):
            gathered = graph.call_function(
                torch.ops.amp_compiler.max_pool_backward.default, (backward.args[0], offsets, size, *settings)
            )
        taken.replace_all_uses_with(largest)
        backward.replace_all_uses_with(gathered)
        for dead in (backward, taken, _item(node, 1), node):
            graph.erase_node(dead)


def _backward_of(node: fx.Node) -> fx.Node | None:
    """The backward of a pooling of known sizes on a CPU, if it is all that reads the indices."""
    images, indices = node_tensor(node.args[0]), _item(node, 1)
    if images is None or images.device.type != "cpu" or images.dim() != 4 or indices is None:
        return None
    if not cpu_pooling.can_run(images) or not all(isinstance(size, int) for size in images.shape):
        return None
    (user, *more) = indices.users
    return user if not more and user.target is _POOL_BACKWARD and len(node.users) == 2 else None


def _item(node: fx.Node, place: int) -> fx.Node | None:
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == place), None)


def _pair(value: Any) -> list[int]:
    """Two numbers from one, two or none."""
    return (list(value) * 2)[:2] if isinstance(value, (list, tuple)) else [value, value]


def _move_mask(graph: fx.Graph, backward: fx.Node, taken: fx.Node) -> None:
    """Let the mask of a ReLU work on the gradient of the pooling's result instead of that of its images."""
    target = _ATEN.threshold_backward.default
    for mask in [user for user in backward.users if user.target is target]:
        if mask.args[0] is not backward or mask.args[1] is not backward.args[1] or len(backward.users) > 1:
            continue
        with graph.inserting_before(backward):
            masked = graph.call_function(target, (backward.args[0], taken, mask.args[2]))
        backward.args = (masked, *backward.args[1:])
        mask.replace_all_uses_with(backward)
        graph.erase_node(mask)
