"""Conversion time of ONNX models, beside ONNX's own load, checker and save, and beside three other converters.

    python -m benchmarks.onnx_convert --json benchmarks/results/onnx_convert.json --peers /path/to/their/python

Goal: without checks a chain of 2,000 to 100,000 nodes takes at most 60 µs a node, with checks at most three times as
long, and a file of 100 MB and more at most the time of ONNX Runtime's converter.

Times are CPU seconds, ours and the peers' in turns. `convert` is what users get: with ONNX's checker on the model, its
inference on the result, and one load in ONNX Runtime of what is not too long (`loads.is_long`), none of which the peers
do; `unchecked` is without. Casts of the result, what they move in a run, the share of nodes that make 16-bit values and
the error by true rounding are those of `benchmarks.onnx_casts`, whose exports of transformers are converted too. A
second table has the casts of each export beside AutoCast's: by default, and with `--fuse --opset 23`.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from amp_compiler.ir.files import write_atomically
from amp_compiler.onnx.check.loads import is_installed, is_long
from amp_compiler.onnx.convert import convert_onnx
from benchmarks.machine import machine_facts
from benchmarks.onnx_casts import MODELS, export, facts
from benchmarks.onnx_convert_peers import PROGRAMS, run_peer

RESULT = Path(__file__).parent / "results" / "onnx_convert.json"
GOAL = "chains: at most 60 µs a node unchecked, at most 3 times as long checked; 100 MB: at most ONNX Runtime's time"
MOST_US, MOST_CHECKED = 60, 3
RUNTIME = "onnxruntime float16"  # the peer that a large file is held against
WIDTH = 64
PEER_LIMIT = 120.0  # seconds that a peer may take
TOO_SLOW = "stopped on a shorter one"
CAREFUL = "ModelOpt AutoCast"  # the peer that has casts of its own for what FP16 does not hold
FUSING_OPSET = 23  # the first that has `RMSNormalization`
ONE_TURN = 10.0  # CPU seconds from which on a peer has one turn only


@dataclass(frozen=True)
class Case:
    """A model to convert.

    Args:
        name: in the table.
        source: its FP32 file.
        feeds: inputs for the error by true rounding; `None` for a chain, where a run of so many nodes takes too long.
    """

    name: str
    source: Path
    feeds: dict[str, np.ndarray] | None


def chain(nodes: int) -> onnx.ModelProto:
    """Products, additions and activations, one after the other, over weights that the chain shares."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array((random.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32), "w"),
        numpy_helper.from_array(random.standard_normal(WIDTH).astype(np.float32), "b"),
    ]
    steps = (("MatMul", ("w",)), ("Add", ("b",)), ("Tanh", ()), ("Softmax", ()))
    protos, previous = [], "x"
    for index in range(nodes):
        op, others = steps[index % len(steps)]
        name = "y" if index == nodes - 1 else f"v{index}"
        protos.append(helper.make_node(op, [previous, *others], [name], name=f"node_{index}"))
        previous = name
    return _model(protos, WIDTH, weights)


def large(megabytes: int) -> onnx.ModelProto:
    """Linear layers of 1024 by 1024 with normalisation and activation: a file of about `megabytes`."""
    random = np.random.default_rng(0)
    weights, nodes, previous = [], [], "x"
    weights.append(numpy_helper.from_array(np.ones(1024, np.float32), "gain"))
    layers = round(megabytes * 1e6 / (4 * 1024 * 1024))
    for index in range(layers):
        array = (random.standard_normal((1024, 1024)) / 32).astype(np.float32)
        weights.append(numpy_helper.from_array(array, f"w{index}"))
        last = "y" if index == layers - 1 else f"r{index}"
        nodes += [
            helper.make_node("MatMul", [previous, f"w{index}"], [f"m{index}"], name=f"matmul_{index}"),
            helper.make_node("LayerNormalization", [f"m{index}", "gain"], [f"n{index}"], name=f"norm_{index}"),
            helper.make_node("Relu", [f"n{index}"], [last], name=f"relu_{index}"),
        ]
        previous = last
    return _model(nodes, 1024, weights)


def _model(nodes: list[onnx.NodeProto], width: int, weights: list[TensorProto]) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "benchmark", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def cpu_seconds(call: Callable[[], object]) -> float:
    """CPU seconds of a call: what others do on the machine does not count."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(case: Case, folder: Path, repeats: int, peers: Path | None, slow: set[str]) -> dict[str, Any]:
    """Time one model from file to file, ours and the peers' in turns, and look at what came out.

    Args:
        case: the model.
        folder: where files go.
        repeats: turns, of which the best counts; a peer that takes longer than `ONE_TURN` has one.
        peers: interpreter that has the peers.
        slow: peers that ran out of time on a chain, to which longer ones are not given; may be added to.
    """
    target, copy, converted = folder / "out.onnx", folder / "copy.onnx", folder / "peer.onnx"
    source, nodes = case.source, len(onnx.load(case.source, load_external_data=False).graph.node)
    row: dict[str, Any] = {"model": case.name, "nodes": nodes, "bytes": source.stat().st_size}
    turns: dict[str, list[float]] = {"load_check_save": [], "convert": [], "unchecked": []}
    theirs: dict[str, dict[str, Any]] = {}
    for _ in range(repeats):
        turns["load_check_save"].append(cpu_seconds(lambda: _own(source, copy)))
        turns["unchecked"].append(cpu_seconds(lambda: convert_onnx(source, target, dtype="fp16", check=False)))
        turns["convert"].append(cpu_seconds(lambda: convert_onnx(source, target, dtype="fp16")))
        for peer in PROGRAMS if peers is not None else ():
            known = theirs.setdefault(peer, {"failed": TOO_SLOW} if peer in slow and case.feeds is None else {})
            if "failed" in known or known.get("seconds", 0.0) > ONE_TURN:
                continue
            outcome = run_peer(peers, peer, source, converted, PEER_LIMIT)  # type: ignore[arg-type]
            if "seconds" in outcome and "casts" not in known:
                known.update(facts(source, converted, case.feeds))
            best = min(outcome.get("seconds", PEER_LIMIT), known.get("seconds", PEER_LIMIT))
            known.update({**outcome, "seconds": best} if "seconds" in outcome else {"failed": outcome["error"]})
    row |= {name: min(seconds) for name, seconds in turns.items()}
    row |= {
        "us_per_node": row["convert"] / nodes * 1e6,
        "size_ratio": target.stat().st_size / source.stat().st_size,
        "loaded": is_installed() and not is_long(onnx.load(target, load_external_data=False)),
        **facts(source, target, case.feeds),
    }
    if case.feeds is not None:
        convert_onnx(source, target, dtype="fp16", fuse=True, opset=FUSING_OPSET)
        row["fused"] = facts(source, target, case.feeds)
    if peers is not None:
        slow.update(peer for peer, outcome in theirs.items() if "stopped" in outcome.get("failed", ""))
        row["peers"] = theirs
    return row


def cases(options: argparse.Namespace, folder: Path) -> Iterator[Case]:
    """The models, each written when it is its turn."""
    source = folder / "in.onnx"
    random = np.random.default_rng(1)
    for size in map(int, options.sizes.split(",")):
        onnx.save(chain(size), source)
        yield Case(f"chain of {size:,}", source, None)
    onnx.save(large(options.megabytes), source)
    yield Case(
        f"linear layers, {options.megabytes} MB", source, {"x": random.standard_normal((4, 1024)).astype(np.float32)}
    )
    for name in options.exports:
        yield Case(name, *export(name, folder))


def _own(source: Path, copy: Path) -> None:
    model = onnx.load(source)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, copy)


def show(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table, peers in columns of their own."""
    table = Table(
        title="conversion to fp16, file to file (CPU seconds; best of the runs); casts, MB cast, error, share low"
    )
    table.add_column("model")
    own = ("nodes", "MB", "load+check+save", "convert", "unchecked", "µs per node", "casts")
    for column in (*own, *(PROGRAMS if any("peers" in row for row in rows) else ())):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [
            f"{row['nodes']:,}", f"{row['bytes'] / 1e6:.1f}", f"{row['load_check_save']:.2f}",
            f"{row['convert']:.2f}", f"{row['unchecked']:.2f}", f"{row['us_per_node']:.0f}", _told(row),
        ]  # fmt: skip
        for one in row.get("peers", {}).values():
            shown = one.get("failed", "")
            if "seconds" in one:
                shown = f"{one['seconds']:.2f} ({one['seconds'] / row['convert']:.1f}×); {_told(one)}"
            cells.append(str(shown)[:60])
        table.add_row(row["model"], *cells)
    return table


def show_casts(rows: list[dict[str, Any]]) -> Table:
    """Casts, their MB a run and error of each export beside AutoCast's: by default, and all norms and GELUs fused."""
    table = Table(title=f"casts, MB cast, error; fused: `--fuse --opset {FUSING_OPSET}`")
    for column in ("model", "default", CAREFUL, "default: at most its casts, bytes, error", "fused", "fused: at most"):
        table.add_column(column)
    for row in rows:
        theirs = row["peers"][CAREFUL]
        cells = [_told(row), _told(theirs), _at_most(row, theirs), _told(row["fused"]), _at_most(row["fused"], theirs)]
        table.add_row(row["model"], *cells)
    return table


def _at_most(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Whether casts, their bytes and the error are at most another converter's."""
    return ", ".join("yes" if ours[fact] <= theirs[fact] else "no" for fact in ("casts", "cast_bytes", "error"))


def _told(one: dict[str, Any]) -> str:
    error = f", {one['error']:.5f}" if "error" in one else ""
    return f"{one['casts']}, {one['cast_bytes'] / 1e6:.2f}{error}, {one['low']:.0%}"


def outcome(rows: list[dict[str, Any]]) -> str:
    """What came of the goal."""
    goals = []
    for row in rows:
        if row["model"].startswith("chain"):
            us, checked = row["unchecked"] / row["nodes"] * 1e6, row["convert"] / row["unchecked"]
            held = us <= MOST_US and checked <= MOST_CHECKED
            goals.append((held, f"{row['model']}: {us:.0f} µs a node, {checked:.1f} times that with checks"))
        elif row["bytes"] > 1e8 and "seconds" in row.get("peers", {}).get(RUNTIME, {}):
            ratio = row["convert"] / row["peers"][RUNTIME]["seconds"]
            goals.append((ratio <= 1, f"{row['model']}: {ratio:.2f} of ONNX Runtime's time"))
    return "; ".join(f"{text} ({'held' if held else 'missed'})" for held, text in goals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="2000,10000,100000", help="nodes of the chains, with commas")
    parser.add_argument("--exports", nargs="*", choices=list(MODELS), default=list(MODELS), help="transformers exports")
    parser.add_argument("--megabytes", type=int, default=140, help="size of the model with large weights")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each, of which the best counts")
    parser.add_argument("--peers", type=Path, help="a Python interpreter that has the other converters")
    parser.add_argument("--json", type=Path, default=RESULT, help="where to write the numbers")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        slow: set[str] = set()
        convert_onnx(chain(8), Path(folder) / "first.onnx")  # what is loaded once in a process is no one's time
        for case in cases(options, Path(folder)):
            rows.append(measure(case, Path(folder), options.repeats, options.peers, slow))
            Console(stderr=True).print(f"{case.name}: done")
    Console(width=240).print(show(rows))
    beside = [row for row in rows if "fused" in row and "casts" in row.get("peers", {}).get(CAREFUL, {})]
    if beside:
        Console(width=240).print(show_casts(beside))
    result = {
        "what": "conversion of ONNX models to fp16, file to file, CPU seconds", **machine_facts(),
        "onnx": onnx.__version__, "goal": GOAL, "outcome": outcome(rows), "rows": rows,
    }  # fmt: skip
    options.json.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
