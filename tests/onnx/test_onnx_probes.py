"""Inputs that a verification draws by itself: which they are, what they find, and what they say that they leave out."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx_models import info, model, node, run_program, scalar, weight

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check import memory
from amp_compiler.onnx.check.cost import Cost, stride_of
from amp_compiler.onnx.check.memory import Limits
from amp_compiler.onnx.check.probes import Probes, _mask, random_batch
from amp_compiler.onnx.check.run import ORT, REFERENCE, Runner
from amp_compiler.onnx.check.verify import TOLERANCES, verify
from amp_compiler.onnx.convert import convert_onnx


def doubled():
    """`F.interpolate(x, scale_factor=2.0, recompute_scale_factor=True)` as exporters write it out."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "two", "four"], ["spatial"]),
        node("Slice", ["shape", "zero", "two"], ["channels"]),
        node("Cast", ["spatial"], ["wide"], to=T.FLOAT),
        node("Mul", ["wide", "factor"], ["scaled"], "scale"),
        node("Floor", ["scaled"], ["whole"], "floor"),
        node("Cast", ["whole"], ["sizes"], "sizes", to=T.INT64),
        node("Concat", ["channels", "sizes"], ["all"], axis=0),
        node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("Resize", ["c", "", "", "all"], ["y"], "resize", mode="nearest"),
    ]
    ints = [scalar(name, [number], np.int64) for name, number in (("zero", 0), ("two", 2), ("four", 4))]
    return model(
        nodes, [info("x", 1, 2, "h", "w")], [info("y", 1, 2, "H", "W")],
        [*ints, scalar("factor", 2.0), weight("w", 2, 2, 3, 3)],
    )  # fmt: skip


def offset_rows():
    """Rows of a table of 5,100, from number 4,097 on."""
    nodes = [
        node("Cast", ["ids"], ["wide"], to=T.FLOAT),
        node("Add", ["wide", "offset"], ["moved"], "move"),
        node("Cast", ["moved"], ["rows"], to=T.INT64),
        node("Gather", ["table", "rows"], ["r"]),
        node("MatMul", ["r", "w"], ["y"]),
    ]
    return model(nodes, [info("ids", "n", kind=T.INT64)], [info("y", "n", 8)],
                   [weight("table", 5100, 8), weight("w", 8, 8), scalar("offset", 4097.0)])  # fmt: skip


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


def drawn(source, refused=lambda batch: False):
    probes = Probes(source)
    result = {}
    for batch in probes:
        if refused(batch):
            probes.refuse(OnnxError("too large"))
        else:
            result[probes.label] = batch
    return result, probes.untried()


def test_lengths_and_ids():
    result, untried = drawn(language_model())
    assert list(result)[:3] == ["small", "long and odd", "end of the ids"]
    assert {batch["ids"].shape for batch in result.values()} == {(2, 2), (1, 2003)}
    long, last = result["long and odd"], result["end of the ids"]
    assert long["ids"].max() == 999 and long["position_ids"].max() == 63 and set(long["attention_mask"].flat) == {0, 1}
    assert all((result[label]["attention_mask"][:, 0] == 1).all() for label in list(result)[:3])
    assert last["ids"].min() >= 938 and last["position_ids"].min() >= 60 and last["position_ids"].max() <= 63
    assert untried == ["sizes above batch = 2, length = 2003", "anything but 0 and 1 in 'attention_mask'"]


def test_a_smaller_batch_where_the_model_refuses_one():
    result, untried = drawn(language_model(), lambda batch: batch["ids"].shape[1] > 130)
    assert result["long and odd"]["ids"].shape == (1, 127)
    assert untried[:5] == [
        *(f"batch = 1, length = {size} (the original does not run on it)" for size in (2003, 2016, 499, 512)),
        "sizes above batch = 2, length = 127",
    ]
    result, untried = drawn(language_model(), lambda batch: True)
    assert not result
    assert untried[0] == "anything at all: the original runs on nothing that was drawn (too large)"


def test_multiples_where_the_strides_want_them():
    """Halved twice and doubled twice: a sum with what came in has another size where 4 does not divide it."""
    pool = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [node("MaxPool", ["x"], ["a"], **pool), node("MaxPool", ["a"], ["b"], **pool),
             node("Resize", ["b", "", "four"], ["c"]), node("Add", ["x", "c"], ["y"])]  # fmt: skip
    source = model(nodes, [info("x", "n", 2, "h", "w")], [info("y", "n", 2, "h", "w")],
                   [scalar("four", [1, 1, 4, 4])])  # fmt: skip
    assert stride_of(source) == 4
    result, untried = drawn(source, lambda batch: any(size % 4 for size in batch["x"].shape[2:]))
    assert [batch["x"].shape for batch in result.values()] == [(2, 2, 32, 32), (1, 2, 320, 416)]
    report = verify(source, convert_onnx(source).model, Probes(source))
    assert report.batches == 2 and report.ok(1e-2)
    assert (
        report.untried[0] == "n = 1, h = 301, w = 403 (the original does not run on it)"
        and untried[0] == report.untried[0]
    )


def test_a_scan_goes_over_no_empty_sequence():
    """Windows of 400 samples: ONNX Runtime would end the process at fewer."""
    body = h.make_graph([node("Identity", ["f"], ["g"])], "body", [info("f")], [info("g")])
    source = model([node("Scan", ["x"], ["y"], body=body, num_scan_inputs=1)], [info("x", "n")], [info("y", "n")])
    assert [batch["x"].shape for batch in Probes(source)] == [(512,), (2003,)]


def test_the_second_dimension_of_a_state_may_be_the_batch():
    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("ReduceSum", ["h", "first"], ["s"], keepdims=0),
            node("Unsqueeze", ["s", "one"], ["u"]),
            node("Concat", ["a", "u"], ["y"], axis=1),
        ],
        [info("x", None, 4, 8), info("h", 2, None, 8)],
        [info("y", None, 5, 8)],
        [weight("w", 8, 8), scalar("first", [0], np.int64), scalar("one", [1], np.int64)],
    )
    report = verify(source, convert_onnx(source).model, Probes(source))
    assert report.batches == 2 and report.ok(1e-2)
    assert report.untried[0] == "dimension 0 of 'x' = 1, dimension 1 of 'h' = 2003 (the original does not run on it)"


def test_rows_of_masks_are_masked_whole_and_padded():
    nodes = [node("Cast", ["mask"], ["m"], to=T.FLOAT), node("MatMul", ["m", "w"], ["y"])]
    source = model(nodes, [info("mask", "n", 8, kind=T.INT64)], [info("y", "n", 4)], [weight("w", 8, 4)])
    result, _ = drawn(source)
    labels = ("rows that are masked whole", "rows that are padded")
    rows = {tuple(row) for label in labels for row in result[label]["mask"].tolist()}
    half = (1, 1, 1, 1)
    assert rows >= {(0,) * 8, (0, 0, 0, 0, *half), (*half, 0, 0, 0, 0)}
    assert _mask([4, 1, 6, 6], 1)[:, 0, 0].tolist() == [[0] * 6, [0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1] * 6]
    assert _mask([6], 1).tolist() == [0] * 6 and _mask([2, 6], 0).tolist() == [[1] * 6, [0] * 6]


def test_sizes_are_what_the_limits_allow():
    """The product of a table of 64 columns and a square matrix: estimated by hand and by the model's shapes."""
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Relu", ["a"], ["y"])]
    source = model(nodes, [info("x", "n", 64)], [info("y", "n", 64)], [weight("w", 64, 64)])
    values, (memory_, seconds) = Cost(source).values({"x": (10, 64)}), Cost(source).of({"x": (10, 64)})
    assert values["a"] == ([10, 64], 2560) and memory_ >= 3 * 2560 and seconds > 0
    more = Cost(source).of({"x": (2000, 64)})
    assert more[0] == 200 * memory_ and more[1] == pytest.approx(200 * seconds)
    rows = [
        max(batch["x"].shape[0] for batch in Probes(source, memory=memory_, seconds=seconds_))
        for memory_, seconds_ in ((None, None), (3e6, None), (None, 100 * seconds))
    ]
    assert rows == [2003, 499, 499]
    untried = Probes(source, memory=3e6)
    assert len(list(untried)) == 2 and "n = 2003 (more than 0.003 GB of memory)" in untried.untried()


def test_what_runs_in_a_branch_counts():
    x, y, w = info("x", "n", 64), info("y", "n", 64), weight("w", 64, 64)
    branches = {
        f"{op}_branch": h.make_graph([node(op, inputs, ["b"])], op, [], [info("b", "n", 64)])
        for op, inputs in (("then", ["x", "w"]), ("else", ["x"]))
    }
    for branch, op in zip(branches.values(), ("MatMul", "Identity"), strict=True):
        branch.node[0].op_type = op
    source = model([node("If", ["c"], ["y"], **branches)], [info("c", kind=T.BOOL), x], [y], [w])
    plain = model([node("MatMul", ["x", "w"], ["y"])], [x], [y], [w])
    assert Cost(source).of({"c": (), "x": (100, 64)})[1] > Cost(plain).of({"x": (100, 64)})[1] > 0


def test_a_model_that_runs_on_nothing_drawn_is_written_and_not_verified(tmp_path, shell):
    nodes = [node("Reshape", ["x", "shape"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    source = model(nodes, [info("x", "n")], [info("y", 7, 4)], [scalar("shape", [7, 11], np.int64), weight("w", 11, 4)])
    onnx.save(source, tmp_path / "m.onnx")
    options = ["convert", tmp_path / "m.onnx", tmp_path / "o.onnx", "--verify"]
    code, said = shell(*options)
    assert code == 3 and (tmp_path / "o.onnx").exists()
    said = " ".join(said.split())
    assert "not tried: anything at all: the original runs on nothing that was drawn" in said and "FAILED" in said
    code, said = shell(*options, "--verify-memory", "0")
    assert code == 3 and "more than 0 GB of memory" in " ".join(said.split())


def test_images_times_and_sums_of_sizes():
    image = model([node("Conv", ["x", "w"], ["y"])], [info("x", "n", 2, "h", "w")], [info("y", "n", 2, "h", "w")],
                  [weight("w", 2, 2, 1, 1)])  # fmt: skip
    assert drawn(image)[0]["long and odd"]["x"].shape == (1, 2, 301, 403)
    nodes = [
        node("Mul", ["timestep", "c"], ["t"]), node("Add", ["past", "c"], ["q"]), node("Add", ["new", "c"], ["r"]),
        node("Add", ["whole", "c"], ["s"]),
    ]  # fmt: skip
    source = model(
        nodes, [info("timestep", "n"), info("past", 1, "p"), info("new", 1, "s"), info("whole", 1, "p + s")],
        [info("t", "n"), info("q", 1, "p"), info("r", 1, "s"), info("s", 1, "p + s")], [scalar("c", 0.5)],
    )  # fmt: skip
    result, untried = drawn(source)
    assert result["small"]["whole"].shape == (1, 4) and result["long and odd"]["whole"].shape == (1, 4006)
    assert result["long and odd"]["timestep"].max() > 900
    assert "other than standard normal numbers in 'past'" in untried


def test_offsets_before_a_table_count_and_draws_repeat():
    result, _ = drawn(offset_rows())
    assert result["long and odd"]["ids"].max() == 5100 - 4097 - 1
    again, _ = drawn(offset_rows())
    assert all(np.array_equal(batch["ids"], again[label]["ids"]) for label, batch in result.items())


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
    result, _ = drawn(source)
    x = result["long and odd"]["x"]
    assert {3.5, 50256.0, np.nextafter(np.float32(50256), np.float32(0))} <= set(x[0, :6].tolist())
    low = {"version": 1, "rules": [{"match": {}, "precision": "low"}], "keep": OFF["keep"]}
    assert verify(source, convert_onnx(source, dtype="bf16", rules=low).model, Probes(source)).worst is not None
    assert verify(source, convert_onnx(source, dtype="bf16").model, Probes(source)).worst is None


LIMITED = """
import resource
from amp_compiler.onnx.check import memory
memory.MEMORY = 128 * 10**6  # before anything reads it
from onnx import TensorProto as T
from onnx import helper as h
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
    for told in ("N = 2003 (more than 0.128 GB of memory)", "sizes above N = "):
        assert told in str(report.untried), report.untried
report = check(1 << 20, large)
assert not report.ok(1e-2) and "nothing that was drawn (more than 0.128 GB of memory)" in report.untried[0], report
# The values between, two results and what is drawn. One value of N = 2003 takes 0.5 GiB, and there are four.
assert used() - before < 400, used() - before
"""


@pytest.mark.long
def test_the_values_between_take_no_more_memory_than_they_may():
    """In a process of its own, which holds one allocator of ONNX Runtime."""
    run_program(LIMITED)


def test_the_reference_evaluator_is_estimated(monkeypatch):
    """It keeps all values: here two of [N, 1024] in FP32, as N is in a batch."""
    nodes = [node("Relu", ["x"], ["a"]), node("Relu", ["a"], ["y"])]
    source = model(nodes, [info("x", "N", 1024)], [info("y", "N", 1024)])
    batch = {"x": np.ones((4, 1024), np.float32)}
    assert memory.kept_bytes(source, batch) == 2 * 4 * 1024 * 4

    def refuse(*args, **options):
        raise RuntimeError("it has no kernel")

    monkeypatch.setattr(onnxruntime, "InferenceSession", refuse)
    runner = Runner(source, None, limits=Limits(memory.MEMORY, 10.0))
    assert runner.engine == REFERENCE and np.array_equal(runner.run(batch)["y"], batch["x"])
    runner = Runner(source, None, limits=Limits(32767, 10.0))
    with pytest.raises(memory.LimitError, match=r"it takes more than 3\.2767e-05 GB"):
        runner.run(batch)
    assert Runner(source, None).run(batch)["y"].shape == (4, 1024)


def test_open_dimensions_count_as_they_are_drawn():
    """A name has the size that the batch gives it, whatever a file declares between; what has none, the largest."""
    nodes = [node("Relu", ["x"], ["a"]), node("NonZero", ["a"], ["i"])]
    source = model(nodes, [info("x", "N", 8)], [info("a", "N", 8), info("i", 2, "found", kind=T.INT64)])
    batch = {"x": np.ones((50, 8), np.float32)}
    assert memory.kept_bytes(source, batch) == 50 * 8 * 4 + 2 * 50 * 8


@pytest.fixture
def registering(monkeypatch):
    """Takes what is called in the place of ONNX Runtime's registration, which a process does once."""
    memory._register_arena.cache_clear()
    yield lambda call: monkeypatch.setattr(onnxruntime, "create_and_register_allocator", call)
    memory._register_arena.cache_clear()


def test_a_process_with_an_allocator_of_its_own_runs_estimated(registering):
    def refuse(*arguments):
        raise RuntimeError("an allocator has been registered for this device")

    registering(refuse)
    source = model([node("Relu", ["x"], ["y"])], [info("x", "N", 1024)], [info("y", "N", 1024)])
    batch = {"x": np.ones((4, 1024), np.float32)}
    runner = Runner(source, None, limits=Limits(4 * 1024 * 4, 10.0))
    assert runner.engine == ORT and np.array_equal(runner.run(batch)["y"], batch["x"])
    with pytest.raises(memory.LimitError, match="it takes more than"):
        Runner(source, None, limits=Limits(4 * 1024 * 4 - 1, 10.0)).run(batch)


def test_threads_that_verify_at_once_register_one_arena(registering):
    calls, together = [], threading.Barrier(4)

    def begin(_):
        together.wait()
        return memory.limited_arena()

    registering(lambda *arguments: (calls.append(arguments), time.sleep(0.05)))  # in which the others come
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(begin, range(4)))
    assert len(calls) == 1


def test_a_loop_that_takes_too_long_is_stopped():
    """How often a loop turns is not in the shapes."""
    body = h.make_graph([node("MatMul", ["a", "w"], ["b"]), node("Identity", ["go"], ["on"])], "body",
                        [info("i", kind=T.INT64), info("go", kind=T.BOOL), info("a", 64, 64)],
                        [info("on", kind=T.BOOL), info("b", 64, 64)])  # fmt: skip
    source = model([node("Loop", ["n", "", "x"], ["y"], body=body)], [info("n", kind=T.INT64), info("x", 64, 64)],
                   [info("y", 64, 64)], [weight("w", 64, 64, scale=0.01)])  # fmt: skip
    runner = Runner(source, None, limits=Limits(memory.MEMORY, 0.1))
    x = np.zeros((64, 64), np.float32)
    assert runner.run({"n": np.array(3), "x": x})["y"].shape == (64, 64)
    with pytest.raises(memory.LimitError, match=r"it takes more than 0\.3 s on this batch"):
        runner.run({"n": np.array(10**9), "x": x})
    assert runner.run({"n": np.array(3), "x": x})["y"].shape == (64, 64)


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


def test_a_random_batch_repeats_and_texts_are_refused():
    one, again = random_batch(language_model()), random_batch(language_model())
    assert {name: array.shape for name, array in one.items()} == dict.fromkeys(one, (2, 2))
    assert all(np.array_equal(array, again[name]) for name, array in one.items())
    texts = model([node("Identity", ["x"], ["y"])], [info("x", 1, kind=T.STRING)], [info("y", 1, kind=T.STRING)])
    with pytest.raises(OnnxError, match="no random values"):
        random_batch(texts)
