"""The built-in presets: what each stands for, and that each file is in order."""

import re
from importlib import resources

import pytest
from graph_reading import parse_graph

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import LOSS_FUNCTION, Node, Operand, PrecisionGraph
from amp_compiler.policy.loader import load_rules, preset_names
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context
from amp_compiler.policy.schema import MatchModel

FOLDER = resources.files("amp_compiler.rules")


def decide(preset, op, low=DType.FLOAT16, device="cuda"):
    matcher = RuleMatcher(load_rules(preset), PrecisionGraph(device), Context(low, device))
    return matcher.decide(Node("y", op, (), ()))


def precision_of(preset, op, **context):
    return decide(preset, op, **context).precision.value


@pytest.mark.parametrize("preset", preset_names())
def test_every_op_gets_a_decision_with_a_reason(preset):
    """And one that nobody knows never runs low; what the model names a type for has that."""
    rules = load_rules(preset)
    assert all(rule.why for rule in rules.rules)
    for low, device in ((DType.FLOAT16, "cuda"), (DType.BFLOAT16, "cpu")):
        matcher = RuleMatcher(rules, PrecisionGraph(device), Context(low, device))
        for op in [*rules.ops.ops, "mylib.unknown"]:
            decision = matcher.decide(Node("y", op, (), ()))
            assert decision is not None, op
            assert decision.reason and re.fullmatch(r"[a-z0-9-]+\.yaml:\d+", decision.rule)
    assert precision_of(preset, "mylib.unknown") == "fp32"
    for op in ("aten.zeros_like", "aten.to", "aten.bernoulli", "onnx.Cast", "onnx.Loop"):
        assert precision_of(preset, op) == "keep"


def read_by(op, device):
    """A graph in which an op reads the value `y`, with the operands of a depthwise convolution."""
    operands = "input x: fp32[1, 8, 4]\ninput w: fp32[8, 1, 3]\ninput y: fp32[]"
    return parse_graph(f"graph {device}\n{operands}\nreader = {op}(input=y) -> fp32[]")


@pytest.mark.parametrize("preset", preset_names())
def test_every_rule_decides_on_some_op(preset):
    """A rule that later ones hide altogether is dead text."""
    rules, alive = load_rules(preset), set()
    own = {rule.where for rule in rules.rules if rule.where.startswith(f"{preset}.yaml")}
    for low in (DType.FLOAT16, DType.BFLOAT16):
        for device in ("cpu", "cuda", "onnx"):
            if own <= alive:
                return
            matcher = RuleMatcher(rules, read_by("onnx.Exp", device), Context(low, device))
            for op in [*rules.ops.ops, "mylib.unknown"]:
                for mode in ("constant", "reflect", "replicate", "cubic"):
                    for result in ((), ("y",)):
                        alive.add(matcher.decide(Node("y", op, (), result, {"mode": mode})).rule)
            operands = Operand("x", "input"), Operand("w", "weight")
            for node in (
                Node("y", "onnx.Mul", (), (), part="layer_norm"),
                Node("y", "onnx.Mul", (), (), part="gelu"),
                Node("y", "onnx.LayerNormalization", (), (), part="layer_norm"),
                Node("y", "aten.mul", (), (), module=LOSS_FUNCTION),
                Node("y", "aten.gelu", (), (), {"approximate": "tanh"}),
                Node("y", "aten.conv1d", operands, (), {"groups": 8}),
                Node("y", "aten.linear", (), (), module="lm_head"),
                *(Node("y", "onnx.ScatterND", (), (), {"reduction": name}) for name in ("add", "mul", "max", "min")),
            ):
                alive.add(matcher.decide(node).rule)
    assert own - alive == set()


ORDER = [
    "default",
    "torch-amp",
    "fast",
    "safe",
    "apex-o0",
    "apex-o1",
    "apex-o2",
    "apex-o3",
    "nvcaffe",
    "tensorflow",
    "mxnet",
    "quantized",
    "deepspeed",
]
TABLE = {  # what each of them in this order makes of an op
    "aten.linear": "low low low low fp32 low low low low low low low low",
    "aten.conv2d": "low low low low fp32 low low low low low low low low",
    "aten.bmm": "low low low low fp32 low low low low low widest low low",
    "aten.scaled_dot_product_attention": "low low low fp32 fp32 low low low low low widest low low",
    "aten.lstm": "low low low fp32 fp32 low low low low low low low low",
    "aten.batch_norm": "widest widest low fp32 fp32 widest low low low between widest widest low",
    "aten.layer_norm": "fp32 fp32 low fp32 fp32 fp32 low low low fp32 fp32 fp32 low",
    "aten.softmax": "fp32 fp32 fp32 fp32 fp32 fp32 low low fp32 between fp32 fp32 low",
    "aten.log_softmax": "fp32 fp32 fp32 fp32 fp32 fp32 low low fp32 between fp32 fp32 low",
    "aten.cross_entropy_loss": "fp32 fp32 fp32 fp32 fp32 fp32 fp32 low fp32 fp32 fp32 fp32 low",
    "aten.exp": "fp32 fp32 fp32 fp32 fp32 fp32 low low low fp32 fp32 fp32 low",
    "aten.sum": "fp32 fp32 fp32 fp32 fp32 fp32 low low low fp32 fp32 fp32 low",
    "aten.mean": "widest widest widest fp32 fp32 widest low low low fp32 fp32 widest low",
    "aten.add": "widest widest follow fp32 fp32 widest low low low between widest widest low",
    "aten.gelu": "widest widest widest fp32 fp32 fp32 low low low between widest widest low",
    "aten.relu": "follow follow follow follow fp32 follow low low low follow follow follow low",
    "aten.view": "follow follow follow follow fp32 follow low low low follow follow follow low",
    "aten.linalg_inv": "fp32 fp32 fp32 fp32 fp32 fp32 fp32 fp32 fp32 keep fp32 fp32 fp32",
}
IN_FP8 = ("fp8", "fp8-delayed", "fp8-rowwise", "mxfp8")  # `default`, whose products have other operands


@pytest.mark.parametrize("op", TABLE)
def test_what_the_presets_stand_for(op):
    assert " ".join(precision_of(preset, op) for preset in ORDER) == TABLE[op]
    assert {precision_of(preset, op) for preset in IN_FP8} == {precision_of("default", op)}


def test_the_table_covers_every_preset():
    assert sorted([*ORDER, *IN_FP8]) == list(preset_names())


TWINS = {
    "onnx.Gemm": "aten.addmm", "onnx.MatMul": "aten.matmul", "onnx.Conv": "aten.conv2d", "onnx.LSTM": "aten.lstm",
    "onnx.LayerNormalization": "aten.layer_norm", "onnx.InstanceNormalization": "aten.instance_norm",
    "onnx.BatchNormalization": "aten.batch_norm", "onnx.Softmax": "aten.softmax", "onnx.Relu": "aten.relu",
    "onnx.Gelu": "aten.gelu", "onnx.Exp": "aten.exp", "onnx.Pow": "aten.pow", "onnx.Erf": "aten.erf",
    "onnx.ReduceSum": "aten.sum", "onnx.ReduceMean": "aten.mean", "onnx.Add": "aten.add", "onnx.Mul": "aten.mul",
    "onnx.MaxPool": "aten.max_pool2d", "onnx.AveragePool": "aten.avg_pool2d", "onnx.Reshape": "aten.reshape",
    "onnx.Concat": "aten.cat", "onnx.Gather": "aten.index_select", "onnx.Where": "aten.where", "onnx.Cast": "aten.to",
    "onnx.Softplus": "aten.softplus", "onnx.PRelu": "aten.prelu", "onnx.Resize": "aten.upsample_bilinear2d",
    "onnx.Attention": "aten.scaled_dot_product_attention", "onnx.Sigmoid": "aten.sigmoid", "onnx.Tanh": "aten.tanh",
    "onnx.Reciprocal": "aten.reciprocal", "onnx.CumSum": "aten.cumsum", "onnx.Clip": "aten.clamp",
    "onnx.SoftmaxCrossEntropyLoss": "aten.cross_entropy_loss", "onnx.Transpose": "aten.permute", "onnx.Pad": "aten.pad",
}  # fmt: skip


@pytest.mark.parametrize("preset", preset_names())
def test_onnx_ops_are_treated_as_their_aten_twins(preset):
    for low in (DType.FLOAT16, DType.BFLOAT16):
        for device in ("cpu", "cuda", "onnx"):
            place = {"low": low, "device": device}
            wrong = {
                op
                for op, twin in TWINS.items()
                if precision_of(preset, op, **place) != precision_of(preset, twin, **place)
            }
            assert wrong == set()


def test_fast_computes_norms_in_fp32_and_softmax_low_in_bf16_only():
    assert decide("fast", "aten.layer_norm").math is DType.FLOAT32
    assert precision_of("fast", "aten.softmax", low=DType.BFLOAT16) == "low"
    assert decide("fast", "aten.softmax", low=DType.BFLOAT16).math is DType.FLOAT32


def test_nvcaffe_has_a_backward_type_of_its_own():
    assert decide("nvcaffe", "aten.linear").backward.value == "low"
    assert decide("nvcaffe", "aten.linear").backward_math is DType.FLOAT32
    assert decide("nvcaffe", "aten.nll_loss").backward.value == "fp32"


def test_sections_of_the_presets():
    scales = {preset: load_rules(preset).loss_scale for preset in ORDER}
    assert {preset: scale["mode"] for preset, scale in scales.items()} == {
        **dict.fromkeys(ORDER, "dynamic"),
        "apex-o0": "none",
        "apex-o3": "none",
        "nvcaffe": "static",
    }
    assert load_rules("apex-o3").weights == {"master": "low"}
    assert all(load_rules(preset).weights == {"master": "fp32"} for preset in ORDER if preset != "apex-o3")


def test_every_file_is_documented():
    readme = FOLDER.joinpath("README.md").read_text(encoding="utf-8")
    for entry in FOLDER.iterdir():
        if entry.name.endswith((".yaml", ".json")):
            assert f"`{entry.name}`" in readme, entry.name
    for preset in preset_names():
        first = FOLDER.joinpath(f"{preset}.yaml").read_text(encoding="utf-8").splitlines()
        assert first[0] == "# yaml-language-server: $schema=schema.json"
        assert first[2].startswith(f"# `{preset}`: ")


def test_the_readme_has_every_word_of_the_language():
    readme = FOLDER.joinpath("README.md").read_text(encoding="utf-8")
    for key in (
        *MatchModel.model_fields,
        "precision",
        "math",
        "backward",
        "why",
        "extends",
        "allow",
        "deny",
        "whitelist",
    ):
        assert f"`{key}`" in readme or f"{key}:" in readme, key
