"""Memory: a 3 GB model with external data, and a smaller one in one file."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_helpers import make_model, value

SIDE = 8192
BYTES = 4 * SIDE * SIDE  # of one weight: 256 MiB

CONVERT = """
import json, sys, time
sys.path.insert(0, sys.argv[3])
from own_memory import peak
from amp_compiler.onnx.convert import convert_onnx
start = peak()
begun = time.perf_counter()
done = convert_onnx(sys.argv[1], sys.argv[2], dtype="fp16")
facts = {
    "peak": peak(), "start": start,
    "low": done.plan.low_nodes, "nodes": len(done.plan.nodes), "seconds": time.perf_counter() - begun,
}
print(json.dumps(facts))
"""


def convert_in_a_process(source: Path, target: Path) -> dict[str, float]:
    command = [sys.executable, "-c", CONVERT, str(source), str(target), str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    facts: dict[str, float] = json.loads(done.stdout)
    return facts


def sparse_chain(folder: Path, layers: int) -> Path:
    """A chain of products whose weights lie in a sparse file: zeros but for 64 numbers each."""
    nodes, previous = [], "x"
    data = folder / "weights.bin"
    with data.open("wb") as file:
        file.truncate(layers * BYTES)
    stored = np.memmap(data, np.float32, "r+", shape=(layers, SIDE, SIDE))
    model = make_model([], [value("x", ["n", SIDE])], [value("y", ["n", SIDE])])
    for index in range(layers):
        tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[SIDE, SIDE])
        tensor.data_location = TensorProto.EXTERNAL
        for key, entry in (("location", data.name), ("offset", index * BYTES), ("length", BYTES)):
            tensor.external_data.add(key=key, value=str(entry))
        model.graph.initializer.append(tensor)
        stored[index, 0, :64] = index + 1
        made = "y" if index == layers - 1 else f"h{index}"
        nodes.append(helper.make_node("MatMul", [previous, f"w{index}"], [made], name=f"matmul_{index}"))
        previous = made
    stored.flush()
    model.graph.node.extend(nodes)
    path = folder / "large.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.slow
def test_3_gb_of_external_data_convert_in_under_2_gb(tmp_path):
    """12 weights of 256 MiB. The input's file is sparse; the output takes 1.5 GB of the disk for a while."""
    source = sparse_chain(tmp_path, 12)
    assert (tmp_path / "weights.bin").stat().st_size >= 3 * 2**30
    facts = convert_in_a_process(source, tmp_path / "out.onnx")
    assert facts["low"] == facts["nodes"] == 12
    assert facts["peak"] < 2e9, f"{facts['peak'] / 1e9:.2f} GB"
    made = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert {tensor.data_type for tensor in made.graph.initializer} == {TensorProto.FLOAT16}
    assert sum(file.stat().st_size for file in tmp_path.glob("out.onnx*")) <= 0.52 * 12 * BYTES
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    last = next(tensor for tensor in made.graph.initializer if tensor.name.startswith("w11"))
    entries = {entry.key: entry.value for entry in last.external_data}
    first = np.fromfile(tmp_path / entries["location"], np.float16, 65, offset=int(entries["offset"]))
    assert (first[:64] == 12).all() and first[64] == 0


@pytest.mark.long
def test_peak_memory_is_under_3_times_the_model(tmp_path):
    """One file of 256 MB; the libraries' own memory, measured in the same process, is taken off."""
    one = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    weights = {f"w{index}": np.roll(one, index) for index in range(16)}
    names = ["x", *(f"h{index}" for index in range(15)), "y"]
    nodes = [
        helper.make_node("MatMul", [one, weight], [two], name=weight)
        for one, two, weight in zip(names, names[1:], weights, strict=False)
    ]
    source = tmp_path / "in.onnx"
    onnx.save(make_model(nodes, [value("x", ["n", 2048])], [value("y", ["n", 2048])], weights), source)
    facts = convert_in_a_process(source, tmp_path / "out.onnx")
    assert facts["low"] == 16
    assert facts["peak"] - facts["start"] < 3 * source.stat().st_size
    assert (tmp_path / "out.onnx").stat().st_size <= 0.52 * source.stat().st_size
