"""Inputs that a verification draws by itself: which they are, what they find, and what they say that they leave out."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from number_models import doubled, offset_rows
from onnx import TensorProto as T
from onnx_models import info, model, node, scalar, weight

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check import memory, probes
from amp_compiler.onnx.check.probes import Probes
from amp_compiler.onnx.check.run import ORT, REFERENCE, Runner
from amp_compiler.onnx.check.verify import TOLERANCES, verify
from amp_compiler.onnx.convert import convert_onnx

OFF = {"version": 1, "extends": "default", "keep": {"sizes": False, "angles": False, "running_sums": False}}


def language_model(positions=64):
    """Tokens and their positions looked up in tables, of which that of positions ends early."""
    nodes = [
        node("Gather", ["words", "ids"], ["a"]),
        node("Gather", ["places", "position_ids"], ["b"]),
        node("Add", ["a", "b"], ["c"]),
        node("Cast", ["attention_mask"], ["m"], to=T.FLOAT),
        node("Unsqueeze", ["m", "last"], ["n"]),
        node("Mul", ["c", "n"], ["d"]),
        node("MatMul", ["d", "w"], ["y"]),
    ]
    names = ("ids", "position_ids", "attention_mask")
    return model(
        nodes, [info(name, "batch", "length", kind=T.INT64) for name in names], [info("y", "batch", "length", 8)],
        [weight("words", 1000, 8), weight("places", positions, 8), weight("w", 8, 8), scalar("last", [-1], np.int64)],
    )  # fmt: skip


def rotary():
    nodes = [
        node("Cast", ["positions"], ["p"], to=T.FLOAT),
        node("Mul", ["p", "f"], ["a"]),
        node("Cos", ["a"], ["c"]),
        node("MatMul", ["c", "w"], ["y"]),
    ]
    frequencies = (10000.0 ** (-np.arange(8) / 8)).astype(np.float32)
    return model(nodes, [info("positions", "length", 1, kind=T.INT64)], [info("y", "length", 8)],
                 [scalar("f", frequencies), weight("w", 8, 8)], opset=22, ir_version=10)  # fmt: skip


def image():
    nodes = [node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    return model(nodes, [info("x", "n", 2, "h", "w")], [info("y", "n", 2, "h", "w")], [weight("w", 2, 2, 3, 3)])


def drawn(source, refused=lambda batch: False):
    probes = Probes(source)
    found = {}
    for batch in probes:
        if refused(batch):
            probes.refuse(OnnxError("too large"))
        else:
            found[probes.label] = batch
    return found, probes.untried()


def test_lengths_and_ids():
    found, untried = drawn(language_model())
    assert list(found) == ["small", "long and odd", "end of the ids"]
    assert {batch["ids"].shape for batch in found.values()} == {(2, 2), (1, 2003)}
    long, last = found["long and odd"], found["end of the ids"]
    assert long["ids"].max() == 999 and long["position_ids"].max() == 63 and set(long["attention_mask"].flat) == {0, 1}
    assert all((batch["attention_mask"][:, 0] == 1).all() for batch in found.values())
    assert last["ids"].min() >= 938 and last["position_ids"].min() >= 60 and last["position_ids"].max() <= 63
    assert untried == ["sizes above batch = 2, length = 2003", "anything but 0 and 1 in 'attention_mask'"]


def test_a_smaller_batch_where_the_model_refuses_one():
    found, untried = drawn(language_model(), lambda batch: batch["ids"].shape[1] > 130)
    assert found["long and odd"]["ids"].shape == (1, 127)
    assert untried[:3] == [
        "batch = 1, length = 2003 (the original does not run on it)",
        "batch = 1, length = 499 (the original does not run on it)",
        "sizes above batch = 2, length = 127",
    ]
    with pytest.raises(OnnxError, match="does not run on random inputs: too large"):
        drawn(language_model(), lambda batch: True)


def test_images_times_and_sums_of_sizes():
    assert drawn(image())[0]["long and odd"]["x"].shape == (1, 2, 301, 403)
    nodes = [
        node("Mul", ["timestep", "c"], ["t"]), node("Add", ["past", "c"], ["q"]), node("Add", ["new", "c"], ["r"]),
        node("Add", ["whole", "c"], ["s"]),
    ]  # fmt: skip
    source = model(
        nodes, [info("timestep", "n"), info("past", 1, "p"), info("new", 1, "s"), info("whole", 1, "p + s")],
        [info("t", "n"), info("q", 1, "p"), info("r", 1, "s"), info("s", 1, "p + s")], [scalar("c", 0.5)],
    )  # fmt: skip
    found, untried = drawn(source)
    assert found["small"]["whole"].shape == (1, 4) and found["long and odd"]["whole"].shape == (1, 4006)
    assert found["long and odd"]["timestep"].max() > 900
    assert "other than standard normal numbers in 'past'" in untried


def test_offsets_before_a_table_count_and_draws_repeat():
    found, _ = drawn(offset_rows())
    assert found["long and odd"]["ids"].max() == 5100 - 4097 - 1
    again, _ = drawn(offset_rows())
    assert all(np.array_equal(batch["ids"], again[label]["ids"]) for label, batch in found.items())


@pytest.mark.parametrize("build", [doubled, offset_rows, rotary])
def test_they_find_what_small_inputs_do_not(build):
    """Sizes, indices and angles that are rounded: not seen with 2 of everything, seen with what is drawn."""
    source = build()
    small = next(iter(Probes(source)))
    wrong, right = (convert_onnx(source, dtype="bf16", rules=rules).model for rules in (OFF, "default"))
    tolerance = TOLERANCES["bf16"]
    if build is not offset_rows:  # 4,097 and 4,098 are rounded however small the ids are
        assert verify(source, wrong, [small]).ok(tolerance)
    report = verify(source, wrong, Probes(source))
    assert not report.ok(tolerance) and report.worst is not None
    assert report.worst.label in ("long and odd", "end of the ids") or build is offset_rows
    assert "worst in batch" in str(report) and "not tried: " in str(report)
    assert json.loads(json.dumps(report.to_dict()))["worst"]["inputs"]
    fine = verify(source, right, Probes(source))
    assert fine.ok(tolerance) and fine.batches == report.batches


def test_numbers_that_an_input_is_compared_with_are_drawn():
    nodes = [
        node("Sub", ["x", "c"], ["a"]), node("Greater", ["a", "half"], ["b"]), node("Equal", ["x", "end"], ["e"]),
        node("And", ["b", "e"], ["n"]), node("Or", ["n", "b"], ["y"]),
    ]  # fmt: skip
    source = model(nodes, [info("x", 1, "n")], [info("y", 1, "n", kind=T.BOOL)],
                   [scalar("c", 3.0), scalar("half", 0.5), scalar("end", 50256.0)])  # fmt: skip
    found, _ = drawn(source)
    x = found["long and odd"]["x"]
    assert {3.5, 50256.0, np.nextafter(np.float32(50256), np.float32(0))} <= set(x[0, :6].tolist())
    low = {"version": 1, "rules": [{"match": {}, "precision": "low"}], "keep": OFF["keep"]}
    assert verify(source, convert_onnx(source, dtype="bf16", rules=low).model, Probes(source)).worst is not None
    assert verify(source, convert_onnx(source, dtype="bf16").model, Probes(source)).worst is None


def test_the_worst_input_is_told():
    source = rotary()
    report = verify(source, convert_onnx(source, dtype="bf16", rules=OFF).model, Probes(source))
    assert (report.worst.number, report.worst.label, report.worst.output) == (1, "long and odd", "y")
    assert report.worst.inputs == ("positions: int64[2003, 1] from 0 to 2002",)
    assert report.worst.relative >= report.largest_error > 0


LIMITED = """
import resource, sys
from amp_compiler.onnx.check import memory
memory.MEMORY = 128 << 20  # before anything reads it
sys.path.insert(0, sys.argv[1])
from onnx import TensorProto as T
from onnx_models import info, model, node, weight
from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.probes import Probes
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

def check(length, last):
    nodes = [node("Gather", ["table", "ids"], ["e"]), node("MatMul", ["e", "w"], ["h"]), node("Relu", ["h"], ["r"]),
             last]
    source = model(nodes, [info("ids", "N", length, kind=T.INT32)], [info("y", "N", None, None)],
                   [weight("table", 257, 128), weight("w", 128, 128, scale=0.1)], opset=15)
    return verify(source, convert_onnx(source).model, Probes(source))

def used():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10  # MiB

small, large = node("ReduceMax", ["r"], ["y"], axes=[1]), node("Relu", ["r"], ["y"])
check(8, small)
before = used()
for last in (small, large):
    report = check(512, last)
    assert report.ok(1e-2) and report.batches >= 2, report
    for told in ("N = 2003 (more than 0.125 GiB of memory)", "sizes above N = "):
        assert told in str(report.untried), report.untried
try:
    check(1 << 20, large)
except OnnxError as refused:
    assert "its values take more than 0.125 GiB on this batch" in str(refused) and "give batches" in str(refused)
else:
    raise AssertionError("nothing was refused")
# The values between, two results and what is drawn. One value of N = 2003 takes 0.5 GiB, and there are four.
assert used() - before < 400, used() - before
"""


@pytest.mark.long
def test_the_values_between_take_no_more_memory_than_they_may():
    """In a process of its own, which holds one allocator of ONNX Runtime."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(Path(__file__).parents[1])], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_reference_evaluator_is_estimated(monkeypatch):
    """It keeps all values: here two of [N, 1024] in FP32, as N is in a batch."""
    nodes = [node("Relu", ["x"], ["a"]), node("Relu", ["a"], ["y"])]
    source = model(nodes, [info("x", "N", 1024)], [info("y", "N", 1024)])
    batch = {"x": np.ones((4, 1024), np.float32)}
    assert memory.kept_bytes(source, batch) == 2 * 4 * 1024 * 4

    def refuse(*args, **options):
        raise RuntimeError("it has no kernel")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    runner = Runner(source, None, limited=True)
    assert runner.engine == REFERENCE and np.array_equal(runner.run(batch)["y"], batch["x"])
    monkeypatch.setattr(memory, "MEMORY", 32767)
    with pytest.raises(memory.MemoryLimitError, match="its values take more than"):
        runner.run(batch)
    assert Runner(source, None).run(batch)["y"].shape == (4, 1024)


def test_open_dimensions_count_as_they_are_drawn():
    """A name has the size that the batch gives it, whatever a file declares between; what has none, the largest."""
    nodes = [node("Relu", ["x"], ["a"]), node("NonZero", ["a"], ["i"])]
    source = model(nodes, [info("x", "N", 8)], [info("a", "N", 8), info("i", 2, "found", kind=T.INT64)])
    batch = {"x": np.ones((50, 8), np.float32)}
    assert memory.kept_bytes(source, batch) == 50 * 8 * 4 + 2 * 50 * 8


def test_a_process_with_an_allocator_of_its_own_runs_estimated(monkeypatch):
    memory._register_arena.cache_clear()
    monkeypatch.setattr(onnxruntime, "create_and_register_allocator", _refuse_allocator)
    try:
        source = model([node("Relu", ["x"], ["y"])], [info("x", "N", 1024)], [info("y", "N", 1024)])
        runner, batch = Runner(source, None, limited=True), {"x": np.ones((4, 1024), np.float32)}
        assert runner.engine == ORT and np.array_equal(runner.run(batch)["y"], batch["x"])
        monkeypatch.setattr(memory, "MEMORY", 4 * 1024 * 4 - 1)
        with pytest.raises(memory.MemoryLimitError, match="its values take more than"):
            runner.run(batch)
    finally:
        memory._register_arena.cache_clear()


def _refuse_allocator(*arguments):
    raise RuntimeError("an allocator has been registered for this device")


def test_threads_that_verify_at_once_register_one_arena(monkeypatch):
    calls, together = [], threading.Barrier(4)

    def register(*arguments):
        calls.append(arguments)
        time.sleep(0.05)  # in which the others come

    def begin():
        together.wait()
        return memory.limited_arena()

    memory._register_arena.cache_clear()
    monkeypatch.setattr(onnxruntime, "create_and_register_allocator", register)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda _: begin(), range(4)))
    finally:
        memory._register_arena.cache_clear()
    assert len(calls) == 1


def test_inputs_that_are_too_large_are_not_drawn(monkeypatch):
    for module in (memory, probes):
        monkeypatch.setattr(module, "MEMORY", 1 << 27)
    nodes = [node("ReduceMax", ["x"], ["y"], keepdims=0)]
    found, untried = drawn(model(nodes, [info("x", "N", 1 << 16)], [info("y")]))
    assert found["long and odd"]["x"].shape == (127, 1 << 16)
    assert "N = 2003 (more than 0.125 GiB of memory)" in untried and "sizes above N = 127" in untried
    with pytest.raises(OnnxError, match=r"its inputs take more than 0\.125 GiB"):
        drawn(model(nodes, [info("x", "N", 1 << 26)], [info("y")]))


def test_a_converted_model_that_gives_other_shapes_or_does_not_run_fails():
    source = doubled()
    wrong = convert_onnx(source, dtype="bf16", rules=OFF).model
    report = verify(source, wrong, [{"x": np.zeros((1, 2, 301, 403), np.float32)}])
    assert report.largest_error == np.inf and "has the shape [1, 2, 600, 808], not [1, 2, 602, 806]" in str(report)
    source, shorter = language_model(), language_model(32)
    ids, mask = np.array([[1, 2]]), np.array([[1, 1]])
    batches = [{"ids": ids, "position_ids": np.array([last]), "attention_mask": mask} for last in ([3, 4], [40, 50])]
    report = verify(source, shorter, batches)
    assert report.largest_error == np.inf and report.batches == 2 and report.worst.number == 1
    assert "the converted model does not run, and the original does" in str(report)
    with pytest.raises(OnnxError, match="cannot be run on this batch"):
        verify(shorter, source, batches)


def test_a_negative_size_is_an_open_one():
    source = model([node("MatMul", ["x", "w"], ["y"])], [info("x", "n", 8)], [info("y", "n", 8)], [weight("w", 8, 8)])
    for value in (source.graph.input[0], source.graph.output[0]):
        value.type.tensor_type.shape.dim[0].dim_value = -1  # as some exporters write it
    shapes = {batch["x"].shape for batch in Probes(source)}
    assert len(shapes) > 1 and all(size > 0 and width == 8 for size, width in shapes)
