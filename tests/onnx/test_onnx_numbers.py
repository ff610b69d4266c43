"""Sizes, indices, angles, comparisons and running sums: numbers of an ONNX model that 16 bits would make others."""

import copy
import functools

import numpy as np
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_corpus.exported import export
from onnx_models import BOTH, RNG, casts, check, error, info, model, node, outputs, program, scalar, weight

from amp_compiler.ir.dtypes import low_type
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.export import export_onnx

OFF = {  # and what the costs would leave in FP32 anyway
    "version": 1,
    "extends": "default",
    "keep": {"sizes": False, "angles": False, "running_sums": False},
    "rules": [{"match": {"op": ["onnx.Add", "onnx.Mul", "onnx.Sin"]}, "precision": "low"}],
}


def kept(done):
    """By node, the reason why it stays as captured."""
    return {entry.name: entry.reason for entry in done.plan.nodes if "stays as captured" in entry.reason}


# ---- sizes and indices


class Buckets(torch.nn.Module):
    """T5's buckets of distances."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Embedding(32, 4)

    def forward(self, x, positions):
        distance = positions[:, None] - positions[None, :]
        far = (distance > 0).long() * 16
        distance = distance.abs()
        large = 8 + (torch.log(distance.float() / 8) / np.log(128 / 8) * 8).to(torch.long)
        bucket = far + torch.where(distance < 8, distance, large.clamp(max=15))
        return torch.matmul(x, x.transpose(0, 1)) + self.bias(bucket).sum(-1)


@functools.cache
def buckets():
    torch.manual_seed(0)
    module, inputs = Buckets(), (torch.randn(300, 8), torch.arange(300) * 3)
    return module, inputs, export(module, inputs, input_names=["x", "positions"]).model_proto


@BOTH
def test_buckets_of_distances(dtype):
    module, (x, positions), source = buckets()
    feeds = {"x": x.numpy(), "positions": positions.numpy()}
    done = convert_onnx(source, dtype=dtype)
    want = module(x, positions).detach().numpy()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16 if dtype == "bf16" else torch.float16):
        bound = np.linalg.norm(module(x, positions).float().numpy() - want)
    assert np.linalg.norm(outputs(done.model, feeds)[0] - want) <= 2 * bound


@BOTH
def test_what_is_sent_into_a_comparison_or_a_rounding(dtype):
    """Of the model's inputs they see every bit; products before them are low all the same."""
    nodes = [
        node("Mul", ["x", "c"], ["a"], "scale"),
        node("Greater", ["a", "half"], ["b"], "threshold"),
        node("Round", ["a"], ["r"], "round"),
        node("Where", ["b", "r", "zero"], ["s"], "where"),
        node("MatMul", ["s", "w"], ["m"], "product"),
        node("Mul", ["m", "c"], ["t"], "after"),
        node("Greater", ["t", "half"], ["g"], "gate"),
        node("Cast", ["g"], ["f"], to=T.FLOAT),
        node("Mul", ["t", "f"], ["y"], "gated"),
    ]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)],
                   [weight("w", 8, 8), scalar("c", 100.3), scalar("half", 0.5), scalar("zero", 0.0)])  # fmt: skip
    done = check(source, dtype)
    result = {entry.name: entry.precision for entry in done.plan.nodes}
    assert "'threshold' (onnx.Greater) compares or rounds" in kept(done)["scale"]
    assert [result[name] for name in ("scale", "threshold", "round")] == ["keep", "fp32", "keep"]
    assert [result[name] for name in ("product", "after", "gate", "gated")] == ["low"] * 4


@BOTH
@pytest.mark.parametrize(("op", "number"), [("Equal", 50256.0), ("Greater", 0.5), ("Less", 1e-9)])
def test_a_comparison_of_inputs_needs_no_cast(dtype, op, number):
    source = model([node(op, ["x", "c"], ["y"])], [info("x", 4)], [info("y", 4, kind=T.BOOL)], [scalar("c", number)])
    feeds = {"x": np.array([number, np.nextafter(np.float32(number), 0, dtype=np.float32), 50257.0, 0], np.float32)}
    for rules in ("default", OFF):
        done = check(source, dtype, rules)
        assert not casts(done.model)
        assert np.array_equal(outputs(done.model, feeds)[0], outputs(source, feeds)[0])


@BOTH
def test_a_sign_is_a_comparison_with_zero(dtype):
    source = model([node("Sub", ["x", "one"], ["d"], "difference"), node("Sign", ["d"], ["y"], "sign")],
                   [info("x", 4)], [info("y", 4)], [scalar("one", 1.0)])  # fmt: skip
    feeds = {"x": np.array([1.0001, 0.9999, 1, 2], np.float32)}
    done = check(source, dtype)
    assert "'sign' (onnx.Sign) compares or rounds" in kept(done)["difference"]
    assert np.array_equal(outputs(done.model, feeds)[0], [1, -1, 0, 1])


COUNTS = {
    "sizes": "count = Size(p) wide = Cast<to=1>(count)",
    "truths": "same = Equal(p, p) ones = Cast<to=1>(same) wide = ReduceSum<keepdims=0>(ones)",
}


@pytest.mark.parametrize("rows", ["n", 8750])
@pytest.mark.parametrize("kind", COUNTS)
def test_a_number_of_elements_may_be_beyond_fp16(kind, rows):
    """A mean as a sum over `Size`: 70,000 is infinite in FP16, and what is divided by it zero."""
    nodes = [node("MatMul", ["x", "w"], ["p"], "product"), node("ReduceMax", ["p"], ["m"], keepdims=0),
             *program(COUNTS[kind]), node("Div", ["m", "wide"], ["y"], "quotient")]  # fmt: skip
    source = model(nodes, [info("x", rows, 8)], [info("y")], [weight("w", 8, 8)])
    feeds = {"x": RNG.standard_normal((8750, 8)).astype(np.float32)}
    done = check(source, "fp16")
    result = {entry.name: entry for entry in done.plan.nodes}
    assert result["product"].precision == "low" and result["quotient"].precision == "fp32"
    assert "whole numbers that may be beyond fp16" in result["quotient"].reason
    assert error(source, done.model, feeds) < 2e-3


@pytest.mark.parametrize("by", ["count", "number"])
def test_a_mean_of_many_as_a_sum_and_a_count(by):
    """Both are beyond FP16, and stay FP32 until one is divided by the other."""
    by_number = [node("Mul", ["total", "share"], ["y"], "mean")]
    by_count = program("n = ReduceSum<keepdims=0>(m) c = Clip(n, few) d = Unsqueeze(c, zero) [mean] y = Div(total, d)")
    nodes = [
        node("Cast", ["mask"], ["m"], to=T.FLOAT), node("Unsqueeze", ["m", "one"], ["u"]),
        node("MatMul", ["x", "w"], ["p"], "product"), node("Mul", ["p", "u"], ["q"]),
        node("ReduceSum", ["q", "zero"], ["total"], "total", keepdims=0),
        *(by_count if by == "count" else by_number),
    ]  # fmt: skip
    source = model(
        nodes, [info("x", "n", 8), info("mask", "n", kind=T.BOOL)], [info("y", 8)],
        [weight("w", 8, 8), scalar("one", [1], np.int64), scalar("zero", [0], np.int64), scalar("few", 1.0),
         scalar("share", 2.0**-16)],
    )  # fmt: skip
    feeds = {"x": 1 + np.abs(RNG.standard_normal((90_000, 8))).astype(np.float32), "mask": np.ones(90_000, np.bool_)}
    done = check(source, "fp16")
    result = {entry.name: entry for entry in done.plan.nodes}
    assert result["product"].precision == "low" and result["mean"].precision == "fp32"
    assert error(source, done.model, feeds) < 2e-3


@BOTH
def test_the_part_behind_the_point(dtype):
    """A place between two cells of a table: what is left of 3,000.7 is lost in 16 bits."""
    nodes = [
        node("Floor", ["places"], ["f"], "floor"), node("Cast", ["f"], ["i"], to=T.INT64),
        node("Sub", ["places", "f"], ["part"], "part"), node("Cast", ["i"], ["g"], to=T.FLOAT),
        node("Sub", ["places", "g"], ["again"], "again"), node("Add", ["part", "again"], ["y"], "sum"),
    ]  # fmt: skip
    source = model(nodes, [info("places", 100)], [info("y", 100)], [])
    done = check(source, dtype)
    assert [kept(done)[name] for name in ("part", "again")] == [
        "it is a difference to a whole number, so it stays as captured"
    ] * 2
    feeds = {"places": (3000 + 10 * RNG.random(100)).astype(np.float32)}
    assert error(source, done.model, feeds) < 4 * low_type(dtype).format.eps


@BOTH
def test_whole_numbers_made_of_data_are_made_of_what_is_there(dtype):
    """Behind an exponential in FP32 nothing is rounded on the way to whole numbers; behind a layer it is low.

    A product of what is given counts, as a sum over a mask does.
    """

    def source(*first):
        nodes = [
            *first,
            node("Mul", ["d", "scale"], ["a"], "scale"),
            node("Cast", ["a"], ["i"], to=T.INT32),
            node("Cast", ["i"], ["f"], to=T.FLOAT),
            node("MatMul", ["f", "w"], ["y"]),
        ]
        data = [weight("w", 8, 8), scalar("scale", 127.0)]
        return model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], data)

    wide = check(source(node("Exp", ["x"], ["d"])), dtype)
    layer = check(source(node("Softmax", ["x"], ["s"]), node("MatMul", ["s", "w"], ["d"])), dtype)
    product = check(source(node("MatMul", ["x", "w"], ["d"], "count")), dtype)
    result = [next(entry for entry in done.plan.nodes if entry.name == "scale") for done in (wide, layer, product)]
    assert [entry.precision for entry in result] == ["keep", "low", "fp32"]
    assert next(entry for entry in product.plan.nodes if entry.name == "count").precision == "keep"
    assert all("makes whole numbers" in entry.reason for entry in result)


@BOTH
def test_coordinates(dtype):
    """A grid is read with every bit."""
    nodes = program("[normalise] g = Mul(p, c) [conv] a = Conv<pads=[1, 1, 1, 1]>(x, w) [sample] y = GridSample(a, g)")
    source = model(nodes, [info("x", 1, 2, 500, 600), info("p", 1, 40, 40, 2)], [info("y", 1, 2, 40, 40)],
                   [weight("w", 2, 2, 3, 3), scalar("c", 1 / 3.0)], opset=22)  # fmt: skip
    done = check(source, dtype)
    result = {entry.name: entry.precision for entry in done.plan.nodes}
    assert result["normalise"] == "keep" and result["sample"] == "fp32"


@BOTH
def test_a_written_out_softmax_of_large_numbers(dtype):
    nodes = program("""m = ReduceMax<axes=[-1]>(x) [difference] d = Sub(x, m) e = Exp(d) s = ReduceSum(e, last)
        y = Div(e, s)""")
    source = model(nodes, [info("x", 2, 4)], [info("y", 2, 4)], [scalar("last", [-1], np.int64)], opset=13)
    feeds = {"x": np.array([[0, 1, 2, 3], [10000, 10001, 10002, 10003]], np.float32)}
    assert error(source, check(source, dtype).model, feeds) < (4e-3 if dtype == "bf16" else 5e-4)


# ---- angles


class Rotary(torch.nn.Module):
    """Attention with rotary positions, their angles made by a product of matrices."""

    def __init__(self, width=16, product=torch.matmul):
        super().__init__()
        self.query, self.key = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.product = product
        for layer in (self.query, self.key):
            torch.nn.init.normal_(layer.weight, std=0.5)

    def forward(self, x, positions):
        angles = self.product(positions[:, None].float(), self.frequencies[None])
        cos, sin = (torch.cat([wave, wave], -1) for wave in (angles.cos(), angles.sin()))

        def turned(z):
            first, second = z.chunk(2, -1)
            return z * cos + torch.cat([-second, first], -1) * sin

        return turned(self.query(x)) @ turned(self.key(x)).transpose(0, 1)


class Sinusoidal(torch.nn.Module):
    """The time embedding of a diffusion model."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(32, 8)

    def forward(self, times):
        half = torch.arange(16, dtype=torch.float32)
        angles = times[:, None].float() * torch.exp(-np.log(10000.0) * half / 16)[None]
        return self.out(torch.cat([angles.sin(), angles.cos()], -1))


def einsum(a, b):
    return torch.einsum("ni,ij->nij", a, b)[:, 0]


ANGLES = {
    "product": lambda: (Rotary(), (torch.randn(200, 16), torch.arange(1800, 2000))),
    "einsum": lambda: (Rotary(product=einsum), (torch.randn(200, 16), torch.arange(1800, 2000))),
    "steps": lambda: (Sinusoidal(), (torch.arange(0, 1000, 7),)),
    "times": lambda: (Sinusoidal(), (torch.rand(100) * 1000,)),
}


@functools.cache
def turned(case):
    torch.manual_seed(0)
    module, inputs = ANGLES[case]()
    return module, inputs, export(module, inputs, input_names=["x", "positions"][-len(inputs) :]).model_proto


@pytest.mark.sweep(6)
@BOTH
@pytest.mark.parametrize("case", ANGLES)
@pytest.mark.parametrize("rules", ["default", "fast"])
def test_angles(dtype, case, rules):
    """Within twice the error of torch.autocast with exact angles."""
    module, inputs, source = turned(case)
    names = [value.name for value in source.graph.input]
    feeds = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    want = module(*inputs).detach().numpy()
    exact = copy.deepcopy(module)
    exact.product = torch.mul  # which autocast leaves in FP32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16 if dtype == "bf16" else torch.float16):
        bound = np.linalg.norm(exact(*inputs).float().numpy() - want)
    result = convert_onnx(source, dtype=dtype, rules=rules).model
    assert np.linalg.norm(outputs(result, feeds)[0] - want) <= 2 * bound
    off_keep = {**OFF["keep"], "powers": False}  # which keeps whole numbers beyond FP16
    off = convert_onnx(source, dtype=dtype, rules={**OFF, "extends": rules, "keep": off_keep}).model
    assert np.linalg.norm(outputs(off, feeds)[0] - want) > 4 * bound


@pytest.mark.parametrize("case", ["product", "times"])
def test_angles_of_an_exported_torch_model(case):
    torch.manual_seed(0)
    module, inputs = ANGLES[case]()
    want = module(*inputs).detach().numpy()
    result = export_onnx(module.eval(), inputs, dtype="bf16").model
    feeds = {value.name: tensor.numpy() for value, tensor in zip(result.graph.input, inputs, strict=True)}
    assert np.linalg.norm(outputs(result, feeds)[0] - want) < 2e-2 * np.linalg.norm(want)


@BOTH
def test_the_angles_end_at_the_sine(dtype):
    """What follows is as the rules say; so are a sine of data, and in BF16 positions that reach no curve."""
    nodes = [
        node("Cast", ["p"], ["f"], to=T.FLOAT),
        node("Mul", ["f", "c"], ["a"], "angle"),
        node("Sin", ["a"], ["s"], "sine"),
        node("Mul", ["s", "c"], ["t"], "after"),
        node("MatMul", ["t", "w"], ["m"], "product"),
        node("Sin", ["m"], ["n"], "data"),
        node("Mul", ["f", "c"], ["b"], "bias"),
        node("Add", ["n", "b"], ["y"], "add"),
    ]
    source = model(nodes, [info("p", 4, 8, kind=T.INT64)], [info("y", 4, 8)], [weight("w", 8, 8), scalar("c", 0.1)])
    done = check(source, dtype)
    assert kept(done).keys() == {"angle", "sine"}
    result = {entry.name: entry.precision for entry in done.plan.nodes}
    assert [result[name] for name in ("after", "product", "data")] == ["low"] * 3
    assert result["bias"] == "fp32"


@BOTH
def test_positions_added_to_negated_ones(dtype):
    nodes = [
        node("Cast", ["positions"], ["p"], to=T.FLOAT), node("Neg", ["p"], ["n"], "negated"),
        node("Unsqueeze", ["p", "first"], ["row"]), node("Unsqueeze", ["n", "second"], ["column"]),
        node("Add", ["row", "column"], ["d"], "distance"), node("MatMul", ["d", "w"], ["y"]),
    ]  # fmt: skip
    ends = [scalar("first", [0], np.int64), scalar("second", [1], np.int64)]
    source = model(nodes, [info("positions", 64, kind=T.INT64)], [info("y", 64, 8)], [*ends, weight("w", 64, 8)])
    done = check(source, dtype)
    assert kept(done)["distance"] == "it is a sum or difference of positions, so it stays as captured"
    feeds = {"positions": 4000 + np.arange(64)}
    assert error(source, done.model, feeds) < 4 * low_type(dtype).format.eps


@BOTH
def test_a_difference_of_positions(dtype):
    """ALiBi: distances of neighbours, whose positions are one number in BF16, are added to the scores."""
    nodes = [
        node("Cast", ["positions"], ["p"], to=T.FLOAT),
        node("Unsqueeze", ["p", "first"], ["row"]), node("Unsqueeze", ["p", "second"], ["column"]),
        node("Sub", ["row", "column"], ["d"], "distance"), node("Abs", ["d"], ["size"]),
        node("Mul", ["size", "slope"], ["bias"], "bias"), node("MatMul", ["q", "k"], ["scores"], "scores"),
        node("Add", ["scores", "bias"], ["s"], "sum"), node("Softmax", ["s"], ["y"]),
    ]  # fmt: skip
    source = model(
        nodes, [info("positions", "n", kind=T.INT64), info("q", "n", 8)], [info("y", "n", "n")],
        [weight("k", 8, 600), scalar("slope", -0.25), scalar("first", [0], np.int64), scalar("second", [1], np.int64)],
    )  # fmt: skip
    feeds = {"positions": np.arange(600), "q": RNG.standard_normal((600, 8)).astype(np.float32)}
    done = check(source, dtype)
    assert kept(done)["distance"] == "it is a difference of positions, so it stays as captured"
    result = {entry.name: entry.precision for entry in done.plan.nodes}
    assert [result[name] for name in ("scores", "sum")] == ["low"] * 2
    assert result["bias"] == ("low" if dtype == "bf16" else "fp32")  # FP16 may not hold a distance
    q, k, p = (
        torch.from_numpy(one) for one in (feeds["q"], nh.to_array(source.graph.initializer[0]), feeds["positions"])
    )
    bias = -0.25 * (p[None].float() - p[:, None].float()).abs()
    want = torch.softmax(q @ k + bias, -1)
    with torch.autocast("cpu", torch.bfloat16 if dtype == "bf16" else torch.float16):
        bound = torch.linalg.norm(torch.softmax(q @ k + bias, -1).float() - want)
    assert np.linalg.norm(outputs(done.model, feeds)[0] - want.numpy()) <= 4 * bound
    assert error(source, convert_onnx(source, dtype=dtype, rules=OFF).model, feeds) > (0.05 if dtype == "bf16" else 0)


@BOTH
def test_the_phase_of_predicted_frequencies(dtype):
    """As the source of a vocoder computes it: the running sum of what a layer made is an angle."""
    nodes = program("""[product] m = MatMul(x, w) [step] p = Sigmoid(m) [sum] c = CumSum(p, axis)
        [angle] a = Mul(c, turn) [sine] y = Sin(a)""")
    data = [weight("w", 8, 1, scale=0.1), scalar("axis", 0, np.int64), scalar("turn", 6.2831853)]
    source = model(nodes, [info("x", "n", 8)], [info("y", "n", 1)], data)
    feeds = {"x": np.zeros((3001, 8), np.float32)}  # a step of 1/2, which 16 bits hold
    done = check(source, dtype)
    result = {entry.name: entry.precision for entry in done.plan.nodes}
    assert [result[name] for name in ("product", "sum", "angle", "sine")] == ["low", "fp32", "fp32", "fp32"]
    assert np.abs(outputs(source, feeds)[0] - outputs(done.model, feeds)[0]).max() < 1e-6  # of an angle of 9,000
    assert np.abs(outputs(convert_onnx(source, dtype=dtype, rules=OFF).model, feeds)[0]).max() > 0.5


@BOTH
def test_offsets_of_stored_places(dtype):
    """A picture that is moved by what a layer predicts: the places are not rounded with the weights."""
    nodes = program("""[product] m = MatMul(x, w) t = Tanh(m) o = MatMul(t, v) [place] g = Add(o, base)
        [sample] y = GridSample(picture, g)""")
    across, down = np.meshgrid(np.linspace(-1, 1, 83), np.linspace(-1, 1, 61))
    base = np.stack([across, down], -1)[None].astype(np.float32)
    data = [weight("w", 8, 8), weight("v", 8, 2, scale=1e-4), nh.from_array(base, "base")]
    source = model(
        nodes, [info("x", 1, 61, 83, 8), info("picture", 1, 2, 61, 83)], [info("y", 1, 2, 61, 83)], data, opset=20
    )  # fmt: skip
    feeds = {
        "x": RNG.standard_normal((1, 61, 83, 8)).astype(np.float32),
        "picture": RNG.standard_normal((1, 2, 61, 83)).astype(np.float32),
    }
    done = check(source, dtype)
    result = {entry.name: entry for entry in done.plan.nodes}
    assert result["product"].precision == "low" and "stays as captured" in result["place"].reason
    bound = 1e-3 if dtype == "bf16" else 2e-4
    assert error(source, done.model, feeds) < bound
    assert error(source, convert_onnx(source, dtype=dtype, rules=OFF).model, feeds) > 10 * bound


# ---- running sums


def summed(kind, inner):
    """A sum of `t` slices of x·w, carried by a Loop or a Scan; `inner` makes (new state, nodes) of state and slice."""
    nodes = inner("s", "e")
    if kind == "Scan":
        body = h.make_graph(nodes, "body", [info("s", 8), info("e", 8)], [info("n", 8)])
        holder = h.make_node("Scan", ["start", "steps"], ["y"], "sum", body=body, num_scan_inputs=1)
    else:
        nodes = [
            node("Gather", ["steps", "i"], ["e"], axis=0), node("Identity", ["cond"], ["more"]), *nodes,
        ]  # fmt: skip
        body = h.make_graph(
            nodes, "body", [info("i", kind=T.INT64), info("cond", kind=T.BOOL), info("s", 8)],
            [info("more", kind=T.BOOL), info("n", 8)],
        )  # fmt: skip
        holder = h.make_node("Loop", ["count", "", "start"], ["y"], "sum", body=body)
    nodes = [node("MatMul", ["x", "w"], ["steps"], "product"), holder]
    data = [weight("w", 8, 8, scale=0.1), nh.from_array(np.zeros(8, np.float32), "start"), scalar("decay", 0.999),
            scalar("count", 4000, np.int64), scalar("one", 1.0), scalar("yes", True, np.bool_)]  # fmt: skip
    return model(nodes, [info("x", 4000, 8)], [info("y", 8)], data)


def plainly(state, step):
    return [node("Add", [state, step], ["n"], "add")]


def averaged(state, step):
    return [node("Mul", [state, "decay"], ["d"], "decay"), node("Add", ["d", step], ["n"], "add")]


def moved(state, step):
    return [
        node("Identity", [state], ["a"]), node("Add", ["a", step], ["b"], "add"),
        node("Where", ["yes", "b", "a"], ["n"], "where"),
    ]  # fmt: skip


def in_branch(state, step):
    then = h.make_graph([node("Add", [state, step], ["t"], "add")], "then", [], [info("t", 8)])
    other = h.make_graph([node("Identity", [state], ["o"])], "else", [], [info("o", 8)])
    return [h.make_node("If", ["yes"], ["n"], then_branch=then, else_branch=other)]


@BOTH
@pytest.mark.parametrize(
    ("inner", "kind"), [(plainly, "Loop"), (plainly, "Scan"), (averaged, "Scan"), (moved, "Loop"), (in_branch, "Scan")]
)
def test_a_running_sum(dtype, kind, inner):
    RNG.bit_generator.state = np.random.default_rng(0).bit_generator.state  # the same numbers whatever ran before
    source = summed(kind, inner)
    feeds = {"x": np.abs(RNG.standard_normal((4000, 8))).astype(np.float32)}
    with np.errstate(over="ignore"):
        done = check(source, dtype)
    added = next(entry for entry in done.plan.nodes if entry.name == "add")
    assert added.precision == "fp32" and "running sum 's' that 'sum'" in added.reason
    assert next(entry for entry in done.plan.nodes if entry.name == "product").precision == "low"
    steps = feeds["x"] @ nh.to_array(source.graph.initializer[0])
    assert (
        error(source, done.model, feeds)
        < (4e-3 if dtype == "bf16" else 5e-4) * np.abs(steps).sum() / np.abs(steps.sum(0)).sum()
    )
    if dtype == "bf16":
        assert error(source, convert_onnx(source, dtype=dtype, rules=OFF).model, feeds) > 0.2


@BOTH
@pytest.mark.parametrize("op", ["Mul", "Div"])
def test_a_running_product(dtype, op):
    """A decay of 0.9999 is 1 in 16 bits, and a rounding at each of 4,000 steps is more than one at the end."""

    def decayed(state, step):
        return [node(op, [state, "decay"], ["n"], "decay")]

    source = summed("Loop", decayed)
    for index, stored in enumerate(source.graph.initializer):
        if stored.name in ("decay", "start"):
            number = np.float32(0.9999) if stored.name == "decay" else np.ones(8, np.float32)
            source.graph.initializer[index].CopyFrom(nh.from_array(number, stored.name))
    done = check(source, dtype)
    decay = next(entry for entry in done.plan.nodes if entry.name == "decay")
    assert decay.precision == "fp32" and "running product 's' that 'sum'" in decay.reason
    feeds = {"x": np.zeros((4000, 8), np.float32)}
    assert error(source, done.model, feeds) < 1e-6  # nothing that is low has a part in it


@BOTH
def test_a_running_sum_of_exponentials(dtype):
    def in_logarithms(state, step):
        return [
            node("Exp", [state], ["a"], "exp"), node("Abs", [step], ["b"], "size"),
            node("Add", ["a", "b"], ["c"], "add"), node("Log", ["c"], ["n"], "log"),
        ]  # fmt: skip

    source = summed("Scan", in_logarithms)
    done = check(source, dtype)
    result = {entry.name: entry.precision for entry in done.plan.nodes}
    assert [result[name] for name in ("product", "exp", "add", "log")] == ["low", "fp32", "fp32", "fp32"]
    feeds = {"x": np.ones((4000, 8), np.float32)}
    assert error(source, done.model, feeds) < (1e-3 if dtype == "bf16" else 1e-4)
    if dtype == "bf16":
        assert error(source, convert_onnx(source, dtype=dtype, rules=OFF).model, feeds) > 0.01


@BOTH
def test_a_sum_that_two_states_carry_in_turn(dtype):
    nodes = [node("Add", ["b", "e"], ["n"], "add"), node("Identity", ["a"], ["m"], "pass")]
    body = h.make_graph(nodes, "body", [info("a", 8), info("b", 8), info("e", 8)], [info("n", 8), info("m", 8)])
    source = model(
        [h.make_node("Scan", ["start", "start", "x"], ["y", "z"], "sum", body=body, num_scan_inputs=1)],
        [info("x", 3000, 8)], [info("y", 8), info("z", 8)], [nh.from_array(np.zeros(8, np.float32), "start")],
    )  # fmt: skip
    done = check(source, dtype)
    added = next(entry for entry in done.plan.nodes if entry.name == "add")
    assert added.precision == "fp32" and "running sum" in added.reason
    feeds = {"x": RNG.uniform(0, 1, (3000, 8)).astype(np.float32)}
    assert error(source, done.model, feeds) == 0
    assert error(source, convert_onnx(source, dtype=dtype, rules=OFF).model, feeds) > 1e-3


@BOTH
def test_a_recurrent_state_is_no_sum(dtype):
    def cell(state, step):
        return [
            node("MatMul", [state, "w"], ["a"]), node("Add", ["a", step], ["b"], "add"), node("Tanh", ["b"], ["n"]),
        ]  # fmt: skip

    done = check(summed("Scan", cell), dtype)
    assert "add" not in kept(done)


@BOTH
@pytest.mark.parametrize("width", [1, 3, 64])
def test_fourier_features_of_inputs(width, dtype):
    """Sines of a product of inputs with frequencies, however many are summed; a layer of sines is a layer."""
    frequencies = (np.random.default_rng(0).standard_normal((width, 64)) * 60 / np.sqrt(width)).astype(np.float32)
    nodes = program("""[phases] p = MatMul(x, f) [shift] a = Add(p, shift) [sine] s = Sin(a)
        [layer] b = MatMul(s, w) [next] t = Sin(b) [last] y = MatMul(t, w)""")
    source = model(nodes, [info("x", 8, width)], [info("y", 8, 64)],
                   [nh.from_array(frequencies, "f"), weight("w", 64, 64), scalar("shift", 0.5)])  # fmt: skip
    done = check(source, dtype)
    assert {"phases", "shift", "sine"} <= {entry.name for entry in done.plan.nodes if entry.precision != "low"}
    assert {"layer", "last"} <= {entry.name for entry in done.plan.nodes if entry.precision == "low"}
    feeds = {"x": RNG.random((8, width)).astype(np.float32)}
    assert error(source, done.model, feeds) < {"fp16": 4e-3, "bf16": 3e-2}[dtype]
