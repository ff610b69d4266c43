"""`NativeOps`: kernels of our own in the place of operators, as the table in `ops/native.py` says."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import torch.utils._pytree as pytree
from torch import fx

from amp_compiler.errors import PassError
from amp_compiler.fx.graph import node_tensor
from amp_compiler.ops.native import NATIVE_OPS, STAGES, NativeOp
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.passes.base import LatePass


@dataclass(frozen=True)
class NativeOps(LatePass):
    """Let the operators of `ops.native.NATIVE_OPS` run in kernels of our own, where these take them.

    A row of that table says which operator, on which device and on what condition. The operator of ours has the same
    arguments and results, so nothing else in the graph changes.

    Before (the backward of attention in BF16 on a CPU)::

        made: (bf16[2, 4, 10, 8], …) = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(g, q, k, v, …)

    After::

        made: (bf16[2, 4, 10, 8], …) = amp_compiler.attention_backward.default(g, q, k, v, …)

    The operator inside of a `typed_op` is changed like any other, where its kernel takes the types of both its runs.

    Left alone: other devices, calls that the row's condition refuses (FP32 attention, dropout in it, sizes that are not
    known), and machines without the kernel.

    Args:
        stage: `"forward"` for a graph before autograd, `"joint"` for one with a backward; empty for both.
    """

    stage: str = ""
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stage not in ("", *STAGES):
            raise PassError(f"stage={self.stage!r} is not known", hint=f"use one of {', '.join(map(repr, STAGES))}")

    @property
    def rows(self) -> tuple[NativeOp, ...]:
        """The rows of the table for this stage."""
        stages = (self.stage,) if self.stage else STAGES
        return tuple(row for row in NATIVE_OPS if row.stage in stages)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Change targets in place; whether there were any."""
        table, modified = self.rows, False
        for node in graph.nodes:
            rows = [row for row in table if node.op == "call_function" and row.op is _operator(node)]
            if not rows or any("val" not in one.meta for one in node.all_input_nodes):  # of a user's pass in Inductor
                continue
            calls = list(_calls(node, node.target is typed_op))
            row = next((row for row in rows if row.ready() and all(_takes(row, call) for call in calls)), None)
            if row is None:
                continue
            if node.target is typed_op:
                node.update_arg(0, row.implementation)
            else:
                node.target = row.implementation
            modified = True
        return modified

    def awaited(self, graph: fx.Graph) -> bool:
        """Whether autograd may yet make operators of the table from a graph."""
        sources = [row for row in self.rows if row.made_from]
        for node in graph.nodes:
            for row in sources if node.op == "call_function" else ():
                devices = {
                    tensor.device.type for one in node.all_input_nodes if (tensor := node_tensor(one)) is not None
                }
                if row.made_from in str(_operator(node)) and row.device in devices:
                    return True
        return False

    def identity(self) -> str:
        """A text that is another one whenever `rewrite` may do something else: for a cache of compiled graphs."""
        return ", ".join((sources(), self.stage, *(f"{row.implementation}={row.ready()}" for row in self.rows)))


def _operator(node: fx.Node) -> Any:
    """What a call runs, also inside of a `typed_op`."""
    return node.args[0] if node.target is typed_op else node.target


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _takes(row: NativeOp, call: Call) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    return all(one.device.type == row.device for one in tensors) and row.fits(*call[0], **call[1])


def _calls(node: fx.Node, typed: bool) -> Iterator[Call]:
    """What the operator of a node is called with, fake tensors for nodes: twice, in two types each, in a `typed_op`."""
    if not typed:
        yield _faked((node.args, node.kwargs))
        return
    op_args, op_kwargs, reads, rereads, _, *rest = cast("tuple[Any, ...]", node.args[1:])
    emulate = bool(rest and rest[0])
    leaves, spec = pytree.tree_flatten(_faked((op_args, op_kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for types in (reads, rereads):
        operands = list(leaves)
        for place, dtype in zip(places, types, strict=True):
            widened = emulate and dtype in (torch.float16, torch.bfloat16)
            operands[place] = leaves[place].to(torch.float32 if widened else dtype)
        yield pytree.tree_unflatten(operands, spec)


def _faked(arguments: Any) -> Any:
    return fx.node.map_arg(arguments, lambda source: source.meta["val"])


@functools.cache
def sources() -> str:
    """The operators, what decides about them, and this file, as one hash."""
    folder = Path(str(resources.files("amp_compiler.ops")))
    files = [Path(__file__), *sorted(folder.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()
