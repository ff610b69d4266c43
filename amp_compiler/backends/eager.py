"""The eager backend: the rewritten graph run node by node. It is the oracle, and it allows double backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from amp_compiler.backends.backend import Backend
from amp_compiler.errors import LoweringError
from amp_compiler.fx.checkpoints import with_checkpoints
from amp_compiler.fx.graph import own_upcasts
from amp_compiler.fx.torch_private.runtime import is_transformed, saved_tensor_hooks, transforms_functions
from amp_compiler.fx.torch_private.tracing import forward_of


def build(graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = True) -> Callable[..., Any]:
    """The graph as a function of its flat inputs; every cast in it rounds, and `inputs` are not needed."""
    if torch.is_grad_enabled():
        graph_module = with_checkpoints(graph_module)
    upcasts = own_upcasts(graph_module.graph)
    forward = forward_of(graph_module)
    if not upcasts:
        return forward
    places = {node.name for node in upcasts}
    emulated = {user.name for node in upcasts for user in node.users}

    def run(*inputs: Any) -> Any:
        recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        if not recorded or transforms_functions():  # the hooks know nothing of torch.func
            return forward(*inputs)
        kept = _KeptNarrow(places, emulated)
        pack, unpack = kept.hooks(saved_tensor_hooks())
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return _Noting(graph_module, kept).run(*inputs)

    return run


class _Noting(fx.Interpreter):
    """Runs a graph and tells which tensors are nothing but 16-bit ones widened."""

    def __init__(self, graph_module: fx.GraphModule, kept: _KeptNarrow) -> None:
        super().__init__(graph_module)
        self.kept = kept

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        self.kept.within = n.name in self.kept.emulated
        value = super().run_node(n)
        if n.name in self.kept.places:
            self.kept.note(value, self.env[n.args[0]])  # type: ignore[index]
        return value


class _Narrow(NamedTuple):
    """What is kept in the place of an FP32 tensor: the 16-bit one that it was widened from, and how to read it."""

    low: Any
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class _KeptNarrow:
    """Lets autograd keep the 16-bit operand of an emulated product rather than its FP32 copy.

    Args:
        places: names of the nodes that widen.
        emulated: names of the nodes that read what these made.

    Attributes:
        within: whether one of the latter runs; what it keeps may be a copy of an operand, as `matmul` makes one.
    """

    def __init__(self, places: set[str], emulated: set[str]) -> None:
        self.places, self.emulated, self.within = places, emulated, False
        self._low: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def note(self, wide: Tensor, low: Tensor) -> None:
        """Remember that one tensor is another one widened, for as long as it lives."""
        place = _place(wide)
        if place is None:
            return
        self._low[place] = weakref.ref(wide, lambda _: self._low.pop(place, None)), low.detach()

    def hooks(self, outer: tuple[Any, Any] | None) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Hooks for saved tensors, which hand on to those that were set before."""
        before, behind = outer or ((lambda tensor: tensor), (lambda tensor: tensor))

        def pack(tensor: Tensor) -> Any:
            place = _place(tensor)
            _, low = (None, None) if place is None else self._low.get(place, (None, None))
            if tensor.dtype is not torch.float32 or place is None:
                return before(tensor)
            if low is None:
                plain = self.within and type(tensor) is Tensor and tensor.is_cpu  # comparing waits for another device
                copied = self._copy(tensor) if plain else None
                return before(tensor) if copied is None else _narrow(before(copied), copied, copied)
            return _narrow(before(low), low, tensor)

        def unpack(packed: Any) -> Tensor:
            if not isinstance(packed, _Narrow):
                return behind(packed)  # type: ignore[no-any-return]
            low = behind(packed.low)
            if low._version != packed.version and outer is None:
                raise LoweringError(
                    "a 16-bit value that the backward needs was changed in place after the forward",
                    hint="call backward first, or change a copy of it",
                )
            return low.float().as_strided(packed.size, packed.stride, packed.offset)  # type: ignore[no-any-return]

        return pack, unpack

    def _copy(self, tensor: Tensor) -> Tensor | None:
        """A 16-bit tensor that widens to exactly this one, dense; `None` where there is none."""
        low_types = {low.dtype for _, low in self._low.values()}
        for low in low_types:
            narrow = tensor.detach().to(low, memory_format=torch.contiguous_format)
            if torch.equal(narrow.float(), tensor):
                return narrow
        return None


def _narrow(kept: Any, low: Tensor, tensor: Tensor) -> _Narrow:
    return _Narrow(kept, low._version, tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset()))


def _place(tensor: Tensor) -> int | None:
    """Where a tensor lies; `None` for a sparse one and one of a transform of `torch.func`, which have no one place."""
    strided = tensor.layout is torch.strided and not is_transformed(tensor)
    return tensor.untyped_storage().data_ptr() if strided else None


BACKEND = Backend("eager", build, no_cuda_graph="backend='eager' runs the step node by node")
