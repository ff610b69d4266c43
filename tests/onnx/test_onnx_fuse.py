"""`fuse=True`: norms and GELUs in parts become one op each where that computes the same, and stay as they are else."""

import numpy as np
import pytest
import torch
from compound_models import ERF_FORMS, RNG, TANH_FORMS, gelu, norm
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper as h
from onnx.reference import ReferenceEvaluator
from onnx_models import DTYPES, check, info, model, node, run, scalar, weight

import amp_compiler as amp
from amp_compiler.errors import AmpError
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.lowering.fuse import fuse
from amp_compiler.onnx.model.model import open_model, read_model
from amp_compiler.onnx.model.save import to_proto

ROOTS = ("sqrt_div", "reciprocal", "one_over", "pow_half", "pow_minus_half")


def fused(source):
    """The FP32 model with what is fused in it, and the fusion."""
    read = read_model(open_model(source))
    done = fuse(read)
    return to_proto(read), done


def ops(built):
    return [entry.op_type for entry in built.graph.node]


def drawn(source, spread=1.0):
    (taken,) = source.graph.input
    shape = [dim.dim_value for dim in taken.type.tensor_type.shape.dim]
    kind = h.tensor_dtype_to_np_dtype(taken.type.tensor_type.elem_type)
    return {taken.name: (RNG.standard_normal(shape) * spread).astype(kind)}


def same(source, built, tolerance=2e-6, spread=1.0):
    """Same names, and the same numbers within FP32 rounding, in ONNX's own reference as in ONNX Runtime."""
    assert [one.name for one in built.graph.output] == [one.name for one in source.graph.output]
    feeds = drawn(source, spread)
    want = run(source, feeds)
    for got in (run(built, feeds), ReferenceEvaluator(built).run(None, feeds)):
        for left, right in zip(want, got, strict=True):
            assert left.dtype == right.dtype and left.shape == right.shape
            assert np.linalg.norm(left - right) <= tolerance * np.linalg.norm(left) + 1e-30


@pytest.mark.parametrize("form", [*TANH_FORMS, *ERF_FORMS])
def test_gelus(form):
    source = gelu(form, opset=20)
    result, _ = fused(source)
    assert ops(result) == ["MatMul", "Gelu", "MatMul"]
    (entry,) = [one for one in result.graph.node if one.op_type == "Gelu"]
    assert h.get_attribute_value(entry.attribute[0]) == (b"tanh" if form in TANH_FORMS else b"none")
    same(source, result, spread=3)


@pytest.mark.parametrize("root", ["sqrt_div", "reciprocal"])
def test_casts_within(root):
    """As Llama and T5 are exported in 16 bits: up before the square, down before the product with the weights."""
    source = norm(casts=True, root=root, opset=23)
    result, _ = fused(source)
    assert ops(result) == ["MatMul", "RMSNormalization", "MatMul"]
    feeds = drawn(source)
    want, got = ReferenceEvaluator(source).run(None, feeds)[0], ReferenceEvaluator(result).run(None, feeds)[0]
    assert want.dtype == got.dtype == np.float16
    assert np.abs(want.astype(np.float32) - got).max() <= 2.0**-9 * np.abs(want).max()


def test_a_cast_before_wide_weights_stays():
    """FP32 weights on FP32 data: the cast up is no part of the norm, which has one type."""
    built = norm(centred=True, casts=True, opset=17)
    for entry in list(built.graph.node):
        if entry.op_type == "Cast" and entry.attribute[0].i == T.FLOAT16:
            down = entry
    after = next(entry for entry in built.graph.node if entry.op_type == "Mul")
    after.input[list(after.input).index(down.output[0])] = down.input[0]
    built.graph.node.remove(down)
    scale = next(one for one in built.graph.initializer if one.name == "scale")
    scale.CopyFrom(scalar("scale", np.ones(8, np.float32)))
    result = after.output[0]
    last = next(entry for entry in built.graph.node if entry.name == "product_out")
    last.input[0] = "narrow"
    built.graph.node.insert(len(built.graph.node) - 1, node("Cast", [result], ["narrow"], "down", to=T.FLOAT16))
    got, _ = fused(built)
    assert ops(got) == ["MatMul", "Cast", "LayerNormalization", "Cast", "MatMul"]


def test_stored_numbers_behind_casts_and_other_shapes():
    """As `torch.onnx.export(optimize=False)` writes them; what nothing reads any more goes."""
    source = norm(opset=23)
    for index, name in enumerate(("exponent", "epsilon")):
        source.graph.node.insert(0, node("Cast", [name], [f"{name}_cast"], f"cast_{index}", to=T.FLOAT))
    axes = next(one.name for one in source.graph.initializer if one.name.startswith("axes"))
    source.graph.initializer.append(scalar("row", [-1], np.int64))
    source.graph.node.insert(0, node("Reshape", [axes, "row"], ["axes_row"], "reshaped"))
    source.graph.node.insert(0, node("Identity", ["scale"], ["scale_copy"], "copied"))
    renamed = {"exponent": "exponent_cast", "epsilon": "epsilon_cast", axes: "axes_row", "scale": "scale_copy"}
    for entry in source.graph.node:
        if entry.op_type in ("Pow", "Add", "ReduceMean", "Mul"):
            for index, name in enumerate(entry.input):
                entry.input[index] = renamed.get(name, name)
    result, _ = fused(source)
    assert ops(result) == ["Identity", "MatMul", "RMSNormalization", "MatMul"]
    assert {one.name for one in result.graph.initializer} == {"w_in", "w_out", "scale"}
    same(source, result)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    count=st.integers(1, 3),
    negative=st.booleans(),
    epsilon=st.sampled_from([None, 0.0, 1e-12, 1e-6, 1e-5, 1e-3, 0.1]),
    centred=st.booleans(),
    bias=st.booleans(),
    square=st.sampled_from(["pow", "mul"]),
    root=st.sampled_from(ROOTS),
    scale=st.sampled_from(["before", "behind"]),
    stored=st.sampled_from(["whole", "leading", "one", "last"]),
    opset=st.sampled_from([17, 18, 23]),
)
def test_any_sizes_axes_and_epsilons(
    sizes, count, negative, epsilon, centred, bias, square, root, scale, stored, opset
):
    count = min(count, len(sizes))
    sizes[-1] += 1  # a variance of one number is none
    opset = opset if centred else 23  # the first that has an RMSNorm
    axes = tuple(range(-count, 0)) if negative else tuple(range(len(sizes) - count, len(sizes)))
    own = tuple(sizes[len(sizes) - count :])
    shape = {"whole": own, "leading": (1,) * (len(sizes) - count) + own, "one": (1,), "last": own[-1:]}[stored]
    options = {"axes": axes, "epsilon": epsilon, "centred": centred, "bias": bias and centred, "square": square}
    source = norm(**options, root=root, scale=scale, shape=tuple(sizes), scale_shape=shape, opset=opset)
    result, done = fused(source)
    assert done.fused == {"LayerNormalization" if centred else "RMSNormalization": 1}
    same(source, result, tolerance=5e-5 if epsilon in (None, 0.0, 1e-12) else 1e-5)


NOT = {
    "epsilon for each row": (lambda: norm(epsilon=np.linspace(1e-5, 1, 5)[:, None], opset=23), "epsilon"),
    "epsilon below zero": (lambda: norm(epsilon=-1e-9, opset=23), "epsilon"),
    "epsilon of a higher rank": (lambda: norm(epsilon=np.full((1, 1, 1, 1), 1e-5), opset=23), "epsilon"),
    "another axis": (lambda: norm(axes=(1,), scale_shape=(1,), opset=23), "last dimensions"),
    "a gap between axes": (lambda: norm(axes=(0, 2), scale_shape=(8,), opset=23), "last dimensions"),
    "scale along another axis": (lambda: norm(scale_shape=(5, 1), opset=23), "other dimensions"),
    "scale of a higher rank": (lambda: norm(scale_shape=(1, 1, 1, 8), opset=23), "other dimensions"),
    "no scale": (lambda: norm(scale="", opset=23), "scale"),
    "read twice": (lambda: norm(twice=True, opset=23), "read elsewhere"),
    "an inner output": (lambda: norm(returned="root", opset=23), "output"),
    "the inner mean an output": (lambda: norm(centred=True, returned="mean", opset=23), "output"),
    "in fp64": (lambda: norm(kind=T.DOUBLE, opset=23), "fp64"),
    "in fp16": (lambda: gelu("pow", kind=T.FLOAT16, opset=20), "fp16"),
}


def test_a_number_of_higher_rank_than_the_data():
    """The result has its dimensions, which that of a GELU has not."""
    source = gelu("half_x", half=np.full((1, 1, 1, 1), 0.5), opset=20)
    result, done = fused(source)
    assert ops(result) == ops(source) and "more dimensions" in next(iter(done.left.values()))


@pytest.mark.parametrize("case", NOT)
def test_what_is_not_the_same_stays(case):
    make, why = NOT[case]
    source = make()
    result, done = fused(source)
    assert ops(result) == ops(source) and not done.fused
    assert [reason for reason in done.left.values() if why in reason], done.left


@pytest.mark.parametrize(
    "source",
    [
        norm(exponent=3.0, square="pow", opset=23),
        gelu("pow", power=2.0, opset=20),
        gelu("half_x", half=0.4, opset=20),
    ],
)
def test_what_is_something_else_is_not_found(source):
    result, done = fused(source)
    assert ops(result) == ops(source) and not done.fused and not done.left


def test_a_mean_without_its_dimension():
    """`x (n, n)` less its mean of shape `(n,)` is broadcast along the other axis."""
    nodes = [
        node("ReduceMean", ["x", "axes"], ["m"], "mean", keepdims=0),
        node("Sub", ["x", "m"], ["d"], "difference"),
        node("Mul", ["d", "d"], ["s"], "square"),
        node("ReduceMean", ["s", "axes"], ["v"], "variance", keepdims=1),
        node("Sqrt", ["v"], ["r"], "root"),
        node("Div", ["d", "r"], ["q"], "quotient"),
        node("Mul", ["q", "scale"], ["y"], "scaled"),
    ]
    data = [scalar("axes", [-1], np.int64), weight("scale", 6)]
    source = model(nodes, [info("x", 6, 6)], [info("y", 6, 6)], data, opset=23, ir_version=11)
    result, _ = fused(source)
    assert ops(result) == ["ReduceMean", "Sub", "RMSNormalization"], "an RMSNorm of that"
    same(source, result)


def test_an_initializer_that_is_an_input_is_not_stored():
    source = norm(opset=23)
    source.graph.input.append(info("epsilon"))
    result, done = fused(source)
    assert ops(result) == ops(source) and not done.fused


def test_another_size_of_data():
    """One column times eight weights has eight columns, which the norm of one has not."""
    nodes = [
        node("Mul", ["x", "x"], ["s"]), node("ReduceMean", ["s", "axes"], ["m"]), node("Sqrt", ["m"], ["r"]),
        node("Div", ["x", "r"], ["q"]), node("Mul", ["q", "scale"], ["y"]),
    ]  # fmt: skip
    source = model(nodes, [info("x", 4, 1)], [info("y", 4, 8)], [scalar("axes", [-1], np.int64), weight("scale", 8)],
                   opset=23, ir_version=11)  # fmt: skip
    _, done = fused(source)
    assert not done.fused and "shape" in next(iter(done.left.values()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_opset_is_raised_where_it_is_named_alone(dtype):
    source = norm(opset=18)
    done = check(source, dtype, fuse=True)
    assert [op for op in ops(done.model) if op != "Cast"] == ops(source) and done.model.opset_import[0].version == 18
    assert any("1 RMSNormalization (opset 23)" in note and "opset=23" in note for note in done.notes)
    plan = check(gelu("pow", opset=18), dtype, fuse=True).plan
    (last,) = [entry for entry in plan.nodes if "not fused" in entry.reason]
    assert "Gelu comes with opset 20, and the opset is 18" in last.reason
    raised = convert_onnx(source, dtype=dtype, fuse=True, opset=23)
    assert "RMSNormalization" in ops(raised.model) and not [note for note in raised.notes if "would be" in note]
    (norm_,) = [entry for entry in raised.plan.nodes if entry.op == "onnx.RMSNormalization"]
    assert norm_.precision == "low" and "written out in 6 nodes" in norm_.reason
    assert any("fused" in note and "1 RMSNormalization" in note for note in raised.notes)


def test_where_it_is_forbidden_nothing_is_fused():
    assert "LayerNormalization" not in ops(convert_onnx(norm(centred=True, opset=17), fuse=False).model)
    assert "Gelu" not in ops(convert_onnx(gelu("pow", opset=20)).model), "a GELU only where it is asked for"


@pytest.mark.parametrize("options", [{"fuse": True}, {"opset": 23}])
def test_explain_fuses_no_torch_model(options):
    with pytest.raises(AmpError, match="for a Linear; leave it out"):
        amp.explain(torch.nn.Linear(2, 2), (torch.ones(1, 2),), **options)


def test_a_plan_without_casts_is_a_change_too():
    source = norm(centred=True, opset=17, products=False)
    done = convert_onnx(source, rules="safe", fuse=True)
    assert done.changed and ops(done.model) == ["LayerNormalization"]


def test_in_bodies():
    """The norm in the branch of an If reads weights of the graph around it."""
    inner = norm(centred=True, opset=17, products=False)
    branch = h.make_graph(list(inner.graph.node), "branch", [], [h.make_tensor_value_info("z", T.FLOAT, None)])
    branch.node[-1].output[0] = "z"
    other = h.make_graph([node("Identity", ["x"], ["w"])], "other", [], [h.make_tensor_value_info("w", T.FLOAT, None)])
    outer = h.make_node("If", ["go"], ["y"], then_branch=branch, else_branch=other)
    source = model(
        [outer], [info("x", 2, 5, 8), info("go", kind=T.BOOL)], [info("y", 2, 5, 8)], inner.graph.initializer, opset=17
    )
    result, done = fused(source)
    assert done.fused == {"LayerNormalization": 1}
    feeds = {"x": RNG.standard_normal((2, 5, 8)).astype(np.float32), "go": np.asarray(True)}
    np.testing.assert_allclose(run(source, feeds)[0], run(result, feeds)[0], rtol=1e-5, atol=1e-6)
