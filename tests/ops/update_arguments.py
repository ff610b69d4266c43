"""Arguments for the update operator of any fused optimizer, made from its description alone."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from amp_compiler.ops.update.fused import FusedOptimizer
from amp_compiler.ops.update.operators import FUSED
from amp_compiler.ops.update.rounding import Storage

GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)
EVERY = [
    (one, dict(zip(one.flags, values, strict=True)))
    for one in FUSED
    for values in itertools.product((False, True), repeat=len(one.flags))
]
NAMES = [f"{one.name}-{'-'.join(name for name, value in flags.items() if value)}" for one, flags in EVERY]


def update_arguments(
    one: FusedOptimizer,
    flags: dict[str, bool],
    sizes: tuple[int, ...],
    *,
    mode: Storage | None = None,
    weight: torch.dtype = torch.float32,
    more: float = 0.0,
) -> list[Any]:
    """In the order of the operator: with masters where `mode` is `None`, else for weights of a type without.

    `more` is what the hyperparameters are that are zero by default: decays, momentum, dampening.
    """
    torch.manual_seed(0)
    group = one.classes[0]([torch.zeros(1)], lr=1e-2).param_groups[0]
    group = {key: more if value == 0 and not isinstance(value, bool) else value for key, value in group.items()}
    group |= {"l1_decay": more, **flags}
    weights = [torch.randn(size).to(weight) for size in sizes]
    low_weights = [one.bfloat16() for one in weights] if more else []
    for copy in low_weights[1::2]:
        copy[3::7] = 0.5  # written since
    states = {f"{state.name}s": [torch.rand(s) for s in sizes] if state.used(group) else [] for state in one.states}
    given = {
        "masters": weights,
        "weights": weights,
        "grads": [torch.randn(size).to(dtype) for size, dtype in zip(sizes, itertools.cycle(GRADIENTS), strict=False)],
        "low_weights": low_weights,
        "compensations": [one * 2**-9 for one in weights] if mode == Storage.KAHAN else [],
        "steps": [torch.tensor(float(number * number)) for number in range(len(sizes))],
        "started": torch.tensor(1.0),
        "rng": torch.tensor([2**40 + 17, 5]),
        "hyper": torch.tensor([float(read(group)) for read in one.hyper.values()], dtype=torch.float64),
        "coef": torch.tensor(0.37),
        "skip": torch.tensor(0.0),
        "mode": int(Storage.NEAREST if mode is None else mode),
        "stale": torch.zeros(len(sizes), dtype=torch.uint8) if more else None,
        "takes": bool(len(sizes) % 2),
        **states,
        **flags,
    }
    return [given[parameter.name] for parameter in one.parameters(low=mode is not None)]


def tensors_of(arguments: list[Any]) -> list[torch.Tensor]:
    """All tensors among them, NaN as one number."""
    lists = (one if isinstance(one, list) else [one] for one in arguments)
    return [one.nan_to_num(0.5) for group in lists for one in group if isinstance(one, torch.Tensor)]
