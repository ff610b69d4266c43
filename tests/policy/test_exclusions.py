"""Lists of other converters as rule files: what they say is what the plan does."""

import json

import pytest
from graph_reading import parse_graph

from amp_compiler.errors import RuleError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import StoredNumbers
from amp_compiler.policy.exclusions import import_rules
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context

NAMES = ("/lm_head/MatMul", "/blocks.0/attn/MatMul", "/blocks.1/attn/MatMul", "/blocks.1/mlp/Gemm", "head")


def requests(path, ranges=None, magnitude=None):
    """What an imported file asks of each of a few products."""
    built = import_rules(path)
    rules = path.with_suffix(".rules.yaml")
    rules.write_text(built.to_text(), encoding="utf-8")
    loaded = load_rules(str(rules))
    assert loaded.rules == load_rules(str(rules)).rules
    result = {}
    for name in NAMES:
        op = name.rpartition("/")[2] if "/" in name else "Conv"
        inputs = "input x: fp32[2, 8]\nparam w: fp32[8, 3]"
        graph = parse_graph(f"graph onnx\n{inputs}\ny = onnx.{op}(A=x, B=w) -> fp32[2, 3] name={name}")
        graph.stored_numbers = lambda value: None if magnitude is None else StoredNumbers(most=magnitude)
        matcher = RuleMatcher(loaded, graph, Context(DType.FLOAT16, "onnx"), ranges or {})
        decision = matcher.decide(graph.nodes[name])
        result[name] = decision.precision.value
    return {name for name, precision in result.items() if precision == "fp32"}


def written(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "content", "wide"),
    [
        ("a.txt", "/lm_head/MatMul\n\n# a comment\nhead  # another\n", {"/lm_head/MatMul", "head"}),
        ("a.txt", "/blocks.?/attn/*:float32\n/blocks.1/attn/MatMul:float16\n", {"/blocks.0/attn/MatMul"}),
        ("a.json", {"nodes_to_exclude": [r"/blocks\.\d/attn.*"]}, {name for name in NAMES if "attn" in name}),
        ("a.json", {"nodes_to_exclude": "head"}, {"head"}),
        ("a.json", {"nodes_to_exclude": ["MatMul"]}, set()),
        ("a.json", {"op_types_to_exclude": ["MatMul"]}, {name for name in NAMES if name.endswith("MatMul")}),
        (
            "a.json",
            {"op_types_to_include": ["Gemm"], "nodes_to_exclude": [".*blocks.1.*"]},
            {"/blocks.1/attn/MatMul"},
        ),
        ("a.yaml", "op_block_list: [Gemm, Conv]\nnode_block_list: [/lm_head/MatMul]\n",
         {"/lm_head/MatMul", "/blocks.1/mlp/Gemm", "head"}),
        ("a.yaml", "layer_precisions: {head: float32, /lm_head/MatMul: half}\n", {"head"}),
        ("a.json", {"node_block_list": ["/blocks.?/attn/MatMul"], "op_block_list": ["Conv"]}, {"head"}),
    ],
    ids=lambda value: str(sorted(value)) if isinstance(value, set) else str(value),
)  # fmt: skip
def test_what_a_list_keeps_is_kept(name, content, wide, tmp_path):
    assert requests(written(tmp_path, name, content)) == wide


def test_numbers_become_matchers(tmp_path):
    path = written(tmp_path, "a.json", {"data_max": 512, "init_max": 100.5, "max_depth_of_reduction": 4096})
    assert not requests(path)
    assert requests(path, ranges={"y": 513.0}) == set(NAMES) == requests(path, magnitude=101.0)
    assert "reduction_size: '> 4096'" in import_rules(path).to_text()


def test_options_that_are_no_rules_are_told(tmp_path):
    result = import_rules(
        written(tmp_path, "a.json", {"nodes_to_exclude": ["a"], "low_precision_type": "bf16", "opset": None})
    )
    assert result.notes == ["low_precision_type is no rule: see the option --dtype of amp-compiler convert"]
    assert "\n# low_precision_type is no rule" in result.to_text()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", {"nodes_to_exlude": ["a"]}, "'nodes_to_exlude' is no option.*did you mean 'nodes_to_exclude'"),
        ("a.json", {"op_types_to_exclude": ["Sofmax"]}, "no ONNX op 'Sofmax'.*Softmax"),
        ("a.json", {"nodes_to_exclude": ["(["]}, "no regular expression"),
        ("a.json", {"nodes_to_exclude": 3}, "no list of names"),
        ("a.json", {"data_max": "many"}, "no number"),
        ("a.json", "{no json", "it is no JSON"),
        ("a.yaml", "a: [", "it is no YAML"),
        ("a.txt", "layer:int8\n", "'int8' is no precision"),
        ("a.txt", "# nothing\n", "it names no node"),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused(name, content, message, tmp_path):
    with pytest.raises(RuleError, match=message) as raised:
        import_rules(written(tmp_path, name, content))
    assert "a." in raised.value.where and raised.value.hint
