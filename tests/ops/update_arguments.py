"""Arguments for the update operator of any fused optimizer, made from its description alone; and what it leaves."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from amp_compiler.ops.update.fused import FusedOptimizer
from amp_compiler.ops.update.operators import FUSED
from amp_compiler.ops.update.rounding import Storage

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LOWS = FLOATS[1:]
BY_NAME = {one.name: one for one in FUSED}
EVERY = [
    (one, dict(zip(one.flags, values, strict=True)))
    for one in FUSED
    for values in itertools.product((False, True), repeat=len(one.flags))
]
NAMES = [f"{one.name}-{'-'.join(name for name, value in flags.items() if value)}" for one, flags in EVERY]


def update_arguments(
    one: FusedOptimizer,
    flags: dict[str, bool],
    sizes: Sequence[Any] = (),
    *,
    weights: Sequence[torch.Tensor] | None = None,
    mode: Storage | None = None,
    weight: torch.dtype = torch.float32,
    moment: torch.dtype = torch.float32,
    more: float = 0.0,
    watched: bool = False,
    **numbers: float,
) -> list[Any]:
    """In the order of the operator: with masters where `mode` is `None`, else for weights of a type without.

    Args:
        one: the optimizer.
        flags: of its settings those that are set.
        sizes: of the weights, where they are not given.
        weights: as they lie in memory; states lie so too.
        mode: how weights without masters are stored.
        weight: the type of the weights.
        moment: the type of the states.
        more: what the hyperparameters are that are zero by default (decays, momentum, dampening); then there are copies
            in 16 bits.
        watched: whether an update with masters looks for what was written to these, as some of them were.
        numbers: hyperparameters, and `step`, `started`, `coef` and `skip`, that are others.
    """
    torch.manual_seed(0)
    flags = dict.fromkeys(one.flags, False) | flags
    group = one.classes[0]([torch.zeros(1)], lr=1e-2).param_groups[0]
    group = {key: more if value == 0 and not isinstance(value, bool) else value for key, value in group.items()}
    group |= {"l1_decay": more, **flags, **numbers}
    weights = [torch.randn(size).to(weight) for size in sizes] if weights is None else list(weights)
    states = {
        f"{state.name}s": [torch.rand_like(w, dtype=moment) for w in weights] if state.used(group) else []
        for state in one.states
    }
    low_weights = [w.to(low) for w, low in zip(weights, itertools.cycle(LOWS), strict=False)] if more else []
    for copy in low_weights[1::2] if watched else []:
        (copy[3::7] if copy.dim() else copy).fill_(0.5)  # written since
    values = [numbers.get(name, read(group)) for name, read in one.hyper.items()]
    inputs = {
        "masters": weights,
        "weights": weights,
        "grads": [torch.randn(w.shape).to(dtype) for w, dtype in zip(weights, itertools.cycle(FLOATS), strict=False)],
        "low_weights": low_weights,
        "compensations": [w * 2**-9 for w in weights] if mode == Storage.KAHAN else [],
        "steps": [torch.tensor(float(numbers.get("step", number * number))) for number in range(len(weights))],
        "started": torch.tensor(float(numbers.get("started", 1.0))),
        "rng": torch.tensor([2**40 + 17, 5]),
        "hyper": hyper(*map(float, values)),
        "coef": torch.tensor(numbers.get("coef", 0.37)),
        "skip": torch.tensor(numbers.get("skip", 0.0)),
        "mode": int(Storage.NEAREST if mode is None else mode),
        "stale": torch.zeros(len(weights), dtype=torch.uint8) if watched and more else None,
        "takes": watched and bool(len(weights) % 2),
        **states,
        **flags,
    }
    return [inputs[parameter.name] for parameter in one.parameters(low=mode is not None)]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def hyper(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def copies(arguments: Any) -> Any:
    """The same with tensors of their own."""
    return pytree.tree_map_only(torch.Tensor, torch.clone, arguments)


def assert_same_bits(first: Any, second: Any) -> None:
    """All tensors of two trees, on whatever device, to the bit, any NaN equal to any other."""
    for one, other in zip(pytree.tree_leaves(first), pytree.tree_leaves(second), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype
            assert one.stride() == other.stride() or one.device != other.device
            one, other = one.cpu(), other.cpu()
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(one[one == 0].signbit(), other[other == 0].signbit())
