"""Matrix products and attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op


@op("MatMul")
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b)


@op("Gemm")
def _gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0, broadcast: int = 1,
) -> Tensor:  # fmt: skip
    a = a.t() if transA else a
    if alpha == 1.0 and (c is None or (beta == 1.0 and c.dim() == 1 and c.shape[0] == b.shape[0 if transB else 1])):
        return F.linear(a, b if transB else b.t(), c)
    product = torch.mm(a, b.t() if transB else b)
    product = product if alpha == 1.0 else alpha * product
    return product if c is None else product + (c if beta == 1.0 else beta * c)


@op("Einsum")
def _einsum(*values: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *values)


# ---- attention in its common form; the rarer options run ONNX's own function body


def _is_common(attributes: dict[str, Any], inputs: list[bool], outputs: list[bool]) -> bool:
    """No cache of fixed length, no cap, no window, no look at the product of queries and keys."""
    plain = not attributes.get("softcap") and attributes.get("softmax_precision", 1) == 1
    window = attributes.get("left_window_size", -1) >= 0 or attributes.get("right_window_size", -1) >= 0
    masked = len(inputs) > 3 and inputs[3]
    causal = bool(attributes.get("is_causal"))
    past = len(inputs) > 4 and inputs[4]
    fixed = len(inputs) > 6 and inputs[6]
    return plain and not window and not fixed and not (causal and (masked or past)) and not any(outputs[3:])


@op("Attention", many=True, when=_is_common)
def _attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, past_key: Tensor | None = None,
    past_value: Tensor | None = None, *, is_causal: int = 0, kv_num_heads: int = 0, q_num_heads: int = 0,
    qk_matmul_output_mode: int = 0, scale: float | None = None, softcap: float = 0.0, softmax_precision: int = 1,
    left_window_size: int = -1, right_window_size: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    flat = query.dim() == 3
    if flat:
        query, key, value = _heads(query, q_num_heads), _heads(key, kv_num_heads), _heads(value, kv_num_heads)
    if past_key is not None and past_value is not None:
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
    present = key, value
    if query.shape[1] != key.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if mask is not None and mask.shape[-1] < key.shape[2]:  # keys that the mask does not reach are left out
        missing = key.shape[2] - mask.shape[-1]
        outside = mask.new_full((*mask.shape[:-1], missing), False if mask.dtype == torch.bool else -torch.inf)
        mask = torch.cat([mask, outside], -1)
    result = F.scaled_dot_product_attention(query, key, value, mask, 0.0, bool(is_causal), scale=scale)
    if flat:
        result = result.transpose(1, 2).flatten(2)
    return (result, *present)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(2, (count, x.shape[2] // count)).transpose(1, 2)  # type: ignore[no-any-return]
