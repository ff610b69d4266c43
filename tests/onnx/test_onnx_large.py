"""Memory that a conversion takes, of a model in one file and of one whose data lie beside it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_helpers import make_model, value

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


def size_of(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern))


@pytest.mark.long
@pytest.mark.parametrize(("outside", "times"), [(False, 3), (True, 1)])
def test_peak_memory_is_a_few_times_that_of_the_model(tmp_path, outside, times):
    """256 MB in one file, or beside it, where they are mapped; the libraries' own memory is taken off."""
    one = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    weights = {f"w{index}": np.roll(one, index) for index in range(16)}
    names = ["x", *(f"h{index}" for index in range(15)), "y"]
    nodes = [
        helper.make_node("MatMul", [one, weight], [two], name=weight)
        for one, two, weight in zip(names, names[1:], weights, strict=False)
    ]
    source = tmp_path / "in.onnx"
    model = make_model(nodes, [value("x", ["n", 2048])], [value("y", ["n", 2048])], weights)
    onnx.save(model, source, save_as_external_data=outside, location="in.data")
    facts = convert_in_a_process(source, tmp_path / "out.onnx")
    assert facts["low"] == 16
    assert facts["peak"] - facts["start"] < times * size_of(tmp_path, "in.*")
    assert size_of(tmp_path, "out.*") <= 0.52 * size_of(tmp_path, "in.*")
