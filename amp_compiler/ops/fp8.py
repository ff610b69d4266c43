"""Products whose operands are scaled and rounded to FP8: by tensor cores where a device has them, else emulated.

Scales are those of torchao's float8 training: `s = max / amax` of the format's largest number, in FP64 and rounded to
FP32. Emulated, a product multiplies the very numbers that the formats hold, in FP32.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import DoubleBackwardError
from amp_compiler.ir.arithmetic import Fp8

aten = torch.ops.aten
_E4M3, _E5M2 = FP8 = torch.float8_e4m3fn, torch.float8_e5m2
_TINY = 1e-12  # an amax below it counts as it
_NOTHING = 1e-300  # a scale of none is finite
_EXPONENT = 0x7F80_0000  # of an FP32 number's bits
_BLOCK = 32  # numbers that share a scale in an MX format
_LARGEST_POWER = {_E4M3: 8, _E5M2: 15}  # exponents of the formats' largest numbers
_ALIGNED = 16  # what `_scaled_mm` wants the length of its sums to be a multiple of
_OF_TENSORS = ("tensorwise", "delayed")  # scalings with one scale for an operand
_FIRST_WITH_FP8 = (8, 9)  # compute capability


def fp8_product(op: Any, args: tuple[Any, ...], forward: str, backward: str, amaxes: Tensor | None = None) -> Tensor:
    """A product with FP8 operands, forward and backward.

    Args:
        op: `aten.linear`, `aten.mm`, `aten.addmm`, `aten.matmul` by a matrix, or a convolution.
        args: its positional arguments; the two operands have 16 bits or are FP32.
        forward: how the operands are rounded, as `Fp8.short` writes it.
        backward: the same for the products that make gradients; empty for products of 16-bit operands.
        amaxes: of delayed scaling, see `no_amaxes`. Its gradient is what they are behind this step.

    Returns:
        What the operator returns, in the type of its first operand. A bias is added to the rounded product.

    Example:
        >>> x, w = torch.ones(2, 16), torch.full((16, 16), 0.5)
        >>> fp8_product(torch.ops.aten.linear.default, (x, w), Fp8().short, "")[0, 0].item()
        8.0
    """
    ways = Fp8.parse(forward), Fp8.parse(backward)
    if op in (aten.linear.default, aten.mm.default, aten.matmul.default):
        x, right, bias = (*args, None)[:3]
        right = right.t() if op is aten.linear.default else right
        product = _Product.apply(ways, x.reshape(-1, x.shape[-1]), right, amaxes)  # type: ignore[no-untyped-call]
        product = product.reshape(*x.shape[:-1], right.shape[-1])
        return product if bias is None else product + bias  # type: ignore[no-any-return]
    if op is aten.addmm.default:
        added, x, right, beta, alpha = (*args, 1, 1)[:5]
        product = _Product.apply(ways, x, right, amaxes)  # type: ignore[no-untyped-call]
        return product * alpha if beta == 0 else added * beta + product * alpha  # type: ignore[no-any-return]
    x, weight, bias, *rest = (*args, None)[: max(len(args), 3)]
    product = _Convolution.apply(ways, op, tuple(rest), x, weight, amaxes)  # type: ignore[no-untyped-call]
    return product if bias is None else product + bias.reshape(-1, *[1] * (weight.dim() - 2))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Scaled:
    """An operand as it is multiplied.

    Args:
        values: numbers of an FP8 format; with a scale for each block, what they stand for, FP32.
        scale: FP32, by which the operand was multiplied; broadcasts to `values`.
        amax: the operand's largest magnitude, FP32, where one scale serves all of it.
    """

    values: Tensor
    scale: Tensor
    amax: Tensor | None = None

    def numbers(self) -> Tensor:
        """What it stands for, FP32."""
        return self.values.float() / self.scale

    def t(self) -> Scaled:
        """The transposed matrix."""
        return Scaled(self.values.t(), self.scale.t() if self.scale.dim() else self.scale)


def scaled(x: Tensor, dtype: torch.dtype, way: Fp8, dim: int | None, delayed: Tensor | None = None) -> Scaled:
    """Scale and round an operand.

    Args:
        x: the operand.
        dtype: an FP8 format.
        way: says how many numbers share a scale.
        dim: the dimension that is summed over; `None` for one scale whatever `way` says.
        delayed: the scale of delayed scaling.
    """
    largest = torch.finfo(dtype).max
    if not x.numel():
        return Scaled(x.to(dtype), *x.new_tensor([1.0, 0.0], dtype=torch.float32).unbind())
    if way.scaling == "mx" and dim is not None:
        return _scaled_in_blocks(x, dtype, dim)
    amax = x.abs().amax() if dim is None or way.scaling != "rowwise" else x.abs().amax(dim, keepdim=True)
    if way.scaling == "delayed" and delayed is not None:
        scale = delayed + amax * 0  # NaN of an infinity, which is no large number
    else:
        scale = _power_of_2((largest / amax.double().clamp(min=_TINY)).float(), way)
    noted = amax.float() if amax.dim() == 0 else None
    return Scaled((x.float() * scale).clamp(-largest, largest).to(dtype), scale, noted)


def _power_of_2(scale: Tensor, way: Fp8) -> Tensor:
    return (scale.view(torch.int32) & _EXPONENT).view(torch.float32) if way.power_of_2 else scale


def no_amaxes(history: int) -> Tensor:
    """What delayed scaling knows of a product before the first step, FP32.

    A row for the left operand, the right one and the incoming gradient: the last scale, then the largest magnitudes of
    the steps before, the latest first.

    Args:
        history: number of steps.

    Example:
        >>> no_amaxes(2).tolist()
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    """
    return torch.tensor([[1.0] + [0.0] * history] * 3)


@dataclass
class Delayed:
    """The scales of a product, as Transformer Engine makes them: of the largest magnitude of a history.

    Where that is zero or not finite the last scale stays. Nothing is known without `amaxes`.
    """

    amaxes: Tensor | None
    ways: tuple[Fp8, Fp8 | None]

    def __post_init__(self) -> None:
        self.scales: list[Any] = [None] * 3  # of the left operand, the right one, the incoming gradient
        self.seen: list[Any] = [None] * 3  # their largest magnitudes in this step
        if self.amaxes is None:
            return
        delayed = [one for one in self.ways if one is not None and one.history]
        of_rows = (delayed[0], _E4M3), (delayed[0], _E4M3), (delayed[-1], _incoming(delayed[-1]))
        for number, (row, (way, dtype)) in enumerate(zip(self.amaxes.unbind(), of_rows, strict=True)):
            amax = row.narrow(0, 1, way.history).amax()
            scale = torch.finfo(dtype).max / amax.double().clamp(min=_NOTHING)
            scale = scale.clamp(max=torch.finfo(torch.float32).max).float()
            self.scales[number] = torch.where((amax > 0) & amax.isfinite(), _power_of_2(scale, way), row.select(0, 0))

    def scaled(self, number: int, x: Tensor, dtype: torch.dtype, way: Fp8, dim: int | None) -> Scaled:
        """An operand, or the incoming gradient, scaled and noted; see `scaled`."""
        result = scaled(x, dtype, way, dim, self.scales[number])
        if result.amax is not None:
            self.seen[number] = result.amax
        return result

    def following(self) -> Tensor | None:
        """What is known behind the step."""
        if self.amaxes is None:
            return None
        latest = torch.stack([self.amaxes.new_zeros(()) if one is None else one for one in self.seen])
        before = self.amaxes.narrow(1, 1, self.amaxes.shape[1] - 2)
        return torch.cat([torch.stack([torch.stack(self.scales), latest], 1), before], 1)


def _incoming(way: Fp8) -> torch.dtype:
    return _E5M2 if way.format == "hybrid" else _E4M3


def _scaled_in_blocks(x: Tensor, dtype: torch.dtype, dim: int) -> Scaled:
    """Blocks along `dim`, each with a power of two: that of its largest magnitude over that of the format."""
    largest = torch.finfo(dtype).max
    rows = _filled(x.movedim(dim, -1), _BLOCK)
    blocks = rows.reshape(*rows.shape[:-1], rows.shape[-1] // _BLOCK, _BLOCK)
    exponents = (blocks.abs().amax(-1, keepdim=True).float().view(torch.int32) & _EXPONENT).view(torch.float32)
    power = _LARGEST_POWER[dtype]
    scale = 2.0**power / exponents.clamp(min=2.0 ** (power - 127))  # what E8M0 holds
    rounded = (blocks.float() * scale).clamp(-largest, largest).to(dtype).float() / scale
    numbers = rounded.reshape(rows.shape).narrow(-1, 0, x.shape[dim]).movedim(-1, dim)
    return Scaled(numbers, x.new_ones((), dtype=torch.float32))


def multiply(left: Scaled, right: Scaled, dtype: torch.dtype, way: Fp8) -> Tensor:
    """The product of two matrices, in 16 bits.

    Args:
        left: (m, k).
        right: (k, n).
        dtype: type of the result.
        way: how both were scaled.
    """
    if way.scaling == "mx" or not _has_fp8(left.values):
        return (left.numbers() @ right.numbers()).to(dtype)
    rows, columns = (_filled(_in_rows(one), _ALIGNED) for one in (left.values, right.values.t()))
    scales = 1 / left.scale, 1 / right.scale
    if way.scaling == "rowwise":  # a scale for each row and column, also where one operand has a single one
        scales = scales[0].expand(rows.shape[0], 1).contiguous(), scales[1].expand(1, columns.shape[0]).contiguous()
    product: Tensor = aten._scaled_mm.default(rows, columns.t(), *scales, out_dtype=dtype)
    return product


def _filled(x: Tensor, multiple: int) -> Tensor:
    """With zeros, which add nothing to a sum, behind its rows; `F.pad` takes no size that is a symbol."""
    missing = -x.shape[-1] % multiple
    if isinstance(missing, int) and not missing:
        return x
    plain = x.view(torch.uint8) if x.dtype in _LARGEST_POWER else x
    return torch.cat([plain, plain.new_zeros(*x.shape[:-1], missing)], -1).view(x.dtype)


def _in_rows(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _has_fp8(x: Tensor) -> bool:
    """Whether a device multiplies FP8 numbers."""
    return x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= _FIRST_WITH_FP8


class _Product(torch.autograd.Function):
    """(m, k) by (k, n)."""

    @staticmethod
    def forward(ctx: Any, ways: tuple[Fp8, Fp8 | None], x: Tensor, right: Tensor, amaxes: Tensor | None) -> Tensor:
        way, back = ways
        ctx.delayed = Delayed(amaxes, ways)
        left_scaled, right_scaled = ctx.delayed.scaled(0, x, _E4M3, way, 1), ctx.delayed.scaled(1, right, _E4M3, way, 0)
        # One scale for a tensor serves whatever is summed over: the backward reads the same 8 bits.
        wanted = way.scaling, way.power_of_2, "fp8"
        same = back is not None and (back.scaling, back.power_of_2, back.weight_gradient) == wanted
        kept = same and way.scaling in _OF_TENSORS
        ctx.ways, ctx.types, ctx.kept = ways, (x.dtype, right.dtype), kept
        for_x, for_right = ctx.needs_input_grad[1:3]
        left_kept = (left_scaled.values, left_scaled.scale) if kept else (x,)
        right_kept = (right_scaled.values, right_scaled.scale) if kept else (right,)
        # The gradient of each operand is a product with the other one.
        saved = [*(one if for_right else None for one in left_kept), *(one if for_x else None for one in right_kept)]
        ctx.save_for_backward(*saved)
        return multiply(left_scaled, right_scaled, x.dtype, way)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        way: Fp8 | None = ctx.ways[1]
        for_x, for_right = ctx.needs_input_grad[1:3]
        if way is None:
            x, right = ctx.saved_tensors
            slopes = gradient @ right.t() if for_x else None, x.t() @ gradient if for_right else None
            return None, *slopes, ctx.delayed.following()
        _refuse_second()
        scale, one_scale = ctx.delayed.scaled, way.scaling in _OF_TENSORS
        incoming = functools.cache(lambda dim: scale(2, gradient, _incoming(way), way, dim))
        x_slope = right_slope = None
        if ctx.kept:
            saved = ctx.saved_tensors
            x_scaled, right_scaled = Scaled(*saved[:2]), Scaled(*saved[2:])
        else:
            x, right = ctx.saved_tensors
        if for_x:
            # torchao keeps one scale for a weight whose own gradient is made in 16 bits.
            dim = None if way.weight_gradient == "low" and way.scaling == "rowwise" else 1
            by = right_scaled if ctx.kept else scale(1, right, _E4M3, way, dim)
            x_slope = multiply(incoming(1), by.t(), ctx.types[0], way)
        if for_right and way.weight_gradient == "low":
            right_slope = (gradient.t() @ x).t()
        elif for_right:
            of = x_scaled if ctx.kept else scale(0, x, _E4M3, way, 0)
            right_slope = multiply(incoming(1 if one_scale else 0).t(), of, ctx.types[1], way).t()
        return None, x_slope, right_slope, ctx.delayed.following()


class _Convolution(torch.autograd.Function):
    """A convolution with one scale for each operand; no device has an FP8 kernel that torch calls."""

    @staticmethod
    def forward(ctx: Any, ways: tuple[Fp8, Fp8 | None], op: Any, rest: tuple[Any, ...], *tensors: Any) -> Tensor:
        way, (x, weight, amaxes) = ways[0], tensors
        ctx.delayed = Delayed(amaxes, ways)
        operands = ctx.delayed.scaled(0, x, _E4M3, way, None), ctx.delayed.scaled(1, weight, _E4M3, way, None)
        ctx.ways, ctx.op, ctx.rest, ctx.types = ways, op, rest, (x.dtype, weight.dtype)
        ctx.save_for_backward(x, weight)
        return op(*(one.numbers() for one in operands), None, *rest).to(x.dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        _refuse_second()
        x, weight = ctx.saved_tensors
        way: Fp8 | None = ctx.ways[1]
        wanted, scale = ctx.needs_input_grad[3:5], ctx.delayed.scaled
        if way is None:
            slopes = _convolution_slopes(ctx, gradient, x, weight, wanted)
            return None, None, None, *slopes, ctx.delayed.following()
        rounded = scale(2, gradient, _incoming(way), way, None).numbers()
        numbers = scale(0, x, _E4M3, way, None).numbers(), scale(1, weight, _E4M3, way, None).numbers()
        x_slope, weight_slope = _convolution_slopes(ctx, rounded, *numbers, wanted)
        if wanted[1] and way.weight_gradient == "low":
            weight_slope = _convolution_slopes(ctx, gradient, x, weight, (False, True))[1]
        return None, None, None, x_slope, weight_slope, ctx.delayed.following()


def _refuse_second() -> None:
    if torch.is_grad_enabled():
        raise DoubleBackwardError(
            "a gradient of FP8 products is differentiated, which they have no backward for",
            hint="add a rule that runs these nodes in 16 bits: precision: low, and no math",
        )


def _convolution_slopes(
    ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
) -> list[Tensor | None]:
    """What autograd makes of a convolution of these operands, in the types of those that were given."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_(wants) for one, wants in zip((x, weight), wanted, strict=True)]
        result = ctx.op(*leaves, None, *ctx.rest)
        slopes = iter(torch.autograd.grad(result, [one for one in leaves if one.requires_grad], gradient))
    return [next(slopes).to(dtype) if wants else None for wants, dtype in zip(wanted, ctx.types, strict=True)]
