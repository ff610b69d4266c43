"""How few nodes stay in FP32 at an error: `amp.tune` beside two other converters that look for such nodes.

    python -m benchmarks.tune --peers /path/to/their/python

Prediction, written before the first run: on every export `amp.tune` leaves fewer nodes in FP32 than AutoCast excludes
by their range, at an error that is no larger, and takes at most 4 log2(nodes) runs and one for each node that it keeps.
That first run had three outliers a model, all of which leave FP16's range, and kept 7 nodes of a BERT where AutoCast
kept 6. The three that FP16 holds were added behind it, because a rule by range excludes these too: so the models below
are not those that the prediction was made for.

The models are the exports of `benchmarks.onnx_casts` as they are, and with outliers: in six products by a weight one
channel is made large and divided again by a node behind it, as channels of trained transformers are large. Three of
them reach some thousands, which FP16 holds, three leave its range. AutoCast
(`convert_to_mixed_precision`) is given the inputs for calibration. The tolerance for the other two is the error that
AutoCast makes by true rounding after every node, or 0.01 where that is larger or AutoCast fails. ORT's
`auto_convert_mixed_precision` (onnxconverter-common) is given that as the relative L2 error which its validation
allows; it runs models in ONNX Runtime on the CPU, which computes FP16 in FP32. Errors here are by true rounding for
all. Counted are the nodes of the converted file that make FP32 values and are no casts. `amp.tune` starts from the
preset `apex-o3` with `keep: {powers: false}`, by which all is low, and from `default`.
"""

from __future__ import annotations

import argparse
import json
import operator
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper
from rich.console import Console
from rich.table import Table

import amp_compiler as amp
from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically
from amp_compiler.onnx.check.calibrate import calibrate
from amp_compiler.onnx.check.verify import verify
from benchmarks.machine import machine_facts
from benchmarks.onnx_casts import MODELS, export
from benchmarks.onnx_convert_peers import run_program

RESULT = Path(__file__).parent / "results" / "tune.json"
PREDICTION = (
    "fewer nodes in FP32 than AutoCast on every model at no more error; 4 log2(nodes) runs and one for each node"
)
ALL_LOW = {"version": 1, "extends": "apex-o3", "keep": {"powers": False}}
TOLERANCE = 1e-2
PEER_LIMIT = 150.0  # seconds that a peer may take
OUTLIERS, REACHES, MOST_WEIGHT = 6, (2e4, 4e6), 6e4  # products with one; the most that it can be, in turns; its weight
FRAME = """
import json, sys, warnings, io, contextlib
warnings.simplefilter("ignore")
source, target, data, tolerance = sys.argv[1:5]
import numpy as np
import onnx
said = io.StringIO()
with contextlib.redirect_stdout(said):
{body}
    onnx.save(model, target)
from importlib.metadata import version
print("RESULT" + json.dumps({{"version": version("{package}")}}))
"""
AUTOCAST = FRAME.format(
    body="""
    from modelopt.onnx.autocast import convert_to_mixed_precision
    model = convert_to_mixed_precision(source, low_precision_type="fp16", keep_io_types=True, calibration_data=data)
""",
    package="nvidia-modelopt",
)
ORT = FRAME.format(
    body="""
    from onnxconverter_common import auto_convert_mixed_precision
    feeds = dict(np.load(data))

    def near(one, two):
        pairs = [(a.astype(np.float64), b.astype(np.float64)) for a, b in zip(one, two)]
        return all(np.linalg.norm(a - b) <= float(tolerance) * np.linalg.norm(a) for a, b in pairs)

    model = auto_convert_mixed_precision(onnx.load(source), feeds, validate_fn=near, keep_io_types=True)
""",
    package="onnxconverter-common",
)
_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)


def with_outliers(source: Path, target: Path, feeds: dict[str, np.ndarray]) -> None:
    """Write a model with one channel of six products made large, and divided again by a node behind each.

    Args:
        source: the model.
        target: where it goes.
        feeds: inputs, by which the channels reach `REACHES` in turns.
    """
    model = onnx.load(source)
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    products = [
        node
        for node in graph.node
        if node.op_type in ("MatMul", "Gemm") and node.input[1] in stored and len(stored[node.input[1]].dims) == 2
        if not any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    ]
    chosen = products[:: max(len(products) // OUTLIERS, 1)][:OUTLIERS]
    ranges = calibrate(source, [feeds], names=[node.input[0] for node in chosen])
    for count, node in enumerate(chosen):
        weight = numpy_helper.to_array(stored[node.input[1]]).copy()
        reach = float(np.abs(weight[:, 0]).sum()) * ranges[node.input[0]]  # the most that the channel can be
        scale = np.ones(weight.shape[1], np.float32)
        scale[0] = min(REACHES[count % 2] / reach, MOST_WEIGHT / float(np.abs(weight[:, 0]).max()))
        names = [f"outlier{count}_{what}" for what in ("weight", "scale", "raw")]
        graph.initializer.append(numpy_helper.from_array(weight * scale, names[0]))
        graph.initializer.append(numpy_helper.from_array(1 / scale, names[1]))
        if len(node.input) > 2:  # what a Gemm adds
            added = numpy_helper.to_array(stored[node.input[2]]) * scale
            graph.initializer.append(numpy_helper.from_array(added, f"outlier{count}_added"))
            node.input[2] = f"outlier{count}_added"
        output = node.output[0]
        node.input[1], node.output[0] = names[0], names[2]
        place = list(graph.node).index(node)
        graph.node.insert(
            place + 1, onnx.helper.make_node("Mul", [names[2], names[1]], [output], f"outlier{count}_down")
        )
    onnx.save(model, target)


def fp32_nodes(path: Path) -> tuple[int, int]:
    """The nodes of a file that make FP32 values and are no casts, and all that make floats."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True)
    graph = model.graph
    types = {one.name: one.type.tensor_type.elem_type for one in (*graph.value_info, *graph.input, *graph.output)}
    wide = floats = 0
    for node in graph.node:
        dtypes = {types.get(one, 0) for one in node.output}
        if node.op_type in ("Cast", "Constant", "ConstantOfShape"):
            continue
        wide += bool(dtypes & set(_WIDE))
        floats += bool(dtypes & {*_WIDE, TensorProto.FLOAT16})
    return wide, floats


def judged(source: Path, converted: Path, feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    """What a converted file comes to: nodes in FP32, nodes of floats, and the error by true rounding."""
    wide, floats = fp32_nodes(converted)
    error = max(output.relative for output in verify(source, converted, [feeds]).outputs)
    return {"fp32": wide, "floats": floats, "error": error if np.isfinite(error) else "infinite"}


def measure(name: str, source: Path, feeds: dict[str, np.ndarray], folder: Path, peers: Path | None) -> dict[str, Any]:
    """One model: what each converter makes of it."""
    data, target = folder / "data.npz", folder / "made.onnx"
    np.savez(data, **feeds)
    row: dict[str, Any] = {"model": name, "nodes": len(onnx.load(source).graph.node), "tolerance": TOLERANCE}
    if peers is not None:
        row["AutoCast"] = _peer(peers, AUTOCAST, source, target, data, TOLERANCE, feeds)
        error = row["AutoCast"].get("error")
        row["tolerance"] = min(TOLERANCE, error) if isinstance(error, float) else TOLERANCE
        row["ORT auto"] = _peer(peers, ORT, source, target, data, row["tolerance"], feeds)
    for label, rules in (("tune", ALL_LOW), ("tune, default", "default")):
        begun = time.process_time()
        try:
            tuned = amp.tune(source, [feeds], rules=rules, tolerance=row["tolerance"], output=folder / "tuned.yaml")
        except AmpError as error:
            row[label] = {"failed": error.what}
            continue
        seconds = time.process_time() - begun
        amp.convert_onnx(source, target, rules=str(folder / "tuned.yaml"), dtype="fp16", check=False)
        row[label] = {
            **judged(source, target, feeds), "kept": len(tuned.nodes), "searched": tuned.searched,
            "runs": tuned.runs,
            "limit": tuned.limit, "stopped": tuned.stopped, "before": str(tuned.before), "seconds": seconds,
        }  # fmt: skip
    return row


def _peer(
    peers: Path, program: str, source: Path, target: Path, data: Path, tolerance: float, feeds: dict[str, np.ndarray]
) -> dict[str, Any]:
    target.unlink(missing_ok=True)
    outcome = run_program(peers, program, (source, target, data, repr(tolerance)), PEER_LIMIT)
    if "error" in outcome:
        return {"failed": outcome["error"]}
    try:
        return {**outcome, **judged(source, target, feeds)}
    except Exception as error:  # noqa: BLE001  a file that cannot be run is what a peer came to
        return {"failed": f"its file does not run: {str(error).splitlines()[0][:120]}"}


def show(rows: list[dict[str, Any]]) -> Table:
    """Nodes in FP32 and the error, for each converter."""
    table = Table(title="nodes in FP32, error by true rounding; of amp.tune the runs that it took, of those it may")
    labels = [label for label in ("AutoCast", "ORT auto", "tune", "tune, default") if label in rows[0]]
    for column in ("model", "nodes", "tolerance", *labels):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        table.add_row(
            row["model"], str(row["nodes"]), f"{row['tolerance']:.2g}", *(_told(row[label]) for label in labels)
        )
    return table


def _told(one: dict[str, Any]) -> str:
    if "failed" in one:
        return f"failed: {one['failed'][:40]}"
    error = one["error"] if isinstance(one["error"], str) else f"{one['error']:.2g}"
    runs = f"; {one['runs']} of {one['limit']} runs" if "runs" in one else ""
    return f"{one['fp32']}, {error}{runs}"


def outcome(rows: list[dict[str, Any]]) -> str:
    """What came of the prediction."""
    sentences = []
    for peer in ("AutoCast", "ORT auto"):
        both = [row for row in rows if "fp32" in row.get(peer, {}) and "fp32" in row["tune"]]
        sound = [row for row in both if isinstance(row[peer]["error"], float)]
        kept = [row for row in sound if row["tune"]["error"] <= row[peer]["error"]]
        fewer, same = (
            sum(sign(row["tune"]["fp32"], row[peer]["fp32"]) for row in kept) for sign in (operator.lt, operator.eq)
        )
        sentences.append(
            f"beside {peer}: at no more error fewer nodes in FP32 on {fewer} models, as many on {same}, more on "
            f"{len(kept) - fewer - same}; its result overflows on {len(both) - len(sound)}, it fails on "
            f"{len(rows) - len(both)}"
        )
    ours = [row[label] for row in rows for label in ("tune", "tune, default") if "runs" in row[label]]
    held = all(one["runs"] <= one["limit"] for one in ours)
    return "; ".join([*sentences, f"the bound on runs {'held' if held else 'did not hold'}"])


def main() -> None:
    """Export, convert, tune, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--peers", type=Path, help="interpreter of the peers' environment")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(directory)
        for name in options.models:
            source, feeds = export(name, folder)
            rows.append(measure(name, source, feeds, folder, options.peers))
            with_outliers(source, folder / "outlier.onnx", feeds)
            rows.append(measure(f"{name}, outliers", folder / "outlier.onnx", feeds, folder, options.peers))
            Console(stderr=True).print(f"{name}: done")
    facts = {
        "what": "nodes in FP32 at a tolerance, fp16", **machine_facts(), "onnx": onnx.__version__,
        "prediction": PREDICTION, "outcome": outcome(rows), "rows": rows,
    }  # fmt: skip
    write_atomically(options.json, json.dumps(facts, indent=1) + "\n")
    Console(width=170).print(show(rows))
    Console(width=170).print(facts["outcome"])


if __name__ == "__main__":
    main()
