"""Matrix products and attention's parts."""

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


def _keeps_batches(attributes: dict[str, Any], inputs: list[bool], outputs: list[bool]) -> bool:
    return not attributes.get("transBatchA") and not attributes.get("transBatchB")


@op("FusedMatMul", "TransposeMatMul", domain="com.microsoft", when=_keeps_batches)
def _fused_matmul(
    a: Tensor, b: Tensor, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, transBatchA: int = 0,
    transBatchB: int = 0,
) -> Tensor:  # fmt: skip
    a = a.transpose(-1, -2) if transA and a.dim() > 1 else a
    b = b.transpose(-1, -2) if transB and b.dim() > 1 else b
    product = torch.matmul(a, b)
    return product if alpha == 1.0 else alpha * product


_ACTIVATIONS: dict[str, Any] = {
    "": lambda x, alpha: x,
    "Relu": lambda x, alpha: torch.relu(x),
    "Sigmoid": lambda x, alpha: torch.sigmoid(x),
    "Tanh": lambda x, alpha: torch.tanh(x),
    "LeakyRelu": F.leaky_relu,
}


def _has_known_activation(attributes: dict[str, Any], inputs: list[bool], outputs: list[bool]) -> bool:
    return attributes.get("activation", "") in _ACTIVATIONS


@op("FusedGemm", domain="com.microsoft", when=_has_known_activation)
def _fused_gemm(
    a: Tensor, b: Tensor, c: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
    transB: int = 0, activation: str = "", activation_alpha: float = 0.0,
) -> Tensor:  # fmt: skip
    result = _gemm(a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return _ACTIVATIONS[activation](result, activation_alpha)  # type: ignore[no-any-return]
