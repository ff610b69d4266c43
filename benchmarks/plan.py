"""Time of planning and rewriting against the number of nodes: chains of transformer-like blocks, and models.

The chains are planned only: they are graphs without tensors, of any size. The models are captured by torch, which is
not measured, then planned and rewritten.

    python benchmarks/plan.py --sizes 1000,3000,10000,30000 --json benchmarks/results/plan.json
    python benchmarks/plan.py --sizes 1000 --models gpt2 resnet50 --dtype fp16

Prediction, written before the first run: classifying and placing are linear; the cut is linear too under `default`,
whose free components stay within a block, and grows a little faster under `fast`, where the residual additions join
all blocks into one component. 10,000 nodes take less than 2 s on one core with either.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import cases
from machine import machine_facts
from plan_models import LOW, best_of, measure_model
from rich.console import Console
from rich.table import Table

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.graph import Node, Operand, PrecisionGraph, Value, ValueKind
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import RuleSet

RESULT = Path(__file__).parent / "results" / "plan.json"
PREDICTION = "10,000 nodes in less than 2 s on one core; time per node at 30,000 at most twice that at 1,000"
CHAIN = "chain"
_TOKENS, _WIDTH, _HEADS = 128, 256, 4


class ChainBuilder:
    """Writes pre-norm transformer blocks, one after the other, sixteen nodes and an attention mask's read each."""

    def __init__(self) -> None:
        self.graph = PrecisionGraph()
        self.stream = self._source("x", ValueKind.INPUT, _TOKENS, _WIDTH)
        self.mask = self._source("mask", ValueKind.INPUT, _TOKENS, _TOKENS)

    def block(self, name: str) -> None:
        """Attention and a feed-forward net, each with its residual addition."""
        heads = (_HEADS, _TOKENS, _WIDTH // _HEADS)
        normed = self._norm(f"{name}.norm1", self.stream)
        parts = []
        for part in "qkv":
            linear = self._linear(f"{name}.{part}", normed, _WIDTH, _WIDTH)
            viewed = self._node(f"{name}.{part}_view", "aten.view", [("self", linear)], (_TOKENS, heads[0], heads[2]))
            parts.append(self._node(f"{name}.{part}_t", "aten.transpose", [("self", viewed)], heads))
        slots = [*zip(("query", "key", "value"), parts, strict=True), ("attn_mask", self.mask)]
        attended = self._node(f"{name}.sdpa", "aten.scaled_dot_product_attention", slots, heads)
        merged = self._node(f"{name}.merge", "aten.reshape", [("self", attended)], (_TOKENS, _WIDTH))
        self._add(f"{name}.add1", self._linear(f"{name}.out", merged, _WIDTH, _WIDTH))
        inner = self._linear(f"{name}.up", self._norm(f"{name}.norm2", self.stream), _WIDTH, 4 * _WIDTH)
        active = self._node(f"{name}.gelu", "aten.gelu", [("self", inner)], (_TOKENS, 4 * _WIDTH))
        self._add(f"{name}.add2", self._linear(f"{name}.down", active, 4 * _WIDTH, _WIDTH))

    def _add(self, name: str, branch: str) -> None:
        self.stream = self._node(name, "aten.add", [("self", self.stream), ("other", branch)], (_TOKENS, _WIDTH))

    def _norm(self, name: str, value: str) -> str:
        weight = self._source(f"{name}.weight", ValueKind.PARAMETER, _WIDTH)
        return self._node(name, "aten.layer_norm", [("input", value), ("weight", weight)], (_TOKENS, _WIDTH))

    def _linear(self, name: str, value: str, width_in: int, width_out: int) -> str:
        weight = self._source(f"{name}.weight", ValueKind.PARAMETER, width_out, width_in)
        bias = self._source(f"{name}.bias", ValueKind.PARAMETER, width_out)
        inputs = [("input", value), ("weight", weight), ("bias", bias)]
        return self._node(name, "aten.linear", inputs, (_TOKENS, width_out))

    def _source(self, name: str, kind: ValueKind, *shape: int) -> str:
        self.graph.add_value(_value(name, shape, kind))
        return name

    def _node(self, name: str, op: str, inputs: list[tuple[str, str]], shape: tuple[int, ...]) -> str:
        operands = tuple(Operand(value, slot) for slot, value in inputs)
        node = Node(name, op, operands, (name,), module=name.rpartition(".")[0])
        self.graph.add_node(node, [_value(name, shape, ValueKind.RESULT)])
        return name


def _value(name: str, shape: tuple[int, ...], kind: ValueKind) -> Value:
    numel = 1
    for size in shape:
        numel *= size
    return Value(name, DType.FLOAT32, shape, numel, kind)


def chain_of_blocks(nodes: int) -> PrecisionGraph:
    """A chain of blocks with about `nodes` nodes (a whole number of blocks)."""
    builder = ChainBuilder()
    index = 0
    while len(builder.graph.nodes) < nodes:
        builder.block(f"blocks.{index}")
        index += 1
    builder.graph.outputs = [builder.stream]
    return builder.graph


def measure(rules: RuleSet, nodes: int, dtype: str, repeats: int) -> dict[str, Any]:
    """Best of `repeats` planning times of one chain, in processor seconds."""
    graph = chain_of_blocks(nodes)
    best, plan = best_of(repeats, lambda: graph, lambda one: make_plan(one, rules, LOW[dtype]))
    count = len(graph.nodes)
    return {
        "rules": rules.name, "graph": CHAIN, "nodes": count, "seconds": best, "us_per_node": best / count * 1e6,
        "casts": plan.cast_count, "cast_bytes": plan.cast_bytes,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,3000,10000,30000", help="nodes of the chains, with commas")
    parser.add_argument("--models", nargs="*", choices=cases.NAMES, default=list(cases.NAMES), metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the models are")
    parser.add_argument("--dtype", choices=LOW, default="bf16")
    parser.add_argument("--rules", default="default,fast", help="rule sets, with commas")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the best counts")
    parser.add_argument("--json", type=Path, default=RESULT, help="where to write the numbers")
    options = parser.parse_args()
    rows = []
    for name in options.rules.split(","):
        rules = load_rules(name)
        chains = [measure(rules, int(size), options.dtype, options.repeats) for size in options.sizes.split(",")]
        for row in chains:
            row["ratio_to_linear"] = row["us_per_node"] / chains[0]["us_per_node"]
        rows += chains
        rows += [
            measure_model(model, rules, options.dtype, options.device, options.repeats) for model in options.models
        ]
    Console().print(_table(rows))
    result = {
        "what": "planning of transformer-like chains of blocks; planning and rewriting of models",
        **machine_facts(options.device),
        "dtype": options.dtype,
        "prediction": PREDICTION,
        "outcome": _outcome(rows),
        "rows": rows,
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="planning and rewriting (processor seconds, one core)")
    for column in ("rules", "graph", "nodes", "planning s", "rewriting s", "µs per node", "ratio to linear", "casts"):
        table.add_column(column, justify="left" if column in ("rules", "graph") else "right")
    for row in rows:
        table.add_row(
            row["rules"],
            row["graph"],
            f"{row['nodes']:,}",
            f"{row['seconds']:.3f}",
            f"{row['rewrite_seconds']:.3f}" if "rewrite_seconds" in row else "",
            f"{row['us_per_node']:.1f}",
            f"{row['ratio_to_linear']:.2f}" if "ratio_to_linear" in row else "",
            f"{row['casts']:,}",
        )
    return table


def _outcome(rows: list[dict[str, Any]]) -> str:
    chains = [row for row in rows if row["graph"] == CHAIN]
    ten = [row["seconds"] for row in chains if 9_000 < row["nodes"] < 11_000]
    worst = max(row["ratio_to_linear"] for row in chains)
    held = (not ten or max(ten) < 2) and worst <= 2
    slowest = f"10,000 nodes took at most {max(ten):.2f} s; " if ten else ""
    return (
        f"{slowest}time per node grew by a factor of at most {worst:.2f}: the prediction {'held' if held else 'failed'}"
    )


if __name__ == "__main__":
    main()
