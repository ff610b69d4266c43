"""Conversion time of ONNX models, beside ONNX's own load, checker and save, and beside three other converters.

    python -m benchmarks.onnx_convert --json benchmarks/results/onnx_convert.json --peers /path/to/their/python

Prediction, written before the first run: a model of 140 MB takes at most 2 s more than ONNX's own load, checker and
save; time per node of the 32,000-node chain is at most twice that of the 2,000-node chain.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from amp_compiler.ir.files import write_atomically
from amp_compiler.onnx.convert import convert_onnx
from benchmarks.machine import machine_facts
from benchmarks.onnx_convert_peers import PROGRAMS, run_peer

RESULT = Path(__file__).parent / "results" / "onnx_convert.json"
PREDICTION = "140 MB: at most 2 s beside load, check and save; 32,000 nodes: at most twice the time per node of 2,000"
WIDTH = 64
PEER_LIMIT = 120.0  # seconds that a peer may take


def chain(nodes: int) -> onnx.ModelProto:
    """Products, additions and activations, one after the other, over weights that the chain shares."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32), "w"),
        numpy_helper.from_array(random.standard_normal(WIDTH).astype(np.float32), "b"),
    ]
    steps = (("MatMul", ("w",)), ("Add", ("b",)), ("Tanh", ()), ("Softmax", ()))
    made, previous = [], "x"
    for index in range(nodes):
        op, others = steps[index % len(steps)]
        name = "y" if index == nodes - 1 else f"v{index}"
        made.append(helper.make_node(op, [previous, *others], [name], name=f"node_{index}"))
        previous = name
    return _model(made, WIDTH, weights)


def large(megabytes: int) -> onnx.ModelProto:
    """Linear layers of 1024 by 1024 with normalisation and activation: a file of about `megabytes`."""
    random = np.random.default_rng(0)
    weights, made, previous = [], [], "x"
    weights.append(numpy_helper.from_array(np.ones(1024, np.float32), "gain"))
    layers = round(megabytes * 1e6 / (4 * 1024 * 1024))
    for index in range(layers):
        array = (random.standard_normal((1024, 1024)) / 32).astype(np.float32)
        weights.append(numpy_helper.from_array(array, f"w{index}"))
        last = "y" if index == layers - 1 else f"r{index}"
        made += [
            helper.make_node("MatMul", [previous, f"w{index}"], [f"m{index}"], name=f"matmul_{index}"),
            helper.make_node("LayerNormalization", [f"m{index}", "gain"], [f"n{index}"], name=f"norm_{index}"),
            helper.make_node("Relu", [f"n{index}"], [last], name=f"relu_{index}"),
        ]
        previous = last
    return _model(made, 1024, weights)


def _model(nodes: list[onnx.NodeProto], width: int, weights: list[TensorProto]) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "benchmark", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def best(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of some calls."""
    times = []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(name: str, model: onnx.ModelProto, folder: Path, repeats: int, peers: Path | None) -> dict[str, Any]:
    """Time one model, from file to file."""
    source, target, copy = folder / "in.onnx", folder / "out.onnx", folder / "copy.onnx"
    onnx.save(model, source)
    own = best(lambda: _own(source, copy), repeats)
    ours = best(lambda: convert_onnx(source, target, dtype="fp16"), repeats)
    row: dict[str, Any] = {
        "model": name, "nodes": len(model.graph.node), "bytes": source.stat().st_size,
        "load_check_save": own, "convert": ours, "beside": ours - own,
        "us_per_node": ours / len(model.graph.node) * 1e6,
        "size_ratio": target.stat().st_size / source.stat().st_size,
    }  # fmt: skip
    if peers is not None:
        row["peers"] = {peer: run_peer(peers, peer, source, folder / "peer.onnx", PEER_LIMIT) for peer in PROGRAMS}
    return row


def _own(source: Path, copy: Path) -> None:
    model = onnx.load(source)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, copy)


def show(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table, peers in columns of their own."""
    table = Table(title="conversion to fp16, file to file (seconds; best of the runs)")
    table.add_column("model")
    own = ("nodes", "MB", "load+check+save", "convert", "beside", "µs per node", "size ratio")
    for column in (*own, *(PROGRAMS if any("peers" in row for row in rows) else ())):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            f"{row['nodes']:,}", f"{row['bytes'] / 1e6:.1f}", f"{row['load_check_save']:.2f}",
            f"{row['convert']:.2f}", f"{row['beside']:+.2f}", f"{row['us_per_node']:.0f}", f"{row['size_ratio']:.2f}",
        ]  # fmt: skip
        for facts in row.get("peers", {}).values():
            shown = facts.get("error", "")[:40]
            if "seconds" in facts:
                shown = f"{facts['seconds']:.2f} ({facts['seconds'] / row['convert']:.1f}×)"
            cells.append(shown)
        table.add_row(row["model"], *cells)
    return table


def outcome(rows: list[dict[str, Any]]) -> str:
    """What came of the prediction."""
    beside = max(row["beside"] for row in rows if row["bytes"] > 1e8)
    chains = [row["us_per_node"] for row in rows if row["model"].startswith("chain")]
    held = beside <= 2 and chains[-1] <= 2 * chains[0]
    return (
        f"{beside:.2f} s beside load, check and save; time per node grew by a factor of {chains[-1] / chains[0]:.2f}: "
        f"the prediction {'held' if held else 'failed'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2000,8000,32000", help="nodes of the chains, with commas")
    parser.add_argument("--megabytes", type=int, default=140, help="size of the model with large weights")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the best counts")
    parser.add_argument("--peers", type=Path, help="a Python interpreter that has the other converters")
    parser.add_argument("--json", type=Path, default=RESULT, help="where to write the numbers")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {f"chain of {int(size):,}": lambda size=size: chain(int(size)) for size in options.sizes.split(",")}
        models[f"linear layers, {options.megabytes} MB"] = lambda: large(options.megabytes)
        for name, build in models.items():
            rows.append(measure(name, build(), Path(folder), options.repeats, options.peers))
    Console(width=200).print(show(rows))
    result = {
        "what": "conversion of ONNX models to fp16, file to file", **machine_facts(),
        "onnx": onnx.__version__, "prediction": PREDICTION, "outcome": outcome(rows), "rows": rows,
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
