"""The ways in which training scripts write to weights between two calls, most of them past version counters."""

import gc
from collections.abc import Callable

import torch
from torch import nn
from toys import classes, sgd_step, small


def _data(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.data for parameter in model.parameters()]


def _others(model: nn.Module) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]


def _each(write: Callable[[torch.Tensor, torch.Tensor], object]) -> Callable[[nn.Module], None]:
    """A write to the `.data` of every parameter, with another tensor of its shape beside it."""

    def write_all(model: nn.Module) -> None:
        for data, other in zip(_data(model), _others(model), strict=True):
            write(data, other)

    return write_all


def _index(model: nn.Module) -> None:
    model[0].weight.data[0] = 3.0
    model[2].bias.data[1] = 5.0


def _new_data(model: nn.Module) -> None:
    model.kept = _others(model)  # by the caller, who writes to it later
    for parameter, other in zip(model.parameters(), model.kept, strict=True):
        parameter.data = other


def _kept_data(model: nn.Module) -> None:
    for one in model.kept:
        one.mul_(-3.0)


def _numpy(model: nn.Module) -> None:
    for parameter, other in zip(model.parameters(), _others(model), strict=True):
        kept = parameter.detach()
        (kept.view(torch.int16) if kept.dtype is not torch.float32 else kept).numpy()[...] = (
            other.view(torch.int16) if kept.dtype is not torch.float32 else other
        ).numpy()


def _set(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), _others(model), strict=True):
            parameter.set_(other)


def _under_no_grad(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2.0).add_(0.25)


def _in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.mul_(-2.0)


def _exchanged(model: nn.Module) -> None:
    """As where an average is swapped in: the memory of parameters changes hands."""
    for parameter, other in zip(model.parameters(), _others(model), strict=True):
        average = nn.Parameter(other)
        parameter.data, average.data = average.data, parameter.data


def _swapped(model: nn.Module) -> None:
    gc.collect()  # which Dynamo does behind each capture if nobody turns it off
    for parameter, other in zip(model.parameters(), _others(model), strict=True):
        torch.utils.swap_tensors(parameter, nn.Parameter(other))


def _another_step(model: nn.Module) -> None:
    x, y = torch.randn(16, 8, generator=torch.Generator().manual_seed(5)), torch.arange(16) % 4
    low = "bf16" if next(model.parameters()).dtype is torch.bfloat16 else "fp16"
    sgd_step(model, classes, 30.0, dtype=low, loss_scale=None)(x, y)


WRITES: dict[str, Callable[[nn.Module], None]] = {
    "clamp_": _each(lambda data, other: data.clamp_(-0.01, 0.01)),
    "copy_": _each(lambda data, other: data.copy_(other)),
    "mul_": _each(lambda data, other: data.mul_(-3.0)),
    "lerp_": _each(lambda data, other: data.lerp_(other, 0.75)),
    "index": _index,
    "inference_mode": _in_inference_mode,
    "exchanged": _exchanged,
    "new data": _new_data,
    "kept data": _kept_data,
    "foreach lerp": lambda model: torch._foreach_lerp_(_data(model), _others(model), 0.75),
    "numpy": _numpy,
    "storage": _each(lambda data, other: data.untyped_storage().copy_(other.untyped_storage())),
    "dlpack": _each(lambda data, other: torch.from_dlpack(data).copy_(other)),
    "set_": _set,
    "no_grad": _under_no_grad,
    "load_state_dict": lambda model: model.load_state_dict(
        {name: value * -2 for name, value in model.state_dict().items()}
    ),
    "vector_to_parameters": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).detach() * -2, model.parameters()
    ),
    "another step": _another_step,
    "swap_tensors": _swapped,
}


def reset(model: nn.Module) -> None:
    """Give a model its first weights, as autograd knows of it."""
    model.load_state_dict({name: value * 2 for name, value in small().state_dict().items()})
