"""Random graphs for tests of the planner."""

import random

from planning import DEFAULT, FP16, FP32

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, Pin, PrecisionGraph, Value, ValueKind
from amp_compiler.policy.rules import Precision

CHOICES = (
    "linear", "layer_norm", "gelu", "relu", "view", "cat", "maximum", "split", "add", "mul", "gt", "to", "argmax",
)  # fmt: skip
SLOTS = {"linear": ("input", "weight"), "layer_norm": ("input",), "gt": ("self", "other")}


def random_graph(seed: int, free: int) -> tuple[PrecisionGraph, dict[str, str]]:
    """A graph with about `free` nodes that follow, and the decisions for its additions."""
    rng = random.Random(seed)
    window = 2 + seed % 5  # a narrow one makes values with many readers
    graph = PrecisionGraph()
    pool = []
    for index in range(rng.randint(1, 3)):
        name, dtype = f"x{index}", rng.choice([FP32, FP32, FP16])
        graph.add_value(Value(name, dtype, (rng.randint(1, 9),), rng.randint(1, 9), ValueKind.INPUT))
        pool.append(name)
    decisions: dict[str, str] = {}
    count = 0
    while count < free and len(graph.nodes) < 3 * free:
        short = rng.choice(CHOICES)
        op, name = f"aten.{short}", f"n{len(graph.nodes)}"
        arity = 2 if short in ("linear", "cat", "maximum", "add", "mul", "gt") else 1
        slots = SLOTS.get(short, ("self", "other"))
        inputs = tuple(Operand(rng.choice(pool[-window:]), slot) for slot in slots[:arity])
        dtype = FP16 if short == "to" and rng.random() < 0.5 else DType.BOOL if short in ("gt", "argmax") else FP32
        numel = rng.randint(1, 9)
        if short in ("to", "view"):
            numel = graph.values[inputs[0].value].numel
        outputs = (f"{name}a", f"{name}b") if short == "split" else (f"{name}a",)
        region = rng.choice(["", "", "", "body"])
        pin = Pin("cast", "model") if short == "to" else None
        node = Node(name, op, inputs, outputs, region=region, pin=pin)
        graph.add_node(node, [Value(out, dtype, (numel,), numel) for out in outputs])
        if short == "add" and rng.random() < 0.7:
            decisions[name] = "follow"
        count += DEFAULT.get(op, Precision.FOLLOW) is Precision.FOLLOW or name in decisions
        pool += [out for out in outputs if dtype.is_float]
    graph.outputs = rng.sample(pool, min(len(pool), rng.randint(1, 2)))
    return graph, decisions
