"""Nets and solvers of NVCaffe as rule files: what a layer asks for is what the plan does; the rest is told by line."""

from pathlib import Path

import pytest
from graph_reading import parse_graph
from ruamel.yaml import YAML

from amp_compiler.errors import RuleError
from amp_compiler.ir.dtypes import DType
from amp_compiler.policy.importing.facts import facts
from amp_compiler.policy.importing.files import import_file
from amp_compiler.policy.importing.text_format import parse_text
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context

FACTS = YAML(typ="safe").load(Path(__file__).parent.parent / "rules" / "lists" / "nvcaffe.yaml")
HALF = "default_forward_type: FLOAT16\ndefault_backward_type: FLOAT16\n"
TWICE = 'layer { name: "a" type: "ReLU" forward_type: FLOAT }\nlayer { name: "a" type: "ReLU" }\n'
NET = """name: "net"
default_forward_type:  FLOAT16
default_backward_type: FLOAT16
default_forward_math:  FLOAT   # a comment
global_grad_scale: 1000.
layer { name: "data" type: "Data" top: "data" transform_param { scale: 0.5 } forward_type: FLOAT16 }
layer {
  name: "conv1"
  type: "Convolution"
  convolution_param { num_output: 4 weight_filler { type: "msra" } }
}
layer {
  name: "res2.1.bn"
  type: "BatchNorm"
  forward_type: FLOAT
  backward_type: FLOAT
}
layer { name: "fc[1]" type: "InnerProduct" backward_type: FLOAT forward_math: FLOAT }
layer { name: "relu" type: "Sigmiod" }
layer { name: "loss" type: "SoftmaxWithLoss" forward_type: FLOAT backward_type: FLOAT }
layer { name: "top" type: "Accuracy" include { phase: TEST } forward_type: FLOAT }
"""


def imported(tmp_path, text, name="net.prototxt", **options):
    path, rules = tmp_path / name, tmp_path / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    result = import_file(path, **options)
    rules.write_text(result.to_text(), encoding="utf-8")
    return load_rules(str(rules)), result


def decided(rules, module, op="aten.linear"):
    """Forward and backward precision and the line of the prototxt that says so."""
    graph = parse_graph(f'graph fx\ninput x: fp32[2, 8]\ny = {op}(input=x) -> fp32[2, 8] module="{module}"')
    decision = RuleMatcher(rules, graph, Context(DType.FLOAT16, "cuda"), {}).decide(graph.nodes["y"])
    backward = decision.backward.value if decision.backward else None
    return decision.precision.value, backward, decision.reason


def test_a_net_says_the_types_of_its_layers(tmp_path):
    rules, result = imported(tmp_path, NET)
    assert decided(rules, "conv1", "aten.conv2d")[:2] == ("low", "low")
    assert (
        decided(rules, "anything")[2].count("net.prototxt:2")
        == decided(rules, "anything")[2].count("net.prototxt:3")
        == 1
    )
    assert decided(rules, "res2.1.bn", "aten.batch_norm")[:2] == ("fp32", "fp32")
    assert decided(rules, "wrapped.res2.1.bn", "aten.batch_norm")[:2] == ("fp32", "fp32")
    assert decided(rules, "res2x1.bn", "aten.batch_norm")[:2] == ("low", "low")
    assert decided(rules, "fc[1]")[:2] == ("low", "fp32") and decided(rules, "fc1")[:2] == ("low", "low")
    assert "net.prototxt:15" in decided(rules, "res2.1.bn")[2]
    for module in ("loss", "<loss_fn>"):
        assert decided(rules, module, "aten.cross_entropy_loss")[:2] == ("fp32", "fp32")
    assert decided(rules, "conv1", "aten.to")[0] == "keep" and decided(rules, "conv1", "mylib.op")[0] == "fp32"
    assert rules.loss_scale == {"mode": "static", "init": 1000}
    notes = "\n".join(result.notes)
    assert "layer 'data' makes the batch" in notes and "forward_type: FLOAT16 (net.prototxt:6)" in notes
    assert (
        "layer 'relu' (net.prototxt:19): 'Sigmiod' is no layer type of NVCaffe's own (did you mean 'Sigmoid'?)" in notes
    )
    assert "layer 'top' is for tests alone" in notes and len(result.notes) == 3


def test_float_is_the_default_as_in_nvcaffe(tmp_path):
    rules, result = imported(tmp_path, 'layer { name: "a" type: "Convolution" forward_type: 2 backward_type: FLOAT16 }')
    assert decided(rules, "a", "aten.conv2d")[:2] == ("low", "low")
    assert decided(rules, "b", "aten.conv2d")[:2] == ("fp32", "fp32") and not result.notes
    assert rules.loss_scale == {"mode": "none"} and FACTS["defaults"]["forward_type"] == "FLOAT"
    rules, _ = imported(tmp_path, "default_forward_type: FLOAT16\n")
    assert decided(rules, "a")[:2] == ("low", "fp32")


@pytest.mark.parametrize(
    ("rule", "trained"),
    [
        ("include { phase: TEST }", False),
        ("include { phase: 1 }", False),
        ("exclude { phase: TRAIN }", False),
        ("include { phase: TEST } include { stage: 'fine' }", True),
        ("include { phase: TRAIN }", True),
        ("exclude { phase: TRAIN stage: 'fine' }", True),
        ("exclude { phase: TEST }", True),
    ],
)
def test_a_layer_that_is_not_trained_is_no_rule(rule, trained, tmp_path):
    layer = f'layer {{ name: "a" type: "Scale" forward_type: FLOAT {rule} }}'
    rules, result = imported(tmp_path, HALF + layer)
    assert decided(rules, "a")[0] == ("fp32" if trained else "low")
    assert any("for tests alone" in note for note in result.notes) == (not trained)
    # A layer of the same name that is trained keeps its types, whatever those of the other are.
    other = f'layer {{ name: "a" type: "Scale" backward_type: FLOAT include {{ phase: TRAIN }} }}{layer}'
    if not trained:
        assert decided(imported(tmp_path, HALF + other)[0], "a")[:2] == ("low", "fp32")


def test_layers_of_one_name_and_the_same_types_have_one_rule(tmp_path):
    layer = 'layer { name: "a" type: "Scale" forward_type: FLOAT }\n'
    _, result = imported(tmp_path, HALF + 2 * layer)
    assert sum(rule["match"].get("module") == ["a", "*.a"] for rule in result.rules["rules"]) == 1


def test_what_layers_say_of_the_loss_and_of_rates_is_told(tmp_path):
    layer = "layer {{ name: '{}' type: '{}' {} }}\n"
    text = HALF + "".join(
        [
            *(
                layer.format(f"c{one}", "Convolution", "param { lr_mult: 2 } param { decay_mult: 0 }")
                for one in range(5)
            ),
            layer.format("plain", "Convolution", "param { name: 'shared' }"),
            layer.format("one", "L1Loss", "loss_weight: 0.3"),
            layer.format("two", "L1Loss", "loss_weight: 1 loss_weight: 2 include { phase: TEST }"),
        ]
    )
    notes = imported(tmp_path, text)[1].notes
    assert notes[0] == "the loss function weighs its terms: loss_weight: 0.3 (net.prototxt:9)"
    assert notes[1].startswith("lr_mult and decay_mult of c0, c1, c2 and 2 more are factors") and len(notes) == 2


def test_losses_that_differ_leave_the_loss_function_to_the_user(tmp_path):
    first, second = (f'layer {{ name: "{name}" type: "L1Loss" {types} }}' for name, types in
                     (("a", "forward_type: FLOAT"), ("b", "backward_type: FLOAT")))  # fmt: skip
    rules, result = imported(tmp_path, HALF + first + second)
    assert decided(rules, "a")[:2] == ("fp32", "low") and decided(rules, "b")[:2] == ("low", "fp32")
    assert decided(rules, "<loss_fn>")[:2] == ("low", "low") and "'<loss_fn>' is yours" in result.notes[0]
    rules, result = imported(
        tmp_path, HALF + first + 'layer { name: "c" type: "SoftmaxWithLoss" }'
    )  # as the net has it
    assert decided(rules, "<loss_fn>")[:2] == ("low", "low") and "'<loss_fn>' is yours" in result.notes[0]


def test_an_adaptive_scale_has_the_formula_of_the_last_versions(tmp_path):
    rules, result = imported(tmp_path, HALF + "global_grad_scale: 32 global_grad_scale_adaptive: true")
    assert rules.loss_scale == {"mode": "nvcaffe", "coefficient": 32, "formula": "max"}
    assert FACTS["adaptive"]["max"]["versions"][0] in result.notes[0] and "formula: l2" in result.notes[0]


def test_a_solver_says_the_type_of_the_weights(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.prototxt").write_text(NET, encoding="utf-8")
    solver = 'net: "models/net.prototxt"\nbase_lr: 0.1 momentum: 0.9 weight_decay: 5e-4\nlr_policy: "poly"\n'
    more = 'iter_size: 4 clip_gradients: 2.5 regularization_type: "L1" solver_data_type: FLOAT16 type: "SGD"'
    for folder in (".", "models"):  # Caffe looks from where it is called
        rules, result = imported(tmp_path, solver + more, f"{folder}/solver.prototxt")
        assert (rules.weights["master"], rules.weights["overflow"]) == ("low", "clip")
        assert decided(rules, "res2.1.bn")[:2] == ("fp32", "fp32") and rules.loss_scale["init"] == 1000
    notes = "\n".join(result.notes)
    for message in ("base_lr: 0.1", "momentum: 0.9", "iter_size: 4", "clip_gradients: 2.5", "regularization_type: L1",
                 "lr_policy: poly (solver.prototxt:3)"):  # fmt: skip
        assert message in notes
    rules, result = imported(tmp_path, solver.replace("net.proto", "none.proto"), "solver.prototxt")
    assert rules.weights["master"] == "fp32" and "none.prototxt is not there" in result.notes[0]
    sag = f'base_lr: 1 type: "SAG" momentum: 0.9 larc: true regularization_type: "WD" net_param {{ {NET} }}'
    rules, result = imported(tmp_path, sag, "solver.prototxt")
    assert decided(rules, "fc[1]")[:2] == ("low", "fp32")
    assert "type: SAG (solver.prototxt:1)" in result.notes[0] and "larc: true" in result.notes[0]


def test_extends_stands_below(tmp_path):
    _, result = imported(tmp_path, HALF, extends="fast")
    assert list(result.rules)[:2] == ["version", "extends"] and result.rules["extends"] == "fast"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HALF + "default_forward_math: FLOAT16", r":3:.*arithmetic in 16 bits.*default_forward_math.*write FLOAT"),
        ("default_forward_type: DOUBLE", r":1:.*no rule can say DOUBLE.*write FLOAT or FLOAT16"),
        ("\ndefault_forward_type: FLOAT61", r":2:.*no type 'FLOAT61'.*did you mean 'FLOAT16'"),
        ('layer {\n name: "a"\n foward_type: FLOAT }', r":3:.*no field 'foward_type' of a layer.*'forward_type'"),
        ("base_lr: 1 solver_datatype: FLOAT", r"of a solver.*'solver_data_type'"),
        ('name: "old"\nlayers { type: CONVOLUTION }', r":2:.*before Caffe 1.0"),
        ("layer { forward_type: FLOAT16 }", r":1:.*no name"),
        ("global_grad_scale: 0", "write a positive number"),
        ("global_grad_scale: 1e39", "FP32's normal range"),
        (HALF + TWICE, r":4:.*'a'.*at line 3"),
        ('base_lr: 1\nnet_param { }\nnet: "a"', r":3:.*net_param at line 2.*name one net"),
        ("global_grad_scale_adaptive: yes", "write true or false"),
        ("default_forward_type: FLOAT\ndefault_forward_type: FLOAT16", r":2:.*given twice.*line 1"),
        ("layer {\n", r":1:8.*ends before '}'"),
        ("name = 3", r":1:6.*no text format"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_line(text, message, tmp_path):
    with pytest.raises(RuleError, match=f"(?s){message}") as raised:
        imported(tmp_path, text)
    assert raised.value.hint and "net.prototxt" in raised.value.where


def test_no_file_and_no_text(tmp_path):
    with pytest.raises(RuleError, match="cannot be read: no such file"):
        import_file(tmp_path / "none.prototxt")
    (tmp_path / "a.prototxt").write_bytes(b"\xff\xfe")
    with pytest.raises(RuleError, match="no UTF-8 text"):
        import_file(tmp_path / "a.prototxt")


def test_the_text_format_is_read_with_its_lines():
    text = "a: 1 b { c: 'x' \"y\" # no\n d: [1, -inf]; } e < f: true >, g: [{h: .5}]"
    a, b, e, g = parse_text(text, "x")
    assert (a.value, a.line, b.line, e.line) == ("1", 1, 1, 2) and e.fields[0].value == "true"
    assert [(field.name, field.value, field.line) for field in b.fields] == [
        ("c", "xy", 1), ("d", "1", 2), ("d", "-inf", 2)]  # fmt: skip
    assert g.fields[0].value == ".5"


def test_the_families_of_no_layer_are_those_of_the_preset():
    preset = YAML(typ="safe").load(Path(__file__).parents[2] / "rules" / "nvcaffe.yaml")
    families = [rule["match"].get("family") for rule in preset["rules"]]
    assert all(facts("caffe")[name] in families for name in ("kept", "wide"))
    assert facts("caffe")["types"] == FACTS["types"] and facts("caffe")["version"] == FACTS["version"]
