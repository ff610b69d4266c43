"""Measures amp.compile beside torch.autocast on one model; `autocast_parity.py` makes the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import models
import torch
import torch.utils._pytree as pytree
from torch import nn

import amp_compiler as amp
from amp_compiler.forward.autocast import CastCounter

ERROR_BOUND = 1.2
BYTES_BOUND = 1.0
TORCH_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Settings:
    """What is measured: rules, 16-bit type, device, backend, model size and the seeds to average over."""

    rules: str = "default"
    dtype: str = "bf16"
    device: str = "cpu"
    backend: str = "eager"
    size: str = "small"
    seeds: int = 3


@dataclass(frozen=True)
class Parity:
    """The measurements of one model; errors are means over the seeds, bytes are of one forward.

    Args:
        model: its name.
        autocast_output_error: relative L2 distance of loss and logits to FP32, under autocast.
        amp_output_error: the same of amp.compile.
        autocast_grad_error: relative L2 distance of all parameter gradients to FP32's, under autocast.
        amp_grad_error: the same of amp.compile.
        worst_grad: the parameter whose gradient error is worst beside autocast's.
        worst_grad_ratio: its two errors, amp.compile's over autocast's.
        autocast_bytes: bytes cast under autocast, with `autocast_return_bytes`.
        autocast_return_bytes: bytes of casting 16-bit results to the types that the FP32 model returns.
        amp_bytes: bytes cast, says the plan.
        amp_counted_bytes: bytes cast, says the dispatcher when the rewritten graph runs node by node.
        low_nodes: nodes of the plan that run in 16 bits.
        fp32_nodes: nodes of the plan that run in FP32.
        keep_nodes: nodes of the plan that have no float data, or that the model pins.
        casts: casts of the plan.
    """

    model: str
    autocast_output_error: float
    amp_output_error: float
    autocast_grad_error: float
    amp_grad_error: float
    worst_grad: str
    worst_grad_ratio: float
    autocast_bytes: int
    autocast_return_bytes: int
    amp_bytes: int
    amp_counted_bytes: int
    low_nodes: int
    fp32_nodes: int
    keep_nodes: int
    casts: int

    @property
    def output_ratio(self) -> float:
        return ratio(self.amp_output_error, self.autocast_output_error)

    @property
    def grad_ratio(self) -> float:
        return ratio(self.amp_grad_error, self.autocast_grad_error)

    @property
    def bytes_ratio(self) -> float:
        """Of the two numbers that one and the same counter gave."""
        return ratio(self.amp_counted_bytes, self.autocast_bytes)

    def broken(self) -> list[str]:
        """What is out of bounds, in words."""
        problems = []
        if not self.output_ratio <= ERROR_BOUND:
            problems.append(f"output error {self.output_ratio:.2f} times autocast's")
        if not self.grad_ratio <= ERROR_BOUND:
            problems.append(f"gradient error {self.grad_ratio:.2f} times autocast's")
        if max(self.amp_bytes, self.amp_counted_bytes) > BYTES_BOUND * self.autocast_bytes:
            problems.append(
                f"{self.amp_bytes} bytes cast ({self.amp_counted_bytes} counted), autocast {self.autocast_bytes}"
            )
        return problems


@dataclass(frozen=True)
class Run:
    """What one forward and backward gave: loss and logits as one vector, and the gradient of each parameter."""

    outputs: torch.Tensor
    grads: dict[str, torch.Tensor]

    def all_grads(self, names: Sequence[str]) -> torch.Tensor:
        return torch.cat([self.grads[name].flatten() for name in names])


def ratio(ours: float, theirs: float) -> float:
    """`ours / theirs`, where nothing to nothing is 1."""
    if theirs == 0:
        return 1.0 if ours == 0 else float("inf")
    return ours / theirs


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """L2 distance over the L2 norm of `exact`."""
    return float((got - exact).norm() / exact.norm())


def forward_backward(model: nn.Module, forward: Callable[[], Any]) -> Run:
    """Run `forward` (of `model`) and its backward."""
    model.zero_grad(set_to_none=True)
    loss, logits = models.loss_and_logits(forward())
    loss.backward()
    outputs = torch.cat([loss.detach().double().reshape(1), logits.detach().double().flatten()])
    grads = {name: p.grad.double().clone() for name, p in model.named_parameters() if p.grad is not None}
    return Run(outputs, grads)


def return_bytes(outputs: Any, exact: Any) -> int:
    """Bytes moved by casting every tensor of `outputs` to the type of its counterpart in `exact`."""
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(exact), strict=True)
    return sum(
        got.numel() * (got.dtype.itemsize + want.dtype.itemsize)
        for got, want in pairs
        if isinstance(got, torch.Tensor) and got.dtype != want.dtype
    )


@dataclass(frozen=True)
class _Setup:
    """One model in its three forms."""

    model: nn.Module
    plain: Callable[[], Any]
    autocast: Callable[[], Any]
    compiled: Callable[[], Any]
    compiled_module: amp.CompiledModule


def _set_up(name: str, seed: int, settings: Settings, backend: str) -> _Setup:
    model, kwargs = models.build(name, settings.size, seed)
    model.to(settings.device)
    kwargs = {key: value.to(settings.device) for key, value in kwargs.items()}
    compiled = amp.compile(model, rules=settings.rules, dtype=settings.dtype, backend=backend)

    def under_autocast() -> Any:
        with torch.autocast(settings.device, dtype=TORCH_TYPES[settings.dtype]):
            return model(**kwargs)

    return _Setup(model, lambda: model(**kwargs), under_autocast, lambda: compiled(**kwargs), compiled)


def measure(name: str, settings: Settings) -> Parity:
    """Measure one model over all seeds."""
    output_errors, grad_errors, by_parameter = [], [], []
    for seed in range(settings.seeds):
        setup = _set_up(name, seed, settings, settings.backend)
        exact = forward_backward(setup.model, setup.plain)
        theirs = forward_backward(setup.model, setup.autocast)
        ours = forward_backward(setup.model, setup.compiled)
        names = list(exact.grads)
        if missing := [key for key in names if key not in ours.grads]:
            raise SystemExit(f"{name}: amp.compile gave no gradient for {', '.join(missing)}")
        output_errors.append([relative_error(run.outputs, exact.outputs) for run in (theirs, ours)])
        grad_errors.append([relative_error(run.all_grads(names), exact.all_grads(names)) for run in (theirs, ours)])
        by_parameter.append(
            {
                key: ratio(float((ours.grads[key] - grad).norm()), float((theirs.grads[key] - grad).norm()))
                for key, grad in exact.grads.items()
            }
        )
    worst_ratios = {key: statistics.mean(ratios[key] for ratios in by_parameter) for key in by_parameter[0]}
    worst = max(worst_ratios, key=lambda key: worst_ratios[key])
    return Parity(
        name,
        *map(statistics.mean, zip(*output_errors, strict=True)),
        *map(statistics.mean, zip(*grad_errors, strict=True)),
        worst,
        worst_ratios[worst],
        *_casts(name, settings),
    )


def _casts(name: str, settings: Settings) -> tuple[int, ...]:
    """The last fields of `Parity`; they are the same for every seed."""
    setup = _set_up(name, 0, settings, "eager")
    results = setup.compiled()  # captures, so that the counter below sees the rewritten graph alone
    with CastCounter() as counted:
        setup.compiled()
    del results
    plan = setup.compiled_module.plan
    returned = return_bytes(setup.autocast(), setup.plain())
    low = TORCH_TYPES[settings.dtype]
    with torch.autocast(settings.device, dtype=low), CastCounter() as autocast:
        setup.plain()
    precisions = [node.precision for node in plan.nodes]
    return (
        autocast.cast_bytes + returned,
        returned,
        plan.cast_bytes,
        counted.cast_bytes,
        *(precisions.count(precision) for precision in ("low", "fp32", "keep")),
        plan.cast_count,
    )
