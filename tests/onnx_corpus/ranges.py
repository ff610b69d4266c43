"""Corpus models whose values do not all fit FP16: overflow, outliers, tiny and huge constants."""

from __future__ import annotations

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
    x = _stem(b, b.layer_norm(x, WIDTH, 17), 7)
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


def huge_constants() -> Built:
    """Bounds that do not fit FP16 and never bite, and a sentinel that must compare as it did."""
    b = Builder()
    x = b.block("x", WIDTH)
    x = b.node("Clip", [x, b.weight(-1e6), b.weight(1e6)])
    x = b.node("Min", [x, b.weight(np.float32(3e38))])
    found = b.node("Less", [x, b.weight(1e9)])
    x = b.node("Where", [found, x, b.weight(-7e4)])
    for _ in range(3):
        x = b.block(x, WIDTH)
    return b.model(["n", WIDTH], x, ["n", WIDTH]), b.batches(8, WIDTH)


def attention_mask() -> Built:
    """Attention with a causal mask of FP32's lowest number, added before the softmax."""
    b = Builder()
    tokens, heads, size = 8, 2, WIDTH // 2
    lowest = np.finfo(np.float32).min
    mask = np.triu(np.full((tokens, tokens), lowest, np.float32), 1)
    x = b.block("x", WIDTH)
    parts = []
    for permutation in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):
        shape = b.weight(np.array([0, tokens, heads, size], np.int64))
        split = b.node("Reshape", [b.linear(x, WIDTH, WIDTH), shape])
        parts.append(b.node("Transpose", [split], perm=permutation))
    scores = b.node("Mul", [b.node("MatMul", parts[:2]), b.weight(1 / np.sqrt(size))])
    weights = b.node("Softmax", [b.node("Add", [scores, b.weight(mask)])], axis=-1)
    merged = b.node("Transpose", [b.node("MatMul", [weights, parts[2]])], perm=[0, 2, 1, 3])
    joined = b.node("Reshape", [merged, b.weight(np.array([0, tokens, WIDTH], np.int64))])
    x = b.block(b.node("Add", [x, b.linear(joined, WIDTH, WIDTH)]), WIDTH)
    return b.model(["n", tokens, WIDTH], x, ["n", tokens, WIDTH]), b.batches(2, tokens, WIDTH)


def unstable_softmax() -> Built:
    """A softmax written out without its maximum taken off: the exponentials overflow FP16 and their ratio does not."""
    b = Builder()
    powers = b.node("Exp", [b.node("Mul", [_stem(b, "x"), b.weight(6.0)])])
    total = b.node("ReduceSum", [powers, b.weight(np.array([-1], np.int64))], keepdims=1)
    x = _stem(b, b.node("Div", [powers, total]))
    return b.model(["n", WIDTH], x, ["n", WIDTH]), b.batches(8, WIDTH)
