"""`benchmarks/tune.py`: its models, what it counts, and what its results say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from amp_compiler.onnx.check.verify import verify

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tune(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    for name in [one for one in sys.modules if one.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    import benchmarks.tune

    return benchmarks.tune


@pytest.fixture
def layers(tmp_path):
    """Eight products by a weight, one behind the other, as a file, and an input."""
    random = np.random.default_rng(0)
    nodes, stored = [], []
    for place in range(8):
        stored.append(numpy_helper.from_array(random.standard_normal((8, 8)).astype(np.float32) / 3, f"w{place}"))
        nodes.append(helper.make_node("MatMul", [f"v{place}", f"w{place}"], [f"v{place + 1}"], f"product{place}"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in ("v0", "v8")]
    graph = helper.make_graph(nodes, "layers", ends[:1], ends[1:], stored)
    path = tmp_path / "layers.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), path)
    return path, {"v0": random.standard_normal((4, 8)).astype(np.float32)}


def test_a_model_without_peers_is_measured(tune, layers, tmp_path):
    source, feeds = layers
    tune.with_outliers(source, tmp_path / "outliers.onnx", feeds)
    assert verify(source, tmp_path / "outliers.onnx", [feeds]).largest_error < 1e-5
    row = tune.measure("layers", tmp_path / "outliers.onnx", feeds, tmp_path, None)
    assert row["nodes"] == 14 and row["tolerance"] == 1e-2 and "AutoCast" not in row
    assert 0 < row["tune"]["fp32"] <= 7 and row["tune"]["error"] <= 1e-2 and row["tune"]["runs"] <= row["tune"]["limit"]
    assert tune.show([row]).row_count == 1 and "the bound on runs held" in tune.outcome([row])


def test_the_results_hold_what_the_docs_say(tune):
    """Where no guard of the converter decides, `amp.tune` keeps no more nodes than AutoCast, at no more error."""
    data = json.loads((ROOT / "benchmarks" / "results" / "tune.json").read_text(encoding="utf-8"))
    assert data["outcome"] == tune.outcome(data["rows"])
    for row in data["rows"]:
        ours, theirs = row["tune"], row["AutoCast"]
        assert ours["error"] <= theirs["error"] and ours["runs"] <= ours["limit"] and not ours["stopped"]
        if not row["model"].startswith(("llama", "t5")):
            assert ours["fp32"] <= theirs["fp32"] and (ours["fp32"] < theirs["fp32"] or not theirs["fp32"])
