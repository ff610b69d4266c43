"""`amp.export_onnx`: files, names, types, rules by module, dynamic shapes, data that do not fit, and errors."""

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx_models import LOW, run_tensors, types
from torch import nn

import amp_compiler as amp

BOTH = pytest.mark.parametrize("dtype", ["fp16", "bf16"])
pytestmark = pytest.mark.long  # an export each; test_export_and_convert.py has some for every day


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.first(x)))


def assert_near(built: np.ndarray, wanted: torch.Tensor, bound: float = 2e-3) -> None:
    exact = wanted.detach().numpy()
    assert np.linalg.norm(built - exact) <= bound * np.linalg.norm(exact)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


@BOTH
def test_a_file_is_written_whole_and_the_model_stays_as_it_was(tmp_path, dtype):
    model, path = net(), tmp_path / "m.onnx"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    done = amp.export_onnx(model, (torch.randn(2, 8),), path, dtype=dtype)
    assert done.path == path and done.model is None and [one.name for one in tmp_path.iterdir()] == ["m.onnx"]
    loaded = onnx.load(path)
    onnx.checker.check_model(path, full_check=True)
    stored = {tensor.name: tensor.data_type for tensor in loaded.graph.initializer}
    assert stored["first.weight"] == stored["head.bias"] == LOW[dtype]
    assert stored["norm.weight"] == LOW[dtype]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [value.name for value in loaded.graph.input] == ["x"]
    assert [value.name for value in loaded.graph.output] == ["output"]
    ends = (*loaded.graph.input, *loaded.graph.output)
    assert {value.type.tensor_type.elem_type for value in ends} == {TensorProto.FLOAT}
    weight = next(tensor for tensor in loaded.graph.initializer if tensor.name == "first.weight")
    rounded = before["first.weight"].to({"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]).float().numpy()
    assert np.array_equal(numpy_helper.to_array(weight).astype(np.float32), rounded)


def test_large_data_go_to_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("amp_compiler.onnx.model.save.INLINE_LIMIT", 1000)
    model = nn.Sequential(nn.Linear(8, 128), nn.Linear(128, 4)).eval()
    x = torch.randn(2, 8)
    amp.export_onnx(model, (x,), tmp_path / "m.onnx")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    assert_near(run_tensors(onnx.load(tmp_path / "m.onnx"), x), model(x))


def test_the_plan_is_the_file():
    done = amp.export_onnx(net(), (torch.randn(2, 8),), dtype="fp16")
    assert [(node.op, node.precision) for node in done.plan.nodes] == [
        ("onnx.Gemm", "low"), ("onnx.LayerNormalization", "low"), ("onnx.Gemm", "low"),
    ]  # fmt: skip
    casts = [node for node in done.model.graph.node if node.op_type == "Cast"]
    assert len(casts) == sum(cast.bytes > 0 for cast in done.plan.casts) == 2


@pytest.mark.parametrize("match", [{"module": "head"}, {"module_type": "Wide"}])
def test_rules_see_the_names_and_classes_of_modules(match):
    rules = {"version": 1, "extends": "default", "rules": [{"match": match, "precision": "fp32"}]}
    done = amp.export_onnx(Obeyed().eval(), (torch.randn(2, 8),), rules=rules)
    stored = {tensor.name: tensor.data_type for tensor in done.model.graph.initializer}
    assert stored["first.weight"] == TensorProto.FLOAT16 and stored["head.weight"] == TensorProto.FLOAT


class Wide(nn.Linear):
    """A layer of which rules may speak."""


class Obeyed(nn.Module):
    """A region without autocast, a type that is asked for, and casts that come to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.region, self.head = nn.Linear(8, 8), nn.Linear(8, 8), Wide(8, 8)

    def forward(self, x):
        nothing = x.float().relu()
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            region = self.region(x)
        return self.head(torch.softmax(x, -1, dtype=torch.float32)), x.float().sigmoid(), region, nothing


def test_what_the_model_says_of_types_is_obeyed():
    done = amp.export_onnx(Obeyed().eval(), (torch.randn(2, 8),))
    read = types(done.model)
    assert read["first.weight"] == read["head.weight"] == TensorProto.FLOAT16
    assert read["region.weight"] == TensorProto.FLOAT
    by_op = {node.op_type: node for node in done.model.graph.node}
    assert {read[by_op[op].input[0]] for op in ("Softmax", "Sigmoid", "Relu")} == {TensorProto.FLOAT}
    assert by_op["Relu"].input[0] == "x"


def test_open_ends_have_the_low_type():
    x = torch.randn(2, 8)
    done = amp.export_onnx(net(), (x,), dtype="fp16", keep_io_types=False)
    graph = done.model.graph
    assert [value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)] == [TensorProto.FLOAT16] * 2
    assert [node.op_type for node in graph.node].count("Cast") == 0
    result = run_tensors(done.model, x.half())
    assert result.dtype == np.float16
    assert_near(result.astype(np.float32), net()(x))


def test_dynamic_shapes_and_names():
    model, x = net(), torch.randn(3, 8)
    shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
    done = amp.export_onnx(
        model, (x,), dtype="fp16", dynamic_shapes=shapes, input_names=["features"], output_names=["scores"]
    )
    graph = done.model.graph
    assert [value.name for value in (*graph.input, *graph.output)] == ["features", "scores"]
    assert graph.input[0].type.tensor_type.shape.dim[0].dim_param
    larger = torch.randn(11, 8)
    assert_near(run_tensors(done.model, larger), model(larger))


def test_an_output_may_have_the_name_of_a_value_within():
    inner = amp.export_onnx(net(), (torch.randn(2, 8),)).model.graph.node[1].output[0]
    graph = amp.export_onnx(net(), (torch.randn(2, 8),), output_names=[inner]).model.graph
    assert [value.name for value in graph.output] == [inner]


@pytest.mark.parametrize("names", [["one", "two"], []])
def test_a_wrong_number_of_names_is_refused(names):
    with pytest.raises(amp.OnnxError, match="not one for each of 1 values"):
        amp.export_onnx(net(), (torch.randn(2, 8),), output_names=names, input_names=["x", "y"])


def test_outputs_have_the_names_of_a_dict():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return {"hidden": self.one(x), "logits": self.two(x)}

    done = amp.export_onnx(Two().eval(), {"x": torch.randn(2, 4)})
    assert [value.name for value in done.model.graph.output] == ["hidden", "logits"]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal", "gqa", "hidden rows"])
def test_attention_is_written_out_as_torch_computes_it(kind):
    class Attend(nn.Module):
        def forward(self, q, k, v, *mask):
            if kind in ("causal", "gqa"):
                return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kind == "gqa")
            return nn.functional.scaled_dot_product_attention(q, k, v, *mask)

    torch.manual_seed(0)
    heads = 2 if kind == "gqa" else 4
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, heads, 6, 8), torch.randn(2, heads, 6, 8)
    mask = torch.rand(2, 1, 6, 6) > 0.4
    mask[..., 0] = True
    if kind == "hidden rows":
        mask[0, 0, 3] = False
    extra = {"bool": (mask,), "hidden rows": (mask,), "float": (torch.randn(2, 1, 6, 6),)}.get(kind, ())
    done = amp.export_onnx(Attend(), (q, k, v, *extra), dtype="fp16")
    assert_near(run_tensors(done.model, q, k, v, *extra), Attend()(q, k, v, *extra), 3e-3)
    read = types(done.model)
    (softmax,) = [node for node in done.model.graph.node if node.op_type == "Softmax"]
    assert read[softmax.input[0]] == TensorProto.FLOAT16  # it computes in FP32 inside
    products = [node for node in done.model.graph.node if node.op_type == "MatMul"]
    assert len(products) == 2 and all(read[name] == TensorProto.FLOAT16 for node in products for name in node.input)


def test_fused_attention_at_opset_23():
    class Attend(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v)

    q = torch.randn(1, 2, 4, 8)
    done = amp.export_onnx(Attend(), (q, q, q), dtype="fp16", opset=23)
    kinds = [node.op_type for node in done.model.graph.node]
    assert "Attention" in kinds and "Softmax" not in kinds


def test_the_same_bytes_twice():
    x = torch.randn(2, 8)
    first, second = (amp.export_onnx(net(), (x,)).model.SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


def test_a_model_in_train_mode_that_moves_its_statistics_is_refused():
    with pytest.raises(amp.CaptureError, match=r"changes '.*' when it runs.*eval"):
        amp.export_onnx(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (torch.randn(2, 3, 8, 8),))


@pytest.mark.parametrize(("rate", "training", "said"), [(0.5, True, True), (0.0, True, False), (0.5, False, False)])
def test_a_dropout_in_train_mode_drops_in_the_file_and_is_said(caplog, rate, training, said):
    done = amp.export_onnx(nn.Sequential(nn.Linear(8, 4), nn.Dropout(rate)).train(training), (torch.randn(2, 8),))
    assert ("Dropout" in {node.op_type for node in done.model.graph.node}) is said
    assert ("dropout drops in the file too, as with torch.onnx.export; call model.eval()" in caplog.text) is said


def test_what_is_no_module_is_refused():
    with pytest.raises(amp.CaptureError, match=r"takes an nn\.Module, not a str"):
        amp.export_onnx("m.onnx", (torch.ones(1),))


@pytest.mark.parametrize("opset", [0, 999, "20", 20.0])
def test_what_is_no_opset_is_refused(opset):
    with pytest.raises(amp.OnnxError, match=r"is no opset; give a number up to \d+"):
        amp.export_onnx(net(), (torch.randn(2, 8),), opset=opset)


def test_a_branch_on_values_is_refused_with_its_line():
    class Branch(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    with pytest.raises(amp.CaptureError, match=r"test_onnx_export\.py"):
        amp.export_onnx(Branch(), (torch.ones(2),))


def test_an_op_that_the_exporter_lacks_is_named(tmp_path):
    class Odd(nn.Module):
        def forward(self, x):
            return torch.special.zeta(x, x + 1)

    path = tmp_path / "m.onnx"
    with pytest.raises(amp.OnnxError, match="zeta"):
        amp.export_onnx(Odd(), (torch.rand(3) + 2,), path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(amp.OnnxError, match="no such folder"):
        amp.export_onnx(net(), (torch.randn(2, 8),), tmp_path / "none" / "m.onnx")


class Gathers(torch.nn.Module):
    def forward(self, x, **others):
        return x @ others["weight"] / others["others"].mean()


def test_dynamic_sizes_of_gathered_keywords_are_refused():
    rows = {0: torch.export.Dim.AUTO}
    shapes = {"x": rows, "others": {"weight": None, "others": rows}}
    inputs = {"weight": torch.randn(8, 4), "others": torch.randn(3, 2)}
    with pytest.raises(amp.CaptureError, match=r"Gathers gathers keywords.*; name them in the"):
        amp.export_onnx(Gathers(), (torch.randn(5, 8),), example_kwargs=inputs, dynamic_shapes=shapes)
