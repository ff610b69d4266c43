"""The one table by which a kernel of our own runs in the place of an operator.

A row says which operator, where, on what condition, by what of ours, and what that gains. The pass `native_ops` puts
operators of ours into graphs. The kernels of the check and the updates run between graphs: `cut_step` cuts a step where
they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops import attention, recurrent, recurrent_network
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.layout import is_dense
from amp_compiler.ops.update.operators import CHECK, COMMIT, FUSED, OPERATORS, commit_on_cpu

FORWARD = "forward"  # before autograd, whose backward of the new operator then stands in the graph
JOINT = "joint"  # a graph that holds a backward, made by us or by a compiler
STAGES = (FORWARD, JOINT)
UPDATE = "update"  # a whole step: the check and the updates, which stand in it as `fuse_update` writes them


@dataclass(frozen=True)
class NativeOp:
    """One row of the table.

    Args:
        op: the operator that stands in a graph.
        device: the type of device that its operands are on.
        stage: the kind of graph that it is looked for in, one of `STAGES` or `UPDATE`.
        ready: whether this machine has what the kernel needs; asked where `op` stands in a graph, or may come to.
        fits: whether the kernel takes a call; it gets the operator's arguments, under its names for them, with fake
            tensors for nodes, whose symbolic sizes it must not compare.
        implementation: the operator of ours, with the arguments and results of `op`; of a row for `UPDATE` any function
            of the arguments. It gives what `op` gives for every call, so that a call which `fits` could not foresee is
            slow, never wrong.
        gain: what it gains, and by which benchmark.
        made_from: of an operator that autograd makes, a part of the names of those that it is made from: so it is found
            in a backward made inside of Inductor too (`amp.compile`), unless Inductor opens it before.
    """

    op: Any
    device: str
    stage: str
    ready: Callable[[], bool]
    fits: Callable[..., bool]
    implementation: Any
    gain: str
    made_from: str = ""


def _walks_over(weights: Sequence[Tensor], grads: Sequence[Tensor], *rest: Any) -> bool:
    """Kernels walk over memory: a weight that is a slice of something larger is left to the compiler."""
    return all(map(is_dense, weights))


def _loops_take(weights: Sequence[Tensor], grads: Sequence[Tensor], *rest: Any) -> bool:
    return all(map(is_dense, weights)) and all(grad.dtype in cpu_update.TYPES for grad in grads)


def _always(*arguments: Any) -> bool:
    return True


_ON_CPU = {
    CHECK: (_always, cpu_update.grad_check),
    COMMIT: (_always, commit_on_cpu),
    **{OPERATORS[one.name]: (_loops_take, cpu_update.FUNCTIONS[one.operator(low=False)]) for one in FUSED},
}
_ON_CUDA = {CHECK: _always, COMMIT: _always, **dict.fromkeys(OPERATORS.values(), _walks_over)}
NATIVE_OPS: tuple[NativeOp, ...] = (
    *(
        NativeOp(
            op=getattr(torch.ops.aten, kind).input,
            device=device,
            stage=FORWARD,
            ready=_always,
            fits=fits,
            implementation=getattr(torch.ops.amp_compiler, kind).default,
            gain="one node for all steps; on a CPU an FP32 state, in BF16 in 0.3 to 0.7 of torch's time",
        )
        for kind in recurrent.KINDS
        for device, fits in (("cpu", recurrent.can_run), ("cuda", recurrent_network.takes))
    ),
    NativeOp(
        op=torch.ops.aten.scaled_dot_product_attention.default,
        device="cpu",
        stage=FORWARD,
        ready=_always,
        fits=attention.takes_forward,
        implementation=torch.ops.amp_compiler.attention.default,
        gain="FP16, which is emulated: 16 bits are kept for the backward of what the kernel made, not FP32",
    ),
    NativeOp(
        op=attention.ATEN_BACKWARD,
        device="cpu",
        stage=JOINT,
        ready=lambda: cpu_update.most_inner() > 0,
        fits=attention.takes_backward,
        implementation=torch.ops.amp_compiler.attention_backward.default,
        gain="train_step.py, gpt2, bert, llama, vit: 8 to 16 ms of attention in a step become 3 to 5",
        made_from="scaled_dot_product",
    ),
    *(
        NativeOp(
            op=op,
            device="cpu",
            stage=UPDATE,
            ready=cpu_update.available,
            fits=fits,
            implementation=run,
            gain="update.py: 0.73 of the time of torch's fused AdamW with bf16 gradients",
        )
        for op, (fits, run) in _ON_CPU.items()
    ),
    *(
        NativeOp(
            op=op,
            device="cuda",
            stage=UPDATE,
            ready=lambda: True,  # where Triton is missing the step says so
            fits=fits,
            implementation=op,
            gain="one launch per group of parameters; not measured yet",
        )
        for op, fits in _ON_CUDA.items()
    ),
)
