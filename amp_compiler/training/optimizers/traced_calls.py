"""What an optimizer's code meets while it is traced: gradients by hand, numbers as tensors, no reading of values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from amp_compiler.errors import OptimizerError
from amp_compiler.fx.torch_private.runtime import exchanged
from amp_compiler.ops.update.operators import FUSED_NAMES

_READS = (
    Tensor.item, Tensor.tolist, Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.numpy,
)  # fmt: skip
# In-place methods that torch composes of others; `torch.func.functionalize` does not know them.
_COMPOSITE = frozenset(
    f"{name}_"
    for name in (
        *("absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "clip", "divide"),
        *("fix", "float_power", "multiply", "negative", "square", "subtract", "true_divide"),
    )
)
_GRAD, _DATA = Tensor.grad.__get__, Tensor.data.__get__  # type: ignore[attr-defined, union-attr]


class StepCalls(TorchFunctionMode):
    """Stands between an optimizer's code and torch.

    - `p.grad` gives the gradient of the step, and `p.data` the parameter itself, because no gradient is recorded.
    - A number that is a 0-dim tensor here (the learning rate, a step count) may stand where torch takes a Python
      number: as `alpha=` of `add`, `value=` of `addcmul` and `addcdiv`, `weight` of `lerp`. It is rounded to the type
      of the tensor, as torch rounds a Python number, and the order of the roundings is that of ATen's CPU kernels.
    - An in-place method that functionalisation does not know is written as the method and a `copy_`.
    - Reading a value is refused.

    Args:
        name: class of the optimizer, for messages.
        grads: gradient by `id` of the parameter.
        reads: let `item()` give an fp64 tensor instead of a refusal.

    Raises:
        OptimizerError: a value is read.
    """

    def __init__(self, name: str, grads: Mapping[int, Tensor], *, reads: bool) -> None:
        super().__init__()
        self.name, self.grads, self.reads = name, grads, reads

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer one call of torch."""
        kwargs = dict(kwargs or {})
        if func == _GRAD:
            return self.grads.get(id(args[0]))
        if func == _DATA:
            return args[0]
        if func in _READS:
            if self.reads and func is Tensor.item:
                return args[0].double()
            raise OptimizerError(
                f"step() of {self.name} reads the value of a tensor ({func.__name__}), which a graph cannot",
                hint=f"compute with tensors, for example with torch.where, or use {FUSED_NAMES}",
            )
        replaced = _NUMBERS.get(getattr(func, "__name__", "").removesuffix("_"))
        if replaced is not None:
            result = replaced(args, kwargs)
            if result is not None:
                return args[0].copy_(result) if func.__name__.endswith("_") else result
        if getattr(func, "__name__", "") in _COMPOSITE:
            return args[0].copy_(getattr(Tensor, func.__name__.removesuffix("_"))(*args, **kwargs))
        return func(*args, **kwargs)


def _number(kwargs: dict[str, Any], key: str, like: Tensor) -> Tensor | None:
    value = kwargs.get(key)
    return value.to(like.dtype) if isinstance(value, Tensor) else None


def _add(args: tuple[Any, ...], kwargs: dict[str, Any], sign: int = 1) -> Tensor | None:
    alpha = _number(kwargs, "alpha", args[0])
    return None if alpha is None else torch.addcmul(args[0], args[1].to(args[0].dtype), alpha * sign)


def _addcmul(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    value = _number(kwargs, "value", args[0])
    return None if value is None else torch.addcmul(args[0], args[1] * value, args[2])


def _addcdiv(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    value = _number(kwargs, "value", args[0])
    return None if value is None else args[0] + (args[1] * value) / args[2]


def _lerp(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    weight = args[2] if len(args) > 2 else kwargs.get("weight")
    return torch.lerp(args[0], args[1], weight.to(args[0].dtype)) if isinstance(weight, Tensor) else None


_NUMBERS: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None]] = {
    "add": _add, "sub": partial(_add, sign=-1), "addcmul": _addcmul, "addcdiv": _addcdiv, "lerp": _lerp,
}  # fmt: skip


def compiling() -> AbstractContextManager[None]:
    """Let torch's optimizers take the branches that they take under a compiler: no check of devices, no reading."""
    return exchanged(torch.compiler, "is_compiling", lambda: True)


@contextmanager
def selecting(function: Callable[..., Any]) -> Iterator[None]:
    """Let `min` and `max` of two numbers work on tensors too, in the module where a function was written.

    Args:
        function: a function of that module, decorated or not.
    """
    module = inspect.unwrap(function).__globals__
    names = {"min": torch.minimum, "max": torch.maximum}
    kept = {name: module[name] for name in names if name in module}  # the module may be the user's

    def choose(select: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
        def chosen(first: Any, second: Any) -> Tensor:
            like = first if isinstance(first, Tensor) else second
            pair = [x if isinstance(x, Tensor) else torch.full_like(like, x) for x in (first, second)]
            return select(*pair)

        return chosen

    module.update({name: choose(select) for name, select in names.items()})
    try:
        yield
    finally:
        for name in names:
            del module[name]
        module.update(kept)
