"""Differences of nearly equal numbers: both types lose the digits that are left, where an operand is rounded."""

import numpy as np
import pytest
from onnx import numpy_helper as nh
from onnx_models import BOTH, NEAR, casts, check, error, info, low_nodes, model, node, outputs, program, scalar, weight

import amp_compiler as amp

RNG = np.random.default_rng(7)
EYE = nh.from_array(np.eye(16, dtype=np.float32), "eye")
LESS = nh.from_array(np.eye(16, dtype=np.float32) - np.float32(1 / 16), "less")  # takes the mean of a row away


def axes(opset, op="ReduceMean", **attrs):
    """The axis -1 of a reduction, which is an operand from opset 18 on, and from 13 on of a ReduceSum."""
    operand = opset >= (13 if op == "ReduceSum" else 18)
    return (["last"], attrs) if operand else ([], {"axes": [-1], **attrs})


# ---- variances as differences of moments


def mean_of(source, result, opset, op="ReduceMean"):
    operand, attrs = axes(opset, op)
    if op == "ReduceSum":
        return [
            node(op, [source, *operand], [f"{result}_sum"], **attrs),
            node("Mul", [f"{result}_sum", "part"], [result]),
        ]
    return [node(op, [source, *operand], [result], **attrs)]


def variance(square, opset, op="ReduceMean", ending="root"):
    """The variance of rows, from an identical product on, so that not the data are lost but the moments."""
    squared = {"Mul": [node("Mul", ["a", "a"], ["q"])], "Pow": [node("Pow", ["a", "two"], ["q"])]}[square]
    end = {
        "root": [node("Add", ["d", "e"], ["v"]), node("Sqrt", ["v"], ["y"])],
        "clip": [node("Relu", ["d"], ["v"]), node("Sqrt", ["v"], ["y"])],
        "nothing": [node("Identity", ["d"], ["y"])],
    }[ending]
    nodes = [
        node("MatMul", ["x", "eye"], ["a"], "product"), *squared, *mean_of("a", "m", opset, op),
        *mean_of("q", "s", opset, op), node("Mul", ["m", "m"], ["n"], "squared_mean"),
        node("Sub", ["s", "n"], ["d"], "difference"), *end,
    ]  # fmt: skip
    data = [EYE, scalar("two", 2.0), scalar("e", 1e-5), scalar("part", 1 / 16), scalar("last", [-1], np.int64)]
    return model(nodes, [info("x", 4, 16)], [info("y", 4, 1)], data, opset=opset)


@BOTH
@pytest.mark.parametrize(("square", "op", "ending", "opset"), [
    ("Mul", "ReduceMean", "root", 11), ("Mul", "ReduceMean", "root", 18), ("Pow", "ReduceMean", "clip", 13),
    ("Mul", "ReduceSum", "root", 11), ("Mul", "ReduceSum", "root", 18), ("Mul", "ReduceMean", "nothing", 13),
])  # fmt: skip
def test_a_variance_as_a_difference_of_moments(square, op, ending, opset, dtype):
    source = variance(square, opset, op, ending)
    feeds = {"x": np.round(RNG.standard_normal((4, 16)) * 4 + 40).astype(np.float32)}  # whole numbers: no digit is lost
    assert error(source, check(source, dtype).model, feeds) < NEAR[dtype]


@BOTH
@pytest.mark.parametrize(("kind", "other"), [("AveragePool", "a"), ("Conv", "a"), ("Conv", "b")])
def test_a_local_variance(kind, other, dtype):
    """As a similarity of images has it, or a covariance: means over windows."""
    window = {"AveragePool": {"kernel_shape": [3, 3]}, "Conv": {}}[kind]
    more = ["window"] if kind == "Conv" else []
    nodes = [
        node("Conv", ["x", "one"], ["a"]), node("Conv", ["x", "one"], ["b"]), node("Mul", ["a", other], ["q"]),
        node(kind, ["a", *more], ["m"], **window), node(kind, ["q", *more], ["s"], **window),
        node(kind, [other, *more], ["o"], **window), node("Mul", ["m", "o"], ["n"]), node("Sub", ["s", "n"], ["y"]),
    ]  # fmt: skip
    data = [
        nh.from_array(np.ones((1, 1, 1, 1), np.float32), "one"),
        nh.from_array(np.full((1, 1, 3, 3), 1 / 9, np.float32), "window"),
    ]
    source = model(nodes, [info("x", 1, 1, 8, 8)], [info("y", 1, 1, 6, 6)], data if more else data[:1])
    feeds = {"x": np.round(RNG.standard_normal((1, 1, 8, 8)) * 4 + 40).astype(np.float32)}
    assert error(source, check(source, dtype).model, feeds) < NEAR[dtype]


# ---- distances


CROSS = "[cross] ab = MatMul(a, t) "
DISTANCES = {
    "subtracted": CROSS + "s = Add(sa, st) p = Mul(ab, two) y = Sub(s, p)",
    "added": CROSS + "p = Mul(ab, minus) d = Add(p, sa) y = Add(d, st)",
    "gemm": "s = Add(sa, st) [cross] y = Gemm<alpha=-2.0, transB=1>(a, b, s)",
    "logarithm of a Gaussian": CROSS + "p = Mul(ab, two) d = Sub(p, sa) y = Sub(d, st)",
    "table": CROSS + "p = Mul(two, ab) d = Sub(sa, p) y = Add(d, norms)",
}


def distances(form, opset):
    """Squared distances of the rows of two matrices that lie near one another, or of one to a table."""
    total, attrs = axes(opset, "ReduceSum", keepdims=1)
    nodes = [*program("a = MatMul(x, eye) aa = Mul(a, a)"), node("ReduceSum", ["aa", *total], ["sa"], **attrs)]
    if form == "table":
        nodes += program("t = Transpose(table)")
    else:
        nodes += program("b = MatMul(z, eye) t = Transpose(b) bb = Mul(b, b)")
        nodes += [node("ReduceSum", ["bb", *total], ["sb"], **attrs), *program("st = Transpose(sb)")]
    nodes += program(DISTANCES[form])
    rows = np.round(RNG.standard_normal((8, 16)) * 2 + 20).astype(np.float32)
    data = [EYE, nh.from_array(rows, "table"), nh.from_array((rows**2).sum(1), "norms"), scalar("two", 2.0),
            scalar("minus", -2.0), scalar("last", [-1], np.int64)]  # fmt: skip
    used = {name for entry in nodes for name in entry.input}
    inputs = [info("x", 8, 16), info("z", 8, 16)]
    return model(nodes, inputs if "z" in used else inputs[:1], [info("y", 8, 8)], data, opset=opset)


@BOTH
@pytest.mark.parametrize(("form", "opset"), [
    ("subtracted", 11), ("subtracted", 18), ("added", 13), ("gemm", 11), ("gemm", 13), ("logarithm of a Gaussian", 18),
    ("table", 13),
])  # fmt: skip
def test_an_expanded_distance(form, opset, dtype):
    source = distances(form, opset)
    near = np.round(RNG.standard_normal((8, 16)) * 2 + 20).astype(np.float32)
    feeds = {"x": near, "z": near[::-1] + 1}
    done = check(source, dtype)
    assert error(source, done.model, {one.name: feeds[one.name] for one in source.graph.input}) < NEAR[dtype]
    assert "cross" not in low_nodes(done)


# ---- inputs of the graph


INPUTS = {
    "mean": "d = Sub(x, mu) n = Div(d, sd)",
    "mean, written as a sum": "c = Mul(x, one) d = Add(c, minus) n = Div(d, sd)",
    "mean of moved data": "t = Transpose(x) u = Transpose(t) d = Sub(u, mu) n = Div(d, sd)",
    "its own mean": "m = ReduceMean<axes=[-1]>(x) d = Sub(x, m) n = Div(d, sd)",
    "its least number": "m = ReduceMin<axes=[-1]>(x) d = Sub(x, m) n = Div(d, sd)",
    "clipped": "c = Max(x, one) d = Sub(c, mu) n = Div(d, sd)",
    "batch norm": "n = BatchNormalization(x, ones, zeros, mus, vars)",
    "instance norm": "n = InstanceNormalization(x, ones, zeros)",
    "another input": "d = Sub(x, z) n = Div(d, sd)",
    "a mean over a window": "m = AveragePool<kernel_shape=[3], pads=[1, 1]>(x) d = Sub(x, m) n = Div(d, sd)",
    "one window less another": (
        "a = Conv<group=3, pads=[1, 1]>(x, wide) b = Conv<group=3, pads=[1, 1]>(x, narrow) d = Sub(a, b) n = Div(d, sd)"
    ),
    "a filter": "f = Identity(filter) d = Conv<group=3, pads=[1, 1]>(x, f) n = Div(d, sd)",
    "a filter of a window": (
        "a = Conv<group=3, pads=[1, 1]>(x, wide) d = Conv<group=3, pads=[1, 1]>(a, filter) n = Div(d, sd)"
    ),
    "a matrix of differences": "d = MatMul(x, less) n = Div(d, sd)",
    "differences of columns": (
        "t = Transpose<perm=[0, 2, 1]>(x) u = MatMul(less, t) d = Transpose<perm=[0, 2, 1]>(u) n = Div(d, sd)"
    ),
}
WINDOWS = {"wide": [1 / 3] * 3, "narrow": [0.25, 0.5, 0.25], "filter": [-0.97, 1.0, 0.0]}


@BOTH
@pytest.mark.parametrize("form", INPUTS)
def test_an_input_less_a_mean_is_rounded_behind_it(form, dtype):
    data = [scalar("mu", 300.0), scalar("minus", -300.0), scalar("sd", 0.2), scalar("one", 1.0), EYE, LESS]
    data += [nh.from_array(np.full(3, number, np.float32), name)
             for name, number in (("ones", 1), ("zeros", 0), ("mus", 300), ("vars", 0.04))]  # fmt: skip
    data += [nh.from_array(np.tile(np.array(row, np.float32), (3, 1, 1)), name) for name, row in WINDOWS.items()]
    nodes = [*program(INPUTS[form]), node("MatMul", ["n", "eye"], ["y"], "product")]
    used = {name for entry in nodes for name in entry.input}
    inputs = [info(name, 2, 3, 16) for name in ("x", "z") if name in used]
    source = model(nodes, inputs, [info("y", 2, 3, 16)], data, opset=13)
    feeds = {"x": (300 + RNG.standard_normal((2, 3, 16)) * 0.2).astype(np.float32)}
    feeds["z"] = (feeds["x"] + RNG.standard_normal((2, 3, 16)) * 0.2).astype(np.float32)
    done = check(source, dtype)
    assert error(source, done.model, {one.name: feeds[one.name] for one in source.graph.input}) < NEAR[dtype]
    assert low_nodes(done) >= {"product"}
    assert len(casts(done.model)) == 2  # of the difference and of the result


LEFT_OF_ONE = {
    "output": "y = Identity(q)",
    "odds": "y = Div(p, q)",
    "power": "y = Pow(q, two)",
    "scaled": "y = Mul(q, two)",
}


WAYS = {
    "less": "[left] q = Sub(one, p)",
    "negative": "n = Neg(p) [left] q = Add(n, one)",
    "a negative factor": "n = Mul(p, minus) [left] q = Add(one, n)",
    "the other sign": "[left] n = Sub(p, one) q = Neg(n)",
}


@BOTH
@pytest.mark.parametrize(
    ("form", "way"), [*((form, "less") for form in LEFT_OF_ONE), *(("output", way) for way in WAYS)]
)
def test_what_a_probability_leaves_of_one(form, way, dtype):
    """At 0.999 FP16 has half of a digit of it left; beside another summand it does not count."""
    start = [
        node("MatMul", ["x", "eye"], ["a"], "product"),
        node("Sigmoid", ["a"], ["p"], "sigmoid"),
        *program(WAYS[way]),
    ]
    numbers = {"one": 1.0, "two": 2.0, "minus": -1.0}
    data, ends = (
        [EYE, *(scalar(name, number) for name, number in numbers.items())],
        ([info("x", 4, 16)], [info("y", 4, 16)]),
    )
    source = model([*start, *program(LEFT_OF_ONE[form])], *ends, data)
    feeds = {"x": np.round(7 + RNG.standard_normal((4, 16)) * 4).astype(np.float32) / 4}
    done = check(source, dtype)
    assert error(source, done.model, feeds) < NEAR[dtype] and "product" in low_nodes(done)
    gate = [node("Mul", ["q", "a"], ["b"]), node("Add", ["b", "p"], ["c"]), node("MatMul", ["c", "eye"], ["y"])]
    assert {"sigmoid", "left"} <= low_nodes(check(model([*start, *gate], *ends, data), dtype))


NEAR_ONE = {
    "one and data": "s = Add(one, a) y = Log(s)",
    "one less data": "s = Sub(one, a) y = Log(s)",
    "one and data, summed": "u = Unsqueeze(b, last) s = Sum(u, one) y = ReduceLogSum<keepdims=0>(s, last)",
    "exponential": "s = Exp(a) d = Sub(s, one) g = Sign(a) y = Mul(d, g)",
    "minus one and exponential": "s = Exp(a) d = Add(minus, s) g = Sign(a) y = Mul(d, g)",
    "root": "t = Mul(b, k) s = Add(t, one) r = Sqrt(s) y = Sub(r, one)",
    "cosine": "t = Mul(b, k) c = Cos(t) d = Sub(one, c) y = Div(d, t)",
    "squared": "t = Mul(b, k) c = Cos(t) s = Mul(c, c) d = Sub(one, s) y = Sqrt(d)",
}


@BOTH
@pytest.mark.parametrize("form", NEAR_ONE)
def test_what_is_near_one_is_as_small_as_the_data(form, dtype):
    nodes = [node("MatMul", ["x", "eye"], ["a"]), node("Abs", ["a"], ["b"]), *program(NEAR_ONE[form])]
    source = model(nodes, [info("x", 4, 16)], [info("y", 4, 16)], [
        EYE, scalar("one", 1.0), scalar("minus", -1.0), scalar("k", 50.0), scalar("last", [-1], np.int64)
    ])  # fmt: skip
    feeds = {"x": RNG.standard_normal((4, 16)).astype(np.float32) * np.float32(1e-3)}
    assert error(source, check(source, dtype, keep_io_types=False).model, feeds) < NEAR[dtype]


def test_a_mean_over_a_window_as_a_difference_of_running_sums():
    nodes = program("""c = CumSum(x, one) u = Slice(c, ten, end, one) v = Slice(c, none, minus, one)
        d = Sub(u, v) y = Div(d, parts)""")
    numbers = {"one": [1], "ten": [10], "end": [2000], "none": [0], "minus": [-10]}
    data = [scalar(name, value, np.int64) for name, value in numbers.items()] + [scalar("parts", 10.0)]
    source = model(nodes, [info("x", 1, 2000)], [info("y", 1, 1990)], data)
    done = check(source, "fp16", keep_io_types=False)
    assert error(source, done.model, {"x": 1 + RNG.standard_normal((1, 2000)).astype(np.float32)}) < NEAR["fp16"]


# ---- boxes that leave the model without NMS


GRID = np.stack(np.meshgrid(np.arange(80), np.arange(80)), 0).reshape(1, 2, 6400).astype(np.float32) + 0.5
BOXES = {
    "corners around anchors": (
        "p = Sub(grid, one) q = Add(grid, two) size = Sub(q, p) s = Add(p, q) centre = Div(s, pair) "
        "b = Concat<axis=1>(centre, size) y = Mul(b, stride)"
    ),
    "centres in cells": (
        "p = Sigmoid(one) q = Add(p, grid) centre = Mul(q, stride) e = Exp(two) size = Mul(e, stride) "
        "y = Concat<axis=1>(centre, size)"
    ),
}


@BOTH
@pytest.mark.parametrize("form", BOXES)
def test_the_corners_of_a_box_are_as_near_as_its_size(form, dtype):
    """A place among 640 pixels is off by a quarter of one in FP16, and by two in BF16."""
    nodes = [
        node("Conv", ["x", "w"], ["h"], "product"), node("Reshape", ["h", "rows"], ["r"]),
        node("Split", ["r", "halves"], ["one", "two"], axis=1), *program(BOXES[form]),
    ]  # fmt: skip
    data = [weight("w", 4, 3, 1, 1), nh.from_array(np.array([1, 4, 6400]), "rows"), scalar("halves", [2, 2], np.int64),
            nh.from_array(GRID, "grid"), scalar("stride", 8.0), scalar("pair", 2.0)]  # fmt: skip
    source = model(nodes, [info("x", 1, 3, 80, 80)], [info("y", 1, 4, 6400)], data)
    feeds = {"x": RNG.standard_normal((1, 3, 80, 80)).astype(np.float32)}
    done = check(source, dtype)
    assert "product" in low_nodes(done)
    want, got = outputs(source, feeds)[0], outputs(done.model, feeds)[0]
    pixels = {"fp16": 2.0**-4, "bf16": 2.0**-1}[dtype]  # of offsets and sizes of some ten pixels
    assert np.abs(want - got)[:, :2].max() < pixels
    assert error(source, done.model, feeds) < NEAR[dtype] / 8


# ---- what is no such difference


LEFT = {
    "two layers": "a = MatMul(x, w) b = MatMul(x, v) d = Sub(a, b)",
    "a gate": "a = MatMul(x, w) g = Sigmoid(a) b = Mul(g, a) d = Sub(a, b)",
    "a squared activation": (
        "a = MatMul(x, w) r = Relu(a) s = Mul(r, r) b = MatMul(s, v) c = Add(a, b) e = MatMul(c, w) d = Sub(c, e)"
    ),
    "a rotation": (
        "a = MatMul(x, w) b = Slice(a, nought, eight, last) c = Slice(a, eight, sixteen, last) e = Mul(b, cos) "
        "f = Mul(c, sin) g = Sub(e, f) d = Concat<axis=-1>(g, b)"
    ),
}


@BOTH
@pytest.mark.parametrize("form", LEFT)
def test_other_differences_are_low(form, dtype):
    data = [weight("w", 16, 16), weight("v", 16, 16), weight("cos", 4, 8), weight("sin", 4, 8)]
    places = {"nought": 0, "eight": 8, "sixteen": 16, "last": -1}
    data += [scalar(name, [number], np.int64) for name, number in places.items()]
    nodes = [*program(LEFT[form]), node("MatMul", ["d", "v"], ["y"])]
    source = model(nodes, [info("x", 4, 16)], [info("y", 4, 16)], data)
    assert all(entry.precision == "low" for entry in check(source, dtype).plan.nodes)


# ---- calibration


@BOTH
@pytest.mark.parametrize(("op", "third", "between"), [
    ("Sub", [], []), ("Sum", ["x"], []),
    ("Sub", [], [node("LogSoftmax", ["a"], ["la"]), node("LogSoftmax", ["b"], ["lb"])]),
])  # fmt: skip
def test_calibration_finds_what_cancels(op, third, between, dtype):
    ends = ["la", "lb"] if between else ["a", "b"]
    nodes = [node("MatMul", ["x", "w"], ["a"], "first"), node("MatMul", ["x", "v"], ["b"], "second"), *between,
             node(op, [*ends, *third], ["d"], "difference"), node("MatMul", ["d", "w"], ["y"], "last")]  # fmt: skip
    base = RNG.standard_normal((16, 16)).astype(np.float32)
    more = (base + RNG.standard_normal((16, 16)).astype(np.float32) * 1e-3).astype(np.float32)
    more = -more - np.eye(16, dtype=np.float32) if third else more
    source = model(nodes, [info("x", 4, 16)], [info("y", 4, 16)], [nh.from_array(base, "w"), nh.from_array(more, "v")])
    feeds = {"x": np.round(RNG.standard_normal((4, 16)) * 8).astype(np.float32)}
    assert low_nodes(check(source, dtype)) >= {"first", "second", "last"}
    done = amp.convert_onnx(source, dtype=dtype, calibration=[feeds])
    assert low_nodes(done) == {"last"}
    assert error(source, done.model, feeds) < NEAR[dtype]
    of, number = 4 + len(between), 3 + len(between)
    assert (
        done.notes[0] == f"by calibration {number} of {of} nodes in FP32: {number} for sums and differences that cancel"
    )


NORMS = {
    "LayerNormalization": "[norm] y = LayerNormalization(a, ones)",
    "in parts": "m = ReduceMean(a, last) d = Sub(a, m) s = ReduceL2(d, last) t = Add(s, ones) y = Div(d, t)",
    "InstanceNormalization": "[norm] y = InstanceNormalization(a, two, two)",
    "GroupNormalization": "[norm] y = GroupNormalization<num_groups=2>(a, two, two)",
    "Softmax": "[norm] y = Softmax(a)",
    "LogSoftmax": "[norm] y = LogSoftmax<axis=2>(a)",
    "differences": "y = MatMul(a, less)",
}


@BOTH
@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("form", NORMS)
def test_calibration_finds_what_a_norm_leaves_of_numbers_far_from_zero(form, opset, dtype):
    """Around 1,000 FP16 has halves; rows of zeros, and other means in other rows, change nothing."""
    opset = {"LayerNormalization": 17, "GroupNormalization": 21}.get(form, opset)
    nodes = [node("MatMul", ["x", "eye"], ["h"], "product"), node("Relu", ["h"], ["r"]), node("Add", ["r", "x"], ["a"]),
             *program(NORMS[form])]  # fmt: skip
    data = [EYE, LESS, nh.from_array(np.ones(16, np.float32), "ones"), nh.from_array(np.ones(2, np.float32), "two"),
            scalar("last", [-1], np.int64)]  # fmt: skip
    source = model(nodes, [info("x", 3, 2, 16)], [info("y", 3, 2, 16)], data, opset=opset)
    x = (RNG.standard_normal((3, 2, 16)) + np.array([1000, 500, 0]).reshape(3, 1, 1)).astype(np.float32)
    x[2] = 0
    done = check(source, dtype, calibration=[{"x": x}])
    assert error(source, done.model, {"x": x}) < NEAR[dtype]
    assert "product" not in low_nodes(done) and "product" in low_nodes(check(source, dtype))
    near = np.array(x, copy=True) - 1000
    assert "product" in low_nodes(check(source, dtype, calibration=[{"x": near}]))


@BOTH
@pytest.mark.parametrize("form", ["LayerNormalization", "in parts", "differences"])
@pytest.mark.parametrize("op", ["Add", "Gemm"])
def test_stored_numbers_say_that_a_norm_takes_a_mean_far_from_zero_away(op, form, dtype):
    more = node(op, ["h", *(["eye"] if op == "Gemm" else []), "far"], ["a"], "sum")
    nodes = [node("MatMul", ["x", "eye"], ["h"], "product"), more, *program(NORMS[form])]
    data = [EYE, LESS, scalar("last", [-1], np.int64)]
    data += [nh.from_array(np.full(16, number, np.float32), name) for name, number in (("ones", 1), ("far", 1e3))]
    source = model(nodes, [info("x", 4, 16)], [info("y", 4, 16)], data, opset=18)
    done = check(source, dtype)
    assert error(source, done.model, {"x": RNG.standard_normal((4, 16)).astype(np.float32)}) < NEAR[dtype]
    assert "product" in low_nodes(done) and "sum" not in low_nodes(done)


# ---- spectra


PRODUCTS = "re = MatMul(x, real) im = MatMul(x, imaginary) "
POWER = "a = Mul(re, re) b = Mul(im, im) p = Add(a, b) "
END = "l = Clip(p, least) y = Log(l)"
SPECTRA = {
    "convolution": (
        "u = Unsqueeze(x, one) c = Conv<strides=[32]>(u, both) re, im = Split<axis=1>(c, half) " + POWER + END
    ),
    "products": PRODUCTS + POWER + END,
    "magnitudes": PRODUCTS + "a = Pow(re, two) b = Pow(im, two) m = Add(a, b) p = Sqrt(m) " + END,
    "filtered, then frames": (
        "u = Unsqueeze(x, one) s = Conv<pads=[1, 1]>(u, smooth) g = Mul(s, gain) f = Squeeze(g, one) "
        "re = MatMul(f, real) im = MatMul(f, imaginary) " + POWER + END
    ),
    "logarithms of sums": PRODUCTS + POWER + "m = Max(p, least) y = ReduceLogSum<axes=[0], keepdims=1>(m)",
}


def spectrum(form):
    """The logarithm of the power in 33 bands of frames, which sums of products with sines and cosines find."""
    at = np.outer(np.arange(64), np.arange(33)) * 2 * np.pi / 64
    window = np.hanning(64)[:, None]
    real, imaginary = ((window * turn(at)).astype(np.float32) for turn in (np.cos, np.sin))
    both = np.concatenate([real, imaginary], 1).T[:, None]
    data = [
        nh.from_array(real, "real"), nh.from_array(imaginary, "imaginary"), nh.from_array(both, "both"),
        nh.from_array(np.array([[[0.25, 0.5, 0.25]]], np.float32), "smooth"), scalar("gain", 2.0), scalar("two", 2.0),
        scalar("one", [1], np.int64), scalar("half", [33, 33], np.int64), scalar("least", 1e-10),
    ]  # fmt: skip
    long = form == "convolution"
    ends = [info("x", 2, 640 if long else 64)], [info("y", *[None] * (2 + long))]
    return model(program(SPECTRA[form]), *ends, data, opset=17)


@BOTH
@pytest.mark.parametrize("form", SPECTRA)
def test_a_weak_band_beside_a_strong_one(form, dtype):
    """A tone 60 dB below another is far below the rounding of the sum of both, and above it in its band."""
    source = spectrum(form)
    at = np.arange(640 if form == "convolution" else 64)
    tones = 1e3 * np.sin(2 * np.pi * 4 * at / 64) + 0.2 * np.sin(2 * np.pi * 20 * at / 64)
    feeds = {"x": np.stack([tones, tones[::-1]]).astype(np.float32)}
    assert error(source, check(source, dtype).model, feeds) < NEAR[dtype]


@BOTH
def test_a_norm_of_what_a_first_layer_makes_is_no_spectrum(dtype):
    """Without a logarithm the product stays low."""
    last, attrs = axes(17, keepdims=1)
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "first"), node("Mul", ["h", "h"], ["q"]),
        node("ReduceMean", ["q", *last], ["m"], **attrs), node("Sqrt", ["m"], ["r"]), node("Div", ["h", "r"], ["y"]),
    ]  # fmt: skip
    source = model(nodes, [info("x", 4, 64)], [info("y", 4, 64)], [weight("w", 64, 64)], opset=17)
    assert "first" in low_nodes(check(source, dtype))
