"""Corpus models whose values do not all fit FP16: overflow, outliers, tiny and huge constants."""

import numpy as np

from onnx_corpus.case import Built
from onnx_corpus.parts import Builder

WIDTH = 32


def _stem(b: Builder, x: str, blocks: int = 5) -> str:
    """A linear layer and residual blocks: the residual stream is low from there on, whatever `x` is."""
    x = b.linear(x, WIDTH, WIDTH)
    for _ in range(blocks):
        x = b.block(x, WIDTH)
    return x


def overflow_in_activations() -> Built:
    """One linear layer between residual blocks gives some hundred thousand, from weights that fit FP16."""
    b = Builder()
    x = b.linear(_stem(b, "x"), WIDTH, WIDTH, gain=5e4)
    x = _stem(b, b.node("Mul", [x, b.weight(2e-5)]))
    return b.model(["n", WIDTH], x, ["n", WIDTH]), b.batches(8, WIDTH)


def overflow_in_a_variance() -> Built:
    """A written-out layer norm between blocks: it reads some thousands, whose squares do not fit."""
    b = Builder()
    x = b.node("Mul", [_stem(b, "x"), b.weight(1500.0)])
    x = _stem(b, b.layer_norm(x, WIDTH), 7)
    return b.model(["n", WIDTH], x, ["n", WIDTH]), b.batches(8, WIDTH)


def outlier_channels() -> Built:
    """Two channels of the residual stream are ten thousand times the others, as in large decoders."""
    b = Builder()
    x = b.linear("x", WIDTH, WIDTH)
    ones, zeros = b.weight(np.ones(WIDTH)), b.weight(np.zeros(WIDTH))
    for index in range(6):
        x0 = b.node("LayerNormalization", [x, ones, zeros], axis=-1)
        hidden = b.node("Relu", [b.linear(x0, WIDTH, 2 * WIDTH, 1.4)])
        hidden = b.node("Relu", [b.linear(hidden, 2 * WIDTH, 2 * WIDTH, 1.4)])
        weight = b.random.standard_normal((2 * WIDTH, WIDTH)) / np.sqrt(2 * WIDTH)
        if index == 1:
            weight[:, [3, 17]] *= 5e3
        x = b.node("Add", [x, b.node("MatMul", [hidden, b.weight(weight)])])
    x = b.node("LayerNormalization", [x, ones, zeros], axis=-1)
    return b.model(["n", WIDTH], b.linear(x, WIDTH, WIDTH), ["n", WIDTH]), b.batches(8, WIDTH)


def outliers_past_fp16() -> Built:
    """Two channels of one hidden layer reach some hundred thousand; the next product reads them with small weights."""
    b = Builder()
    x = _stem(b, "x")
    up, down = b.normal(WIDTH, 4 * WIDTH, scale=0.2), b.normal(4 * WIDTH, WIDTH, scale=0.1)
    up[:, [5, 90]] *= 1e5
    down[[5, 90]] *= 1e-5
    hidden = b.node("Relu", [b.node("MatMul", [x, b.weight(up)])])
    x = b.node("Add", [x, b.node("MatMul", [hidden, b.weight(down)])])
    x = _stem(b, x)
    return b.model(["n", WIDTH], x, ["n", WIDTH]), b.batches(8, WIDTH)


def tiny_constants() -> Built:
    """Constants below FP16's subnormals that matter: an epsilon under a root, and a factor that another one undoes."""
    b = Builder()
    x = b.block("x", WIDTH)
    square = b.node("Mul", [x, b.node("Mul", [x, b.weight(1e-9)])])
    root = b.node("Sqrt", [b.node("Add", [square, b.weight(1e-12)])])
    x = b.node("Div", [b.node("Mul", [root, b.weight(1e9)]), b.weight(3e4)])
    for _ in range(4):
        x = b.block(x, WIDTH)
    return b.model(["n", WIDTH], x, ["n", WIDTH]), b.batches(8, WIDTH)
