"""Numbers that FP16 makes zero or infinite on their way: under a logarithm, a root, or between bounds."""

import numpy as np
import pytest
from onnx import TensorProto as T
from onnx import numpy_helper as nh
from onnx_models import BOTH, DTYPES, NEAR, check, error, info, low_nodes, model, node, program, scalar, weight

from amp_compiler.onnx.convert import convert_onnx

RNG = np.random.default_rng(5)


# ---- logarithms of probabilities


def logarithm(between, squash="Softmax", opset=13, stored=()):
    """log(… squash(4 x))"""
    function = [node(squash, ["h"], ["p"], "squash", **({"axis": 1} if squash == "Softmax" else {}))]
    nodes = [node("MatMul", ["x", "w"], ["h"], "product"), *function, *between, node("Log", ["q"], ["y"], "log")]
    data = [nh.from_array(np.eye(64, dtype=np.float32) * 4, "w"), *stored]
    return model(nodes, [info("x", 3, 64)], [info("y", "rows", "columns")], data, opset=opset)


BETWEEN = {
    "nothing": ([node("Identity", ["p"], ["q"])], []),
    "clip": ([node("Clip", ["p", "c"], ["q"])], [scalar("c", 1e-12)]),
    "epsilon": ([node("Add", ["p", "c"], ["q"])], [scalar("c", 1e-9)]),
    "largest": ([node("Max", ["p", "c"], ["q"])], [scalar("c", 1e-12)]),
    "view": ([node("Transpose", ["p"], ["q"], perm=[1, 0])], []),
    "mean": ([node("ReduceMean", ["p"], ["q"], axes=[0])], []),
    "scaled": ([node("Mul", ["p", "c"], ["q"])], [scalar("c", 0.5)]),
    "through FP64": ([node("Cast", ["p"], ["d"], to=T.DOUBLE), node("Cast", ["d"], ["q"], to=T.FLOAT)], []),
    "optional": ([node("Optional", ["p"], ["o"]), node("OptionalGetElement", ["o"], ["q"])], []),
}


@BOTH
@pytest.mark.parametrize(
    ("opset", "kind"), [*((15, kind) for kind in BETWEEN), (11, "nothing"), (11, "mean"), (17, "nothing"), (17, "mean")]
)
def test_a_probability_under_a_logarithm_is_fp32(kind, opset, dtype):
    between, stored = BETWEEN[kind]
    source = logarithm(between, opset=opset, stored=stored)
    done = check(source, dtype)
    feeds = {"x": RNG.standard_normal((3, 64)).astype(np.float32) * 1.5}
    assert error(source, done.model, feeds) < NEAR[dtype]
    assert low_nodes(done) == {"product"}


@BOTH
@pytest.mark.parametrize("squash", ["Sigmoid", "HardSigmoid"])
def test_so_is_its_complement(squash, dtype):
    source = logarithm([node("Sub", ["c", "p"], ["d"]), node("Add", ["d", "e"], ["q"])], squash,
                       stored=[scalar("c", 1.0), scalar("e", 1e-6)])  # fmt: skip
    feeds = {"x": np.linspace(-3, 2.4, 3 * 64, dtype=np.float32).reshape(3, 64)}
    done = check(source, dtype)
    assert low_nodes(done) == {"product"}
    assert error(source, done.model, feeds) < NEAR[dtype]


def test_a_logarithm_of_no_probability_takes_no_more_casts():
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("MatMul", ["x", "v"], ["b"]),
             node("Add", ["a", "b"], ["c"], "sum"), node("Relu", ["c"], ["d"]), node("Log", ["d"], ["y"])]  # fmt: skip
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8), weight("v", 8, 8)])
    assert "sum" in low_nodes(check(source, "fp16"))


def test_a_rule_of_ones_own_is_obeyed():
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"op": "onnx.Softmax"}, "precision": "low"}]}
    source = logarithm(BETWEEN["nothing"][0])
    assert "squash" in low_nodes(convert_onnx(source, dtype="fp16", rules=rules))


# ---- sums of squares


def magnitude(ending, opset=13, parts=2, square="Mul", addition="Add"):
    """The magnitude of `parts` products, from the sum of their squares `p` on."""
    squares = [
        entry
        for part in range(parts)
        for entry in (
            node("MatMul", ["x", f"w{part}"], [f"a{part}"], f"product{part}"),
            node(square, [f"a{part}", f"a{part}" if square == "Mul" else "two"], [f"s{part}"], f"square{part}"),
        )
    ]
    sums = [node("Sum", [f"s{part}" for part in range(parts)], ["p"])]
    if addition == "Add":
        values = ["s0", *(f"t{part}" for part in range(1, parts - 1)), "p"]
        sums = [node("Add", [values[part - 1], f"s{part}"], [values[part]]) for part in range(1, parts)]
    data = [nh.from_array((RNG.standard_normal((16, 16)) / 4).astype(np.float32), f"w{part}") for part in range(parts)]
    data += [scalar("two", 2.0), scalar("e", 1e-8), scalar("one", 1.0)]
    data += [nh.from_array(RNG.random((16, 8)).astype(np.float32), "mel")]
    return model([*squares, *sums, *ending], [info("x", 4, 16)], [info("y", 4, "n")], data, opset=opset)


ENDINGS = {
    "root": "y = Sqrt(p)",
    "root of more": "q = Add(p, e) y = Sqrt(q)",
    "logarithm": "q = Add(p, e) y = Log(q)",
    "quotient": "q = Add(p, e) r = Sqrt(q) y = Div(a0, r)",
    "mel": "m = MatMul(p, mel) q = Add(m, e) y = Log(q)",
}


@BOTH
@pytest.mark.parametrize("size", [1e-4, 1.0, 3000.0])
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_magnitude_neither_underflows_nor_overflows(ending, size, dtype):
    source = magnitude(program(ENDINGS[ending]))
    feeds = {"x": (RNG.standard_normal((4, 16)) * size).astype(np.float32)}
    assert error(source, check(source, dtype).model, feeds) < NEAR[dtype]


@pytest.mark.parametrize("size", [1e-4, 3000.0])
@pytest.mark.parametrize(("parts", "addition", "square", "opset"), [
    (2, "Add", "Mul", 13), (3, "Sum", "Pow", 11), (3, "Add", "Mul", 17), (2, "Sum", "Mul", 11), (2, "Add", "Pow", 17),
])  # fmt: skip
def test_norms_over_two_and_three_additions(parts, addition, square, opset, size):
    source = magnitude(program(ENDINGS["root"]), opset, parts, square, addition)
    feeds = {"x": (RNG.standard_normal((4, 16)) * size).astype(np.float32)}
    assert error(source, check(source, "fp16").model, feeds) < NEAR["fp16"]


SUMS = {
    "weights": "m = Mul(s, k) p = ReduceSum(m) y = Sqrt(p)",
    "pool": "r = Reshape(s, rows) p = AveragePool<kernel_shape=[4], strides=[4]>(r) y = Sqrt(p)",
    "single": "p = Add(s, e) y = Sqrt(p)",
    "power": "p = Add(s, e) y = Pow(p, half)",
    "gemm": "p = Gemm<transB=1>(a, a) q = Abs(p) y = Sqrt(q)",
    "cosine": "t = Transpose(a) p = MatMul(a, t) n = ReduceL2(a) q = Mul(n, n) y = Div(p, q)",
    "loss": "p = ReduceMean<keepdims=1>(s) y = Mul(p, half)",
    "deviation": "p = ReduceSumSquare(a) q = Div(p, half) y = Sqrt(q)",
    "style": "t = Transpose(a) p = MatMul(a, t) q = Div(p, many) y = Mul(q, k4)",
    "ones": "p = MatMul(s, ones) y = Sqrt(p)",
    "einsum": 'p = Einsum<equation="bi,bi->b">(a, a) y = Sqrt(p)',
    "cosines": (
        'aa = Einsum<equation="bi,bi->b">(a, a) ax = Einsum<equation="bi,bi->b">(a, x) '
        'xx = Einsum<equation="bi,bi->b">(x, x) p = Mul(aa, xx) q = Sqrt(p) y = Div(ax, q)'
    ),
    "its logarithm": "y = ReduceLogSum(s)",
    "running": "p = CumSum(s, last) y = Sqrt(p)",
    "expanded power": "t = Expand(two, row) p = Pow(a, t) q = ReduceMean(p) y = Sqrt(q)",
    "rows": "r = Reshape(a, row) c = Reshape(a, column) p = MatMul(r, c) y = Sqrt(p)",
}


@pytest.mark.parametrize("size", [1e-4, 3000.0])
@pytest.mark.parametrize("kind", SUMS)
def test_squares_that_are_weighed_pooled_or_single(kind, size):
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Mul", ["a", "a"], ["s"]), *program(SUMS[kind]),
             node("Reshape", ["y", "flat"], ["z"])]  # fmt: skip
    data = [
        nh.from_array(np.eye(16, dtype=np.float32), "w"),
        scalar("e", 1e-6), scalar("half", 0.5), scalar("many", 2304.0), scalar("k4", 4.0), scalar("two", 2.0),
        scalar("last", -1, np.int64), *(nh.from_array(np.array(at), name) for name, at in
          (("rows", [4, 1, 16]), ("row", [4, 1, 16]), ("column", [4, 16, 1]), ("flat", [-1]))),
        nh.from_array(np.ones((16, 1), np.float32), "ones"),
    ]  # fmt: skip
    source = model(nodes, [info("x", 4, 16), info("k", 4, 16)], [info("z", "n")], data)
    feeds = {"x": (RNG.standard_normal((4, 16)) * size).astype(np.float32), "k": np.ones((4, 16), np.float32)}
    assert error(source, check(source, "fp16").model, feeds) < NEAR["fp16"]


def test_powers_of_a_matrix_and_what_a_quotient_leaves_are_low():
    nodes = [node("Einsum", ["x", "x"], ["a"], "power", equation="ij,jk->ik"), node("Sqrt", ["a"], ["y"]),
             node("Div", ["x", "e"], ["d"]), node("Transpose", ["d"], ["t"]), node("MatMul", ["d", "t"], ["g"], "gram"),
             node("Sub", ["one", "g"], ["z"])]  # fmt: skip
    outputs = [info("y", 8, 8), info("z", 8, 8)]
    source = model(nodes, [info("x", 8, 8)], outputs, [scalar("e", 8.0), scalar("one", 1.0)])
    assert {"power", "gram"} <= low_nodes(check(source, "fp16"))


def test_the_square_of_an_activation_is_low():
    """Squared ReLU: no root lies behind it but that of the next norm."""
    nodes = program("""a = MatMul(x, w) r = Relu(a) [square] s = Mul(r, r) b = MatMul(s, w) z = Add(b, x)
        q = Mul(z, z) m = ReduceMean(q) n = Sqrt(m) y = Div(z, n)""")
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    assert "square" in low_nodes(check(source, "fp16"))


# ---- bounds of a Clip


def clipped(opset, form, lower, use):
    """log(clip(relu(x w))), or a quotient by it."""
    clip = node("Clip", ["r"], ["c"], "clip", min=lower)
    before, stored = [], []
    if form != "attribute":
        clip = node("Clip", ["r", "low"], ["c"], "clip")
    if form == "initializer":
        stored = [scalar("low", lower)]
    elif form == "constant":
        before = [node("Constant", [], ["low"], value=scalar("", lower))]
    elif form == "filled":
        number = nh.from_array(np.array([lower], np.float32))
        before = [node("Constant", [], ["none"], value=nh.from_array(np.zeros(0, np.int64))),
                  node("ConstantOfShape", ["none"], ["low"], value=number)]  # fmt: skip
    end = {"log": [node("Log", ["c"], ["y"])], "div": [node("Div", ["r", "c"], ["y"], "quotient")]}[use]
    nodes = [*before, node("MatMul", ["x", "w"], ["h"]), node("Relu", ["h"], ["r"]), clip, *end]
    return model(nodes, [info("x", 4, 8)], [info("y", 4, 8)],
                 [nh.from_array(np.eye(8, dtype=np.float32), "w"), *stored], opset=opset)  # fmt: skip


FORMS = [
    *((opset, "attribute", dtype) for opset in (7, 9, 10) for dtype in DTYPES),
    *((opset, form, dtype) for opset in (11, 13, 20) for form in ("initializer", "constant") for dtype in DTYPES),
    *((opset, "filled", "fp16") for opset in (11, 13, 20)),
]


@pytest.mark.parametrize("use", ["log", "div"])
@pytest.mark.parametrize(("opset", "form", "dtype"), FORMS)
def test_a_bound_that_fp16_makes_zero_holds_in_fp32(opset, form, use, dtype):
    source = clipped(opset, form, 1e-12, use)
    done = check(source, dtype)
    assert error(source, done.model, {"x": RNG.standard_normal((4, 8)).astype(np.float32)}) < NEAR[dtype]
    if dtype == "fp16":
        assert not low_nodes(done) & {"clip", "quotient"}


@pytest.mark.parametrize("bounds", [{"min": 0.0, "max": 6.0}, {"min": 0.0}, {"min": -1.0}, {"min": 1e-5}])
def test_bounds_that_fit_are_low(bounds):
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Clip", ["h"], ["c"], "clip", **bounds),
             node("MatMul", ["c", "w"], ["y"])]  # fmt: skip
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)], opset=10)
    assert "clip" in low_nodes(check(source, "fp16"))


@pytest.mark.parametrize("form", ["initializer", "vector", "constant", "filled"])
@pytest.mark.parametrize("op", ["Mul", "Div", "PRelu"])
def test_a_scale_that_is_subnormal_in_fp16_keeps_its_digits(op, form):
    scale = nh.from_array(np.array([3e-7], np.float32), "c")
    result = {
        "constant": [node("Constant", [], ["c"], value=scale)],
        "filled": [node("Shape", ["x"], ["n"]), node("ConstantOfShape", ["n"], ["c"], value=scale)],
    }
    stored = {"initializer": [scale], "vector": [nh.from_array(np.linspace(1e-7, 9e-7, 16, dtype=np.float32), "c")]}
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), *result.get(form, []),
        *([node("Mul", ["h", "d"], ["g"])] * (op == "Div")),
        node(op, ["g" if op == "Div" else "h", "c"], ["y"], "scale"),
    ]  # fmt: skip
    data = [weight("w", 16, 16), *([scalar("d", 4e-5)] * (op == "Div")), *stored.get(form, [])]
    source = model(nodes, [info("x", 4, 16)], [info("y", 4, 16)], data)
    done = check(source, "fp16")
    assert error(source, done.model, {"x": RNG.standard_normal((4, 16)).astype(np.float32)}) < NEAR["fp16"]
    assert "scale" not in low_nodes(done)


@pytest.mark.parametrize(("op", "attrs"), [
    ("Gemm", {"alpha": 1e-7}), ("HardSigmoid", {"alpha": 1e-7, "beta": 0.0}), ("Selu", {"alpha": 1.0, "gamma": -1e-7}),
    ("Selu", {"alpha": 1e-9, "gamma": 1.0}), ("LeakyRelu", {"alpha": 1e-9}), ("Elu", {"alpha": 1e-9}),
])  # fmt: skip
def test_an_attribute_that_scales_to_subnormal_numbers(op, attrs):
    """Behind it a stored number scales back."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node(op, ["h", "w"] if op == "Gemm" else ["h"], ["a"], "op", **attrs),
             node("Mul", ["a", "k"], ["y"], "back")]  # fmt: skip
    source = model(
        nodes,
        [info("x", 4, 16)],
        [info("y", 4, 16)],
        [nh.from_array(np.eye(16, dtype=np.float32), "w"), scalar("k", 1e3)],
    )
    done = check(source, "fp16")
    drawn = np.abs(RNG.standard_normal((4, 16))).astype(np.float32)
    assert error(source, done.model, {"x": drawn if op == "HardSigmoid" else -drawn}) < NEAR["fp16"]
    assert not {"op", "back"} & low_nodes(done)


# ---- single tiny numbers beside others

STEEP = {
    "logarithm": "y = Log(h)",
    "magnitudes": "a = Abs(h) r = Reshape(a, flat) y = Log(r)",
    "reciprocal": "y = Reciprocal(h)",
    "reciprocal of a scaled number": "a = Mul(k, h) y = Reciprocal(a)",
    "quotient": "y = Div(one, h)",
    "root": "a = Sqrt(h) y = Div(one, a)",
    "power": "y = Pow(h, p)",
    "flat power": "y = Pow(h, tenth)",
    "quotient of itself": "y = Div(h, h)",
    "logarithm of a product": "a = Mul(h, x) y = Log(a)",
}
JUMPS = {  # at zero: FP16 makes no zero of 3e-6
    "sign": "y = Sign(h)",
    "comparison": "b = Greater(h, zero) y = Cast<to=1>(b)",
    "truth": "b = Cast<to=9>(h) y = Cast<to=1>(b)",
}


@pytest.mark.parametrize("least", [1e-9, 3e-6, 0.05])
@pytest.mark.parametrize("kind", STEEP | JUMPS)
def test_a_single_tiny_number_at_which_an_op_is_steep(kind, least):
    nodes = [node("MatMul", ["x", "w"], ["h"], "product"), *program((STEEP | JUMPS)[kind])]
    data = [nh.from_array(np.eye(16, dtype=np.float32), "w"), scalar("k", 16.0), scalar("one", 1.0), scalar("p", -0.5),
            scalar("tenth", 0.1), scalar("zero", 0.0), scalar("flat", [-1], np.int64)]  # fmt: skip
    source = model(nodes, [info("x", 8, 16)], [info("y", *[None] * (1 if "magnitudes" in kind else 2))], data)
    source.graph.node.reverse()  # they may stand in any order
    x = RNG.uniform(0.1, 2, (8, 16)).astype(np.float32)
    x[3, 5] = least
    done = check(source, "fp16", calibration=[{"x": x}])
    assert error(source, done.model, {"x": x}) < NEAR["fp16"]
    lost = least < (1e-8 if kind in JUMPS else 0.05)
    assert ("product" in low_nodes(done)) != lost
    assert any("subnormal or zero" in note for note in done.notes) == lost
