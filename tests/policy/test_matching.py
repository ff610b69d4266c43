"""Every matcher by itself, the order of rules, and the sizes of reductions."""

import copy
import pickle

import pytest

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import StoredNumbers
from amp_compiler.ir.graph import Node, Operand, PrecisionGraph, Value, ValueKind
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.reduction_size import reduction_size
from amp_compiler.policy.rules import Context, Precision

F32, BF16 = DType.FLOAT32, DType.BFLOAT16


def graph_of(op, inputs, output=(2, 3), attrs=None, stored=None, **facts):
    """A graph of one node. `inputs`: slot to shape, or to (shape, type). `stored`: magnitudes of what is stored."""
    graph = PrecisionGraph()
    operands = []
    for slot, spec in inputs.items():
        shape, dtype = spec if spec and isinstance(spec[-1], DType) else (spec, F32)
        graph.add_value(value(slot, shape, dtype, ValueKind.PARAMETER if slot in (stored or {}) else ValueKind.INPUT))
        operands.append(Operand(slot, slot))
    node = Node("y", op, tuple(operands), ("y",), attrs or {}, **facts)
    graph.add_node(node, [value("y", output, F32)])
    graph.stored_numbers = {
        name: StoredNumbers(most=size) for name, size in (stored or {}).items() if size is not None
    }.get
    return graph, node


def value(name, shape, dtype, kind=ValueKind.RESULT):
    numel = 1
    for size in shape:
        numel *= size if isinstance(size, int) else 7
    return Value(name, dtype, tuple(shape), numel, kind)


def decide(match, op="aten.linear", inputs=None, attrs=None, ranges=None, context=None, **facts):
    """What a lone rule with `match` says of a node, `None` where it does not match."""
    rules = load_rules({"version": 1, "rules": [{"match": match, "precision": "low"}]})
    graph, node = graph_of(op, {"input": (2, 8), "weight": (3, 8)} if inputs is None else inputs, attrs=attrs, **facts)
    return RuleMatcher(rules, graph, context or Context(DType.FLOAT16), ranges or {}).decide(node)


MATCHES = [
    ({}, {}),
    ({"family": "matmul"}, {}),
    ({"family": ["softmax", "matmul"]}, {}),
    ({"op": "aten.lin*"}, {}),
    ({"op": "mylib.*"}, {"op": "mylib.fused"}),
    ({"family": "unknown"}, {"op": "mylib.fused"}),
    ({"module": "decoder.*.mlp"}, {"module": "decoder.layers.3.mlp"}),
    ({"module": "*"}, {"module": ""}),
    ({"module_type": "*Norm"}, {"module_type": "LayerNorm"}),
    ({"node": ["zzz", "y"]}, {}),
    ({"attr": {"dim": -1}}, {"attrs": {"dim": -1, "other": 2}}),
    ({"attr": {"dims": [0, 1]}}, {"attrs": {"dims.0": 0, "dims.1": 1}}),
    ({"attr": {"approximate": "tanh", "flag": True}}, {"attrs": {"approximate": "tanh", "flag": True}}),
    ({"attr": {"dim": None}}, {"attrs": {"dim": None}}),
    ({"part": ["rms_norm", "gelu"]}, {"part": "gelu"}),
    ({"inputs": "fp32"}, {}),
    ({"inputs": ["fp32", "bf16"]}, {"inputs": {"input": ((2, 8), BF16), "weight": (3, 8)}}),
    ({"inputs": "fp32"}, {"inputs": {"input": (2, 8), "index": ((2,), DType.INT64)}}),
    ({"reduction_size": "> 4"}, {}),
    ({"weight_size": "== 24"}, {"stored": {"weight": 7.0}}),
    ({"weight_absmax": "> 5"}, {"stored": {"weight": 7.0}}),
    ({"absmax": "> 100"}, {"ranges": {"input": 5.0, "y": 1000.0}}),
    ({"absmax": "<= 5"}, {"ranges": {"input": 5.0}}),
    ({"phase": "forward"}, {}),
    ({"device": ["cuda", "xpu"]}, {"context": Context(DType.FLOAT16, "cuda")}),
    ({"dtype": "bf16"}, {"context": Context(BF16)}),
    ({"family": "matmul", "dtype": "fp16", "node": "y"}, {}),
]
MISSES = [
    ({"family": "softmax"}, {}),
    ({"op": "aten.mm"}, {}),
    ({"op": "aten.linear"}, {"op": "onnx.Gemm"}),
    ({"module": "mlp"}, {"module": "decoder.mlp"}),
    ({"module_type": "LayerNorm"}, {"module_type": "RMSNorm"}),
    ({"node": "^z"}, {}),
    ({"attr": {"dim": -1}}, {}),
    ({"attr": {"flag": True}}, {"attrs": {"flag": 1}}),
    ({"attr": {"dims": [0, 1]}}, {"attrs": {"dims": (0,)}}),
    ({"part": "layer_norm"}, {"part": "rms_norm"}),
    ({"inputs": "fp32"}, {"inputs": {"input": ((2, 8), BF16), "weight": (3, 8)}}),
    ({"reduction_size": "> 8"}, {}),
    ({"reduction_size": "> 0"}, {"op": "aten.relu"}),
    ({"absmax": "> 0"}, {}),
    ({"weight_size": "> 0"}, {}),
    ({"weight_size": "< 24"}, {"stored": {"weight": 7.0}}),
    ({"weight_absmax": "> 7"}, {"stored": {"weight": 7.0}}),
    ({"weight_absmax": ">= 0"}, {"stored": {"weight": None}}),
    ({"device": "cuda"}, {}),
    ({"dtype": "bf16"}, {}),
    ({"family": "matmul", "node": "z"}, {}),
]


@pytest.mark.parametrize(("match", "facts"), MATCHES, ids=str)
def test_matches(match, facts):
    assert decide(match, **facts) is not None


@pytest.mark.parametrize(("match", "facts"), MISSES, ids=str)
def test_misses(match, facts):
    assert decide(match, **facts) is None


@pytest.mark.parametrize(
    ("glob", "matches"), [("aten.exp", True), (["aten.relu", "aten.ex*"], True), ("aten.log", False)]
)
def test_feeds(glob, matches):
    rules = load_rules({"version": 1, "rules": [{"match": {"feeds": glob}, "precision": "low"}]})
    graph, node = graph_of("aten.sub", {"self": (2, 3)})
    graph.add_node(Node("reader", "aten.exp", (Operand("y", "self"),), ("z",)), [value("z", (2, 3), F32)])
    matcher = RuleMatcher(rules, graph, Context(DType.FLOAT16))
    assert (matcher.decide(node) is not None) == matches
    assert matcher.decide(graph.nodes["reader"]) is None


# ---- order


def decision_of(rules, op="aten.linear"):
    graph, node = graph_of(op, {"input": (2, 8)})
    return RuleMatcher(load_rules({"version": 1, **rules}), graph, Context(DType.FLOAT16)).decide(node)


def test_the_last_match_wins_and_is_named():
    result = decision_of(
        {"rules": [{"match": {}, "precision": "low", "why": "one"}, {"match": {}, "precision": "fp32", "why": "two"}]}
    )
    assert (result.precision, result.rule, result.reason) == (Precision.FP32, "<dict>:rules.1", "two")


def test_rules_beat_lists_and_ops_beat_families():
    lists = {"deny": ["matmul", "aten.mm"], "allow": ["aten.linear"]}
    assert decision_of(lists).precision is Precision.LOW
    assert decision_of(lists, "aten.mm").precision is Precision.FP32
    assert decision_of({**lists, "rules": [{"match": {}, "precision": "keep"}]}).precision is Precision.KEEP


def test_arithmetic_is_refined_by_later_rules_and_replaced_with_the_precision():
    first = {"match": {}, "precision": "low", "math": "fp32", "backward": {"precision": "fp32"}}
    refine = {"match": {"op": "aten.linear"}, "math": "bf16", "backward": {"math": "fp32"}}
    result = decision_of({"rules": [first, refine]})
    assert (result.precision, result.math) == (Precision.LOW, BF16)
    assert (result.backward, result.backward_math) == (Precision.FP32, F32)
    assert result.rule == "<dict>:rules.0" and result.reason.endswith("refined by <dict>:rules.1")
    anew = decision_of({"rules": [first, refine, {"match": {}, "precision": "fp32"}]})
    assert (anew.math, anew.backward, anew.backward_math) == (None, None, None)


def test_refining_alone_decides_nothing():
    assert decision_of({"rules": [{"match": {}, "math": "fp32"}]}) is None


@pytest.mark.parametrize(
    ("match", "precision", "reason"),
    [
        ({"family": "matmul"}, "low", "the rule lets the family matmul run in the low type"),
        ({"op": "aten.linear"}, "fp32", "the rule lets aten.linear run in FP32"),
        ({}, "follow", "the rule lets the node run in whichever type costs least traffic"),
    ],
)
def test_reasons_of_rules_without_why(match, precision, reason):
    assert decision_of({"rules": [{"match": match, "precision": precision}]}).reason == reason


# ---- reduction sizes

SIZES = [
    ("aten.linear", {"input": (4, 16), "weight": (8, 16)}, {}, (4, 8), 16),
    ("aten.matmul", {"self": (2, 4, 16), "other": (16, 8)}, {}, (2, 4, 8), 16),
    ("aten.addmm", {"self": (8,), "mat1": (4, 16), "mat2": (16, 8)}, {}, (4, 8), 16),
    ("onnx.Gemm", {"A": (16, 4), "B": (16, 8)}, {"transA": 1}, (4, 8), 16),
    ("aten.linear", {"input": (4, "k"), "weight": (8, "k")}, {}, (4, 8), None),
    ("aten.einsum", {"a": (4, 16)}, {}, (4,), None),
    ("aten.conv2d", {"input": (1, 6, 9, 9), "weight": (8, 3, 3, 3)}, {"groups": 2}, (1, 8, 7, 7), 27),
    ("aten.conv_transpose2d", {"input": (1, 6, 9, 9), "weight": (6, 4, 3, 3)}, {"groups": 2}, (1, 8, 9, 9), 27),
    ("onnx.Conv", {"X": (1, 6, 9, 9), "W": (8, 6, 1, 1)}, {}, (1, 8, 9, 9), 6),
    ("aten.sum", {"self": (4, 16)}, {}, (4,), 16),
    ("aten.cumsum", {"self": (4, 16)}, {"dim": 1}, (4, 16), 16),
    ("aten.softmax", {"self": (4, 16)}, {"dim": 0}, (4, 16), 4),
    ("aten.layer_norm", {"input": (4, 5, 16)}, {"normalized_shape": (5, 16)}, (4, 5, 16), 80),
    ("aten.layer_norm", {"input": (4, 5, 16)}, {"normalized_shape.0": 16}, (4, 5, 16), 16),
    ("onnx.LayerNormalization", {"X": (4, 5, 16)}, {"axis": -1}, (4, 5, 16), 16),
    ("aten.group_norm", {"input": (2, 8, 5)}, {"num_groups": 2}, (2, 8, 5), 20),
    ("aten.batch_norm", {"input": (2, 8, 5)}, {}, (2, 8, 5), 10),
    ("aten.avg_pool2d", {"self": (1, 1, 4, 4)}, {}, (1, 1, 2, 2), 4),
    ("aten.relu", {"self": (4, 16)}, {}, (4, 16), None),
]


@pytest.mark.parametrize(("op", "inputs", "attrs", "output", "size"), SIZES)
def test_reduction_sizes(op, inputs, attrs, output, size):
    graph, node = graph_of(op, inputs, output, attrs)
    assert reduction_size(graph, node, load_rules().ops.info(op).sums) == size


@pytest.mark.parametrize(("op", "attribute"), [("aten.conv2d", "groups"), ("onnx.Conv", "group")])
@pytest.mark.parametrize(("channels", "groups", "wanted"), [(8, 8, True), (8, 2, False), (8, 1, False), (1, 1, False)])
@pytest.mark.parametrize("batch", [(2,), ()])
def test_depthwise_is_one_group_a_channel(op, attribute, channels, groups, wanted, batch):
    shapes = {"input": (*batch, channels, 4, 4), "weight": (channels, channels // groups, 3, 3)}
    graph, node = graph_of(op, shapes, attrs={attribute: groups} if groups > 1 else {})
    for requested in (True, False):
        rules = load_rules({"version": 1, "rules": [{"match": {"depthwise": requested}, "precision": "fp32"}]})
        decision = RuleMatcher(rules, graph, Context(DType.FLOAT16)).decide(node)
        assert (decision is not None) == (requested == wanted)


def test_output_is_what_the_graph_returns():
    graph, node = graph_of("aten.relu", {"self": (2, 3)})
    for outputs, requested, matches in ((["y"], True, True), (["self"], True, False), (["self"], False, True)):
        graph.outputs = outputs
        rules = load_rules({"version": 1, "rules": [{"match": {"output": requested}, "precision": "fp32"}]})
        decision = RuleMatcher(rules, graph, Context(DType.FLOAT16)).decide(node)
        assert (decision is not None) == matches


def test_rules_are_equal_to_their_copies_and_read_alike_in_every_process():
    rules = load_rules({"version": 1, "rules": [{"match": {"op": "aten.mm", "module": "a*"}, "precision": "fp32"}]})
    assert copy.deepcopy(rules) == pickle.loads(pickle.dumps(rules)) == rules
    assert " at 0x" not in repr(rules.rules)
