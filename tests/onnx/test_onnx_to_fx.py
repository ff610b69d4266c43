"""`onnx_to_fx`: names, weights and constants, control flow, functions, and refusals."""

import copy
import gc

import numpy as np
import onnx
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, parser
from onnx_models import run_program

import amp_compiler as amp
from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.onnx.importing.ops import op, registry

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'
LINEAR = (
    HEAD
    + """g (float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}, float[2] b = {1,-1}> {
  h = MatMul(x, w)
  y = Add(h, b)
}"""
)


def reference(model: onnx.ModelProto, *inputs: torch.Tensor) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {value.name: one.numpy() for value, one in zip(model.graph.input, inputs, strict=True)}
    return [torch.from_numpy(np.asarray(one)) for one in session.run(None, feeds)]


def assert_as_onnx_runtime(text: str, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    """The module of a model whose outputs are those of ONNX Runtime."""
    model = parser.parse_model(text)
    module = amp.onnx_to_fx(model)
    result = module(*inputs)
    result = result if isinstance(result, tuple) else (result,)
    for mine, theirs in zip(result, reference(model, *inputs), strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    return module


def x34() -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("form", ["path", "text", "proto", "ir"])
def test_all_forms_of_a_model_are_read(form, tmp_path):
    model = parser.parse_model(LINEAR)
    onnx.save(model, tmp_path / "m.onnx")
    inputs = {
        "path": tmp_path / "m.onnx", "text": str(tmp_path / "m.onnx"), "proto": model, "ir": ir.from_proto(model)
    }[form]  # fmt: skip
    module = amp.onnx_to_fx(inputs)
    assert torch.allclose(module(x34()), reference(model, x34())[0])
    assert torch.allclose(module(x=x34()), module(x34()))
    assert [name for name, _ in module.named_parameters()] == ["w", "b"]


def test_weights_are_parameters_and_the_rest_is_not():
    rows = {
        "enc.0.weight": np.ones((4, 4), np.float32), "enc.0": np.ones(4, np.float32), "a/b:0": np.ones(4, np.float32),
        "a_b_0": np.ones(4, np.float32), "training": np.ones(4, np.float32),
        "mask": np.array([0, -3e38, 0, 0], np.float32),
        "half": np.array(0.5, np.float32), "index": np.array([0, 1, 2, 0], np.int64),
    }  # fmt: skip
    nodes = [helper.make_node("MatMul", ["x", "enc.0.weight"], ["v0"], name="fc")]
    for place, name in enumerate(["enc.0", "a/b:0", "a_b_0", "training", "mask", "half"]):
        nodes.append(helper.make_node("Add", [f"v{place}", name], [f"v{place + 1}"]))
    nodes.append(helper.make_node("Gather", ["v6", "index"], ["y"], axis=1))
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 4])],
        [numpy_helper.from_array(one, name) for name, one in rows.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    module = amp.onnx_to_fx(model)
    names = module.meta["onnx_names"]
    assert {names[name] for name, _ in module.named_parameters()} == {
        "enc.0.weight",
        "enc.0",
        "a/b:0",
        "a_b_0",
        "training",
    }
    assert {names[name] for name, _ in module.named_buffers()} == {"mask", "index"}
    assert names["enc.0.weight"] == "enc.0.weight"
    assert len(names) == len(set(names.values()))
    module(x34()).sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    chosen = amp.onnx_to_fx(model, trainable=lambda name, tensor: name == "mask")
    assert [names[name] for name, _ in chosen.named_parameters()] == ["mask"]
    assert chosen.meta == amp.onnx_to_fx(model, trainable=lambda name, tensor: name == "mask").meta
    again = torch.fx.GraphModule(module, module.graph)
    assert again(x34()).equal(module(x34()))


CONTROL = {
    "a branch that data chooses": """g (float[3,4] x) => (float[3,4] y) <float[4] w = {1,2,3,4}> {
      s = ReduceSum<keepdims=0>(x)
      z = Constant<value_float=0.0>()
      c = Greater(s, z)
      y = If(c) <then_branch = t () => (float[3,4] a) { a = Mul(x, w) },
        else_branch = e () => (float[3,4] b) { b = Neg(x) }>
    }""",
    "a branch that is known": """g (float[3,4] x) => (float[3,4] y) <float[4] w = {1,2,3,4}, bool c = {1}> {
      y = If(c) <then_branch = t () => (float[3,4] a) { a = Mul(x, w) },
        else_branch = e () => (float[3,4] b) { b = Neg(x) }>
    }""",
    "a loop of known length": """g (float[3,4] x) => (float[3,4] y, float[3,3,4] ys)
    <float[4] w = {1,2,3,4}, int64 n = {3}, bool c = {1}> {
      y, ys = Loop(n, c, x) <body = b (int64 i, bool ci, float[3,4] s) => (bool co, float[3,4] so, float[3,4] sc)
        { co = Identity(ci) f = Cast<to=1>(i) m = Mul(s, w) so = Add(m, f) sc = Tanh(so) }>
    }""",
    "a scan from the end": """g (float[3,4] x) => (float[4] y, float[3,4] ys) <float[4] w = {0.1,0.2,0.3,0.4}> {
      y, ys = Scan<num_scan_inputs=1, scan_input_directions=[1], body = b (float[4] s, float[4] r) =>
        (float[4] so, float[4] sc) { m = Mul(s, r) so = Add(m, w) sc = Tanh(so) }>(w, x)
    }""",
    "a loop over a dimension": """g (float[3,4] x) => (float[4] y)
    <float[4] w = {1,2,3,4}, bool c = {1}, int64 z = {0}> {
      s = Shape(x)
      n = Gather(s, z)
      y = Loop(n, c, w) <body = b (int64 i, bool ci, float[4] s0) => (bool co, float[4] so)
        { co = Identity(ci) r = Gather(x, i) m = Mul(s0, r) so = Add(m, w) }>
    }""",
}  # fmt: skip


@pytest.mark.parametrize("text", CONTROL.values(), ids=[name.replace(" ", "-") for name in CONTROL])
def test_control_flow(text):
    for x in (x34().abs(), -x34().abs()):
        module = assert_as_onnx_runtime(HEAD + text, x)
        assert [name for name, _ in module.named_parameters()] == ["w"]
        compiled = amp.compile(module, dtype="bf16", backend="eager")
        first = lambda result: result[0] if isinstance(result, tuple) else result  # noqa: E731
        torch.testing.assert_close(first(compiled(x)), first(module(x)), rtol=2e-2, atol=1e-2)


def test_functions_of_the_model_are_inlined_with_their_attributes():
    text = """<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
    g (float[3,4] x) => (float[3,4] y) <float[4] w = {1,2,3,4}> {
      a = my.f<alpha=0.3>(x, w)
      y = my.f<alpha=0.1>(a, w)
    }
    <domain: "my", opset_import: ["" : 17]>
    f <alpha>(p, q) => (r) { m = Mul(p, q) r = LeakyRelu<alpha: float = @alpha>(m) }"""
    assert_as_onnx_runtime(text, x34())


def test_all_missing_operators_are_named_at_once_and_can_be_added():
    text = """<ir_version: 8, opset_import: ["" : 17, "my.ops" : 1]>
    g (float[3,4] x) => (float[3,4] y) {
      [first] a = my.ops.Alpha(x)
      [second] y = my.ops.Beta(a)
    }"""
    model = parser.parse_model(text)
    with pytest.raises(
        CaptureError, match=r"2 operator.*my.ops.Alpha \(node 'first'\); my.ops.Beta \(node 'second'\).*@op"
    ):
        amp.onnx_to_fx(model)
    try:
        op("Alpha", "Beta", domain="my.ops")(torch.sin)
        assert torch.allclose(amp.onnx_to_fx(model)(x34()), x34().sin().sin())
    finally:
        for name in ("Alpha", "Beta"):
            del registry._OPS["my.ops", name]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[bad] a = Clip(x, nothing)\n y = Relu(a)", r"a value has no producer"),
        ("[bad] y = Cast<to=8>(x)", r"node 'bad' \(Cast\): there is no conversion for this form"),
        (
            "c = Constant<value_floats=[1.0, 2.0]>() [bad] a = Concat<axis=3>(c, c) y = Add(x, a)",
            r"node 'bad' \(Concat\): it cannot be converted: IndexError.*checker",
        ),
        ("[bad] y = Dropout<slope=1>(x)", r"node 'bad' \(Dropout\): attribute 'slope'"),
        (
            'p = Constant<value_ints=[0, 1, 0, 0]>() [bad] y = Pad<mode="mirror">(x, p)',
            r"node 'bad' \(Pad\): attribute mode='mirror' is none of 'constant', 'reflect', 'edge', 'wrap'",
        ),
        ("[bad] y = If(x)", r"node 'bad' \(If\): the attribute 'then_branch' is missing"),
    ],
)
def test_a_model_that_is_wrong_is_refused_with_its_node(body, message):
    """An operand that nothing makes is no operand that was left out."""
    text = '<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>\n'
    graph = f"g (float[3,4] x) => (float[3,4] y) <float[4] w = {{1,2,3,4}}> {{ {body} }}"
    with pytest.raises(CaptureError, match=message):
        amp.onnx_to_fx(parser.parse_model(text + graph))


def test_an_optional_input_that_a_caller_left_out_is_left_out_within():
    text = """<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
    g (float[3,4] x) => (float[3,4] y) <float low = {-0.1}> {
      a = my.outer(x, low)
      b = my.outer(a)
      y = Add(a, b)
    }
    <domain: "my", opset_import: ["" : 17, "my" : 1]>
    outer (p, low) => (r) { q = Neg(p)  r = my.inner(q, low) }
    <domain: "my", opset_import: ["" : 17]>
    inner (p, low) => (r) { r = Clip(p, low) }"""
    low = torch.tensor(-0.1)
    a = torch.maximum(-x34(), low)
    assert torch.equal(amp.onnx_to_fx(parser.parse_model(text))(x34()), a + -a)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(LINEAR), path)
    loss_fn = lambda m, x: m(x).square().mean()  # noqa: E731
    with pytest.raises(AmpError, match=r"m\.onnx: the optimizer owns no parameter.*onnx_to_fx"):
        amp.training_step(
            str(path), loss_fn, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1), backend="eager"
        )
    with pytest.raises(AmpError, match=r"amp\.compile takes an nn.Module or a function, not a int"):
        amp.compile(3)


def test_a_module_with_shape_arithmetic_is_copied_saved_and_loaded(tmp_path):
    """Which is plain numbers, and takes symbolic sizes."""
    text = (
        HEAD
        + """g (float[N,4] x) => (float[M,2] y) <float[4] w = {1,2,3,4}, int64[1] two = {2}, int64[1] rest = {-1},
      int64 zero = {0}, int64[1] axis = {0}> {
      one = Constant<value = float[1] {1}>()
      four = Constant<value = int64[1] {4}>()
      ones = Expand(one, four)
      a = Mul(x, w)
      b = Add(a, ones)
      s = Shape(x)
      n = Gather(s, zero)
      d = Unsqueeze(n, axis)
      p = Mul(d, two)
      q = Div(p, two)
      m = Mul(q, two)
      shape = Concat<axis=0>(m, rest)
      y = Reshape(b, shape)
    }"""
    )
    module = assert_as_onnx_runtime(text, x34())
    program = torch.export.export(module, (x34(),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False)
    assert program.module()(torch.ones(6, 4)).shape == (12, 2)
    torch.save(module, tmp_path / "m.pt")
    loaded = torch.load(tmp_path / "m.pt", weights_only=False)
    for other in (copy.deepcopy(module), loaded):
        assert torch.equal(other(x34()), module(x34()))
        assert other(torch.ones(5, 4)).shape == (10, 2)
        other.load_state_dict(module.state_dict())
    assert copy.deepcopy(module).meta["onnx_names"] == module.meta["onnx_names"]


@pytest.mark.usefixtures("few_objects")
def test_torch_forgets_the_code_of_a_module_that_is_gone():
    known = getattr(torch.fx._symbolic_trace, "_wrapped_fns_to_patch", None)
    if known is None:
        pytest.skip("this torch keeps no table of the functions that code wraps")
    gc.collect()  # those of other tests
    before = set(known)
    module = amp.onnx_to_fx(parser.parse_model(LINEAR))
    assert set(known) - before
    del module
    gc.collect()
    assert not set(known) - before


@pytest.mark.long
def test_the_same_model_gives_the_same_code_under_any_hash_seed():
    code = f"import amp_compiler as a, onnx.parser as p; print(a.onnx_to_fx(p.parse_model({LINEAR!r})).code, end='')"
    result = run_program(code, PYTHONHASHSEED="7")
    assert result == amp.onnx_to_fx(parser.parse_model(LINEAR)).code


FP8 = {
    kind: getattr(torch, name)
    for kind, name in ((17, "float8_e4m3fn"), (18, "float8_e4m3fnuz"), (19, "float8_e5m2"), (20, "float8_e5m2fnuz"))
}
RANGE = [
    0.0, -0.0, np.nan, np.inf, -np.inf, 1e30, 448.0, 463.0, 464.0, 465.0, -480.0, 240.0, 247.0, 249.0, 57344.0,
    -61440.0,
]  # fmt: skip


@pytest.mark.parametrize("like", [False, True], ids=["Cast", "CastLike"])
@pytest.mark.parametrize("saturate", [None, 0, 1])
@pytest.mark.parametrize("kind", FP8)
def test_casts_to_fp8_saturate_where_the_model_says_so(kind, saturate, like):
    said = {} if saturate is None else {"saturate": saturate}
    if like:
        nodes = [
            helper.make_node("Cast", ["z"], ["t"], to=kind),
            helper.make_node("CastLike", ["x", "t"], ["e"], **said),
        ]
    else:
        nodes = [helper.make_node("Cast", ["x"], ["e"], to=kind, **said)]
    nodes.append(helper.make_node("Cast", ["e"], ["y"], to=TensorProto.FLOAT))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("x", "z", "y")]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    x = torch.tensor(RANGE)
    (want,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x.numpy(), "z": np.zeros(16, np.float32)})
    result = amp.onnx_to_fx(model)(x, torch.zeros(16))
    np.testing.assert_array_equal(result.numpy(), want)
    assert bool(torch.isfinite(result[3])) is (saturate != 0)
