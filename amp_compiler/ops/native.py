"""The one table by which a kernel of our own takes the place of an operator; `passes.device.native_ops` reads it.

A row says which operator, where, on what condition, by which operator of ours, and what that gains. Update kernels take
no operator's place: `fuse_update` writes them, and `cut_step` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from amp_compiler.ops import attention, lstm
from amp_compiler.ops.cpu import update as cpu_update

FORWARD = "forward"  # before autograd, whose backward of the new operator then stands in the graph
JOINT = "joint"  # a graph that holds a backward, made by us or by a compiler
STAGES = (FORWARD, JOINT)


@dataclass(frozen=True)
class NativeOp:
    """One row of the table.

    Args:
        op: the operator that stands in a graph.
        device: the type of device that its operands are on.
        stage: the kind of graph that it is looked for in, one of `STAGES`.
        ready: whether this machine has what the kernel needs; asked only where `op` stands in a graph.
        fits: whether the kernel takes a call; it gets the operator's arguments, with fake tensors for nodes.
        implementation: the operator of ours, with the arguments and results of `op`. It gives what `op` gives for every
            call, so that a call which `fits` could not foresee is slow, never wrong.
        gain: what it gains, and by which benchmark.
        made_from: of an operator that autograd makes, a part of the names of those that it is made from.
    """

    op: Any
    device: str
    stage: str
    ready: Callable[[], bool]
    fits: Callable[..., bool]
    implementation: Any
    gain: str
    made_from: str = ""


NATIVE_OPS: tuple[NativeOp, ...] = (
    NativeOp(
        op=torch.ops.aten.lstm.input,
        device="cpu",
        stage=FORWARD,
        ready=torch.backends.mkldnn.is_available,
        fits=lstm.can_run,
        implementation=torch.ops.amp_compiler.lstm.default,
        gain="train_step.py, lstm: 37 ms of oneDNN in a step become 12 (small batch: 15 and 3.5)",
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
)
