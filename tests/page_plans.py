"""Plans of which tests and benchmarks make pages: transformers of any number of layers, made without torch."""

import random

from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan

# By module within a layer, the ops; `add` reads the stream beside what stands before it.
LAYER = (
    ("input_norm", "layer_norm"), ("attention.query", "linear"), ("attention", "transpose"), ("attention", "matmul"),
    ("attention", "softmax"), ("attention", "matmul"), ("attention.output", "linear"), ("", "add"),
    ("post_norm", "layer_norm"), ("mlp.up", "linear"), ("mlp.activation", "gelu"), ("mlp.down", "linear"), ("", "add"),
)  # fmt: skip
WIDE = ("layer_norm", "softmax", "add")
MIXED = """\
graph cpu
input x: fp32[64, 8]
param w: fp32[8, 8]
y = aten.linear(input=x, weight=w) -> fp32[64, 8]  module=fc
s = aten.softmax(self=y) -> fp32[64, 8]  module=attn.soft
z = aten.matmul(self=s, other=y) -> fp32[64, 8]  module=attn
return z
"""
RULES = {
    "linear": "default.yaml:64",
    "matmul": "default.yaml:64",
    "softmax": "default.yaml:80",
    "layer_norm": "mine.yaml:3",
}


def transformer(nodes: int, *, wide: tuple[str, ...] = WIDE, flat: bool = False, low: str = "bf16") -> PrecisionPlan:
    """A plan with so many nodes.

    Args:
        nodes: how many; the last layer may be cut.
        wide: ops that run in FP32.
        flat: all in one module.
        low: the 16-bit type.
    """
    result: list[PlannedNode] = []
    casts: list[PlannedCast] = []
    value, types = "x", {"x": "fp32"}
    stream = value
    while len(result) < nodes:
        part, op = LAYER[len(result) % len(LAYER)]
        layer = len(result) // len(LAYER)
        name = f"{op}_{len(result)}"
        dtype = "fp32" if op in wide else low
        inputs = [value, *([stream] if op == "add" else [f"w{len(result)}"] if op == "linear" else [])]
        for place, read in enumerate(inputs):
            if types.get(read, "fp32") != dtype:
                casts.append(
                    PlannedCast(read, types.get(read, "fp32"), dtype, 6 * 1024 * (1 + place), ((name, place),))
                )
        module = "" if flat else f"model.layers.{layer}" + (f".{part}" if part else "")
        result.append(
            PlannedNode(
                name, f"aten.{op}", "matmul" if op in ("linear", "matmul") else "elementwise", module,
                "fp32" if dtype == "fp32" else "low", RULES.get(op, "default.yaml:10"),
                "sums of many terms" if dtype == "fp32" else "tensor cores run it in 16 bits", "low",
                f"/home/me/model.py:{10 + len(result) % len(LAYER)}", ((name, dtype),), inputs=tuple(inputs),
            )
        )  # fmt: skip
        value, types[name] = name, dtype
        stream = name if op == "add" else stream
    return PrecisionPlan(low, "default", "cuda", tuple(result), tuple(casts), (("x", "fp32"),), (value,))


def random_plan(rng: random.Random, nodes: int) -> PrecisionPlan:
    """Of nodes in any modules that read up to three values, some made only later, the first maybe through a cast."""
    names = [f"n{index}" for index in range(nodes)]
    result, casts = [], []
    for index, name in enumerate(names):
        near = ["x", *names[: index + rng.choice([0, 0, 2])]][-rng.choice([2, 5, 60]) :]
        inputs = tuple(rng.choice(near) for _ in range(rng.randint(0, 3)))
        module = ".".join(rng.choice("abc") for _ in range(rng.randint(0, 4)))
        precision, outputs = rng.choice(["low", "fp32", "keep"]), ((name, "bf16"),)
        result.append(PlannedNode(name, "aten.relu", "", module, precision, "", "", outputs=outputs, inputs=inputs))
        if inputs and rng.random() < 0.4:
            casts.append(PlannedCast(inputs[0], "bf16", "fp32", index, ((name, 0),)))
    outputs = tuple(name for name in names if rng.random() < 0.1)
    return PrecisionPlan("bf16", "default", "cpu", tuple(result), tuple(casts), (("x", "bf16"),), outputs)
