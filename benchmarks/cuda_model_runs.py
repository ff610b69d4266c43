"""The kernels of a training step on a GPU, for `cuda_model.py`: ours, and those of torch.compile and its optimizer.

Nothing that Inductor writes is run, see `inductor_costs.py`. What runs outside of it is recorded call by call: our
kernels from the arguments of their operators, torch's optimizer, gradient scaler and clipping from those of theirs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import cases
import inductor_costs
import models
import torch
import torch.utils._pytree as pytree
from kernel_costs import BRANCH, OTHER, RECURRENCE, TRUNK, UPDATE, Kernel, foreach_launches
from measuring import TORCH_TYPES
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import amp_compiler as amp
from amp_compiler.ops.update.operators import CHECK, COMMIT, FUSED, OPERATORS
from amp_compiler.passes.step.branch_update import BESIDE, END
from amp_compiler.training import build
from amp_compiler.training.step import RUN as step_pipelines

CLIP = 1.0
_CHECK_BLOCK = 4096
_MOST_COMPILATIONS = 4
_ZERO = torch.ops.aten._foreach_zero_.default
_ALLOCATIONS = frozenset({"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach"})
_WITHOUT_A_DEVICE = {"_cudnn_rnn", "_cudnn_rnn_backward"}  # run on shapes alone: cuDNN needs a device
_OVERWRITE = frozenset({"zero_", "fill_", "copy_", "_foreach_zero_", "_foreach_copy_"})


def build_on_cuda(name: str, size: models.Size) -> models.Built:
    """A model and a batch on the GPU, their memory left as it is found: no element is ever read."""
    with torch.device("meta"):
        model, batch = cases.build_of(name, size)
    model.to_empty(device="cuda")
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    return model, {key: torch.empty_like(value, device="cuda") for key, value in batch.items()}


def ours(
    name: str, size: models.Size, dtype: str, scaled: bool, skipped: Sequence[str] = (), tuned: bool = False
) -> list[Kernel]:
    """The kernels of one step of `amp.training_step`.

    Args:
        name: of the model.
        size: of it.
        dtype: `bf16` or `fp16`.
        scaled: with a dynamic loss scale and clipping.
        skipped: passes that are left out.
        tuned: with what `mode="max-autotune"` does where a trial on the device agrees, as if all did.
    """
    model, batch = build_on_cuda(name, size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    options: dict[str, Any] = {"loss_scale": "dynamic", "clip_norm": CLIP}
    if not scaled:  # as torch's step, which looks at no gradient there
        options = {"loss_scale": amp.NoLossScale(check_finite=False)}
    step = amp.training_step(model, cases.loss_of, optimizer, dtype=dtype, passes=without(skipped), **options)
    with inductor_costs.recorded() as kernels, _our_kernels(kernels), _tuned() if tuned else contextlib.nullcontext():
        step(batch)
    if step.execution.startswith("in pieces"):
        raise SystemExit(f"{name} runs {step.execution}")
    batch_bytes = sum(value.nbytes for value in batch.values())
    kernels.append(Kernel("batch", OTHER, batch_bytes, batch_bytes, in_graph=False))
    kernels.append(Kernel("loss", OTHER, 4, 4, in_graph=False))
    return kernels


def without(skipped: Sequence[str]) -> list[Any]:
    """The pipelines of a step without some of their passes."""
    found = []
    for one in step_pipelines:
        left = [name for name in skipped if name in one.names]
        if left:
            found.append(functools.reduce(lambda pipeline, name: pipeline.skip(name), left, one))
    return found


@contextlib.contextmanager
def _tuned() -> Iterator[None]:
    """Within it every trial succeeds. Inductor is not tuned: which product is the faster one, a device has to say."""
    asked = mock.patch.object(build, "_is_tuned", lambda settings, graph_module: True)
    epilogues = mock.patch.object(build, "TRIALS", lambda operator, arguments: "")
    with asked, epilogues, mock.patch.object(build, "try_beside", lambda *given: ""):
        yield


@contextlib.contextmanager
def _our_kernels(kernels: list[Kernel]) -> Iterator[None]:
    """Within it the kernels between a step's graphs are added to the list when the step is built."""
    run_cut_step = build.run_cut_step

    def noted(cut: fx.GraphModule, examples: Sequence[Any], build_piece: Any, *rest: Any) -> Any:
        for node, beside in [*_calls(cut, ""), *_calls(getattr(cut, BESIDE, None), BRANCH)]:
            arguments = fx.node.map_arg(node.args, lambda one: one.meta.get("val"))
            kernels.extend(replace(one, beside=beside) for one in our_kernels(node.target, arguments))

        def built(piece: fx.GraphModule, given: Sequence[Any]) -> Any:
            first = len(kernels)
            run = build_piece(piece, given)
            if piece is getattr(cut, END, None):
                kernels[first:] = [replace(one, beside=TRUNK) for one in kernels[first:]]
            return run

        return run_cut_step(cut, examples, built, *rest)

    with mock.patch.object(build, "run_cut_step", noted):
        yield


def _calls(part: fx.GraphModule | None, beside: str) -> list[tuple[fx.Node, str]]:
    return [] if part is None else [(node, beside) for node in part.graph.nodes if node.op == "call_function"]


def our_kernels(operator: Any, arguments: Sequence[Any]) -> list[Kernel]:
    """What one of our operators launches; nothing for all others.

    Args:
        operator: the check, the commit, an update.
        arguments: of it, real tensors or fake ones.
    """
    if operator is CHECK:
        (grads, _), count = arguments, sum(-(-grad.numel() // _CHECK_BLOCK) for grad in arguments[0])
        finish = Kernel("check_finish", UPDATE, 8 * count, len(grads) + 8)
        return [Kernel("check", UPDATE, _size(grads), 8 * count, launches=len(_types([grads]))), finish]
    if operator is COMMIT:
        _, targets, values = arguments
        return [Kernel("commit", UPDATE, _size(values), _size(targets), launches=len(_types([targets])))]
    if operator is _ZERO:
        return [Kernel("zero", UPDATE, 0, _size(arguments[0]))]
    for optimizer in FUSED:
        for low in (False, True):
            kind = optimizer.operator(low).replace("_update", "")
            if operator is OPERATORS.get(kind):
                return _update(optimizer, optimizer.bound(low, arguments))
    return []


def _update(optimizer: Any, given: Any) -> list[Kernel]:
    changed = _size(given.weights) + _size(given.compensations) + sum(map(_size, given.states))
    columns = [given.weights, given.grads, *given.states, given.lows]
    update = Kernel(
        optimizer.name, UPDATE, changed + _size(given.grads), changed + _size(given.lows), launches=len(_types(columns))
    )
    prepare = Kernel("prepare", UPDATE, _size(given.steps), _size(given.steps) * 10) if optimizer.counts else None
    advance = Kernel("advance", UPDATE, 4, 4) if given.started is not None or given.rng is not None else None
    return [one for one in (prepare, update, advance) if one is not None]


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.dtype.itemsize for one in tensors)


def _types(columns: Sequence[Sequence[Tensor]]) -> set[Any]:
    """The combinations of element types; each is a launch."""
    return set(zip(*[[one.dtype for one in column] for column in columns if len(column)], strict=True))


def compiled(name: str, size: models.Size, dtype: str, scaled: bool) -> list[Kernel]:
    """The kernels of one step of torch.compile under torch.autocast, in CUDA graphs, as `reduce-overhead` replays them.

    The optimizer is `AdamW(fused=True)`, behind `GradScaler` and `clip_grad_norm_` where `scaled`; these run eagerly.
    """
    model, batch = build_on_cuda(name, size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    forward = torch.compile(cases.loss_of)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", TORCH_TYPES[dtype]):
            loss = forward(model, batch)
        scaler.scale(loss).backward()
        if scaled:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()

    kernels: list[Kernel] = []
    for _ in range(_MOST_COMPILATIONS):  # the first step makes the optimizer's state; another may compile again
        with inductor_costs.recorded() as written, _Recording() as called:
            step()
        if not written:
            break
        kernels = written
    else:
        raise SystemExit(f"torch.compile compiles {name} anew at every step")
    breaks = torch._dynamo.utils.counters["graph_break"]
    if breaks and name not in cases.RECURRENT:
        raise SystemExit(f"torch.compile breaks the graph of {name}: {next(iter(breaks))}")
    return [*kernels, *called.kernels]


class _Recording(TorchDispatchMode):
    """Lists the kernels of every operator that is called outside of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """So that torch.compile compiles within it."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(type(one) not in (Tensor, nn.Parameter) for one in tensors_of((args, kwargs))):
            return func(*args, **kwargs)  # a compiler tries something on tensors of its own
        name = func.overloadpacket.__name__
        result = _by_shape(func, args, kwargs) if name in _WITHOUT_A_DEVICE else func(*args, **kwargs)
        self.kernels.extend(eager_kernels(func, args, kwargs, result))
        return result


def eager_kernels(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, device: str = "cuda"
) -> list[Kernel]:
    """What a call of an operator of torch's launches outside of compiled code: by what it is given and gives.

    Views and allocations launch nothing. A list of tensors is walked over by as many kernels as torch packs it into.
    """
    name = operator.overloadpacket.__name__
    tensors = tensors_of((args, kwargs, result))
    aliases = any(one.alias_info is not None and not one.alias_info.is_write for one in operator._schema.returns)
    if name in _ALLOCATIONS or aliases or not any(one.device.type == device for one in tensors):
        return []
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    read = written = columns = 0
    longest: list[Tensor] = []
    for argument in operator._schema.arguments:
        leaves = tensors_of(given.get(argument.name))
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if name == "_fused_adamw_" and argument.name == "grads":
            writes = given.get("grad_scale") is not None
        read += 0 if writes and name in _OVERWRITE else _size(leaves)
        written += _size(leaves) if writes else 0
        if len(leaves) > 1 and argument.name != "state_steps":
            columns, longest = columns + 1, leaves
    if not any(argument.alias_info is not None for argument in operator._schema.returns):
        written += _size(tensors_of(result))
    launches = foreach_launches([one.numel() for one in longest], columns) if name.startswith(("_f", "_amp_f")) else 1
    kind = RECURRENCE if "rnn" in name else UPDATE if longest else OTHER
    return [Kernel(name, kind, read, written, launches=launches, in_graph=False)]


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a nest of values."""
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, Tensor)]


def _by_shape(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operator on the GPU, empty."""
    meta = pytree.tree_map_only(Tensor, lambda one: torch.empty_like(one, device="meta"), (args, kwargs))
    result = func(*meta[0], **meta[1])
    return pytree.tree_map_only(Tensor, lambda one: torch.empty_like(one, device="cuda"), result)


def with_layers(size: models.Size, layers: int) -> models.Size:
    """The same model of another depth."""
    return replace(size, layers=layers)


def forget() -> None:
    """Give back what a model and its program took."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
