"""`target=`: no node gets a type for which its provider has no kernel; ONNX Runtime itself says so of its CPU."""

import re
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest
import torch
from onnx_corpus import MADE, built
from onnx_corpus.case import Case
from onnx_models import LOW, info, model, node, nodes_of, types, weight
from test_onnx_corpus import both, over
from test_onnx_quantized import qdq
from torch import nn

import amp_compiler as amp
from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import LOW_TYPES
from amp_compiler.onnx.convert import Conversion, convert_onnx
from amp_compiler.policy.targets import TARGETS, load_target

QUICK = [case.name for case in MADE]
PARTED = ("if", "loop", "double_part", "vit")  # a cast at the border of a body, or of another type, is not foreseen
ON_EACH = [
    ("cpu", "bf16"),
    ("cuda", "fp16"),
    ("cuda", "bf16"),
    ("tensorrt", "bf16"),
    ("directml", "fp16"),
    ("webgpu", "fp16"),
]


def is_slow(case: Case) -> bool:
    """Of the models that are exported one is quick."""
    return case not in MADE and case.name != "vit"


def inserted(model: onnx.ModelProto, folder: Path) -> int:
    """The casts that ONNX Runtime inserts itself, by the graph that it writes."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    written = onnx.load(folder / "optimized.onnx")
    return sum(node.name.startswith("InsertedPrecisionFreeCast_") for node in nodes_of(written.graph))


def counted(done: Conversion) -> tuple[int, ...]:
    """What the note says: nodes without a kernel and casts, with the target and without."""
    (note,) = (note for note in done.notes if note.startswith("target "))
    match = re.search(r": (\d+) nodes? .*?, (\d+) casts? .* without a target (\d+) and (\d+)$", note)
    assert match is not None, note
    return tuple(map(int, match.groups()))


@pytest.mark.sweep(30)
@both(lambda case: True, slow=is_slow)
def test_on_the_cpu_every_model_loads_and_onnx_runtime_inserts_no_cast(name, dtype, tmp_path):
    done = convert_onnx(built(name)[0], dtype=dtype, target="cpu")
    assert done.refusal is None and inserted(done.model, tmp_path) == 0
    assert counted(done)[:2] == (0, 0)
    own = [sum(node.op_type == "Cast" for node in nodes_of(model.graph)) for model in (built(name)[0], done.model)]
    assert own[0] == own[1], "what has a kernel among nodes without one gets no casts"


@pytest.mark.sweep(14)
@over(lambda case: case.name not in PARTED, slow=is_slow)
def test_what_it_would_insert_without_a_target_is_counted(name, tmp_path):
    plain = convert_onnx(built(name)[0])
    missing, casts = counted(convert_onnx(built(name)[0], target="cpu"))[2:]
    assert casts == inserted(plain.model, tmp_path)
    assert missing > 0


@pytest.mark.sweep(40)
@pytest.mark.parametrize(("target", "dtype"), ON_EACH)
@pytest.mark.parametrize("name", QUICK)
def test_every_node_has_a_kernel_in_its_type(name, target, dtype):
    """By the file that is written: what reads or makes the low type has a kernel for it in one of the tables."""
    providers = load_target(target)
    model = convert_onnx(built(name)[0], dtype=dtype, target=target).model
    opset = {one.domain: one.version for one in model.opset_import}
    known = types(model)
    for entry in nodes_of(model.graph):
        if entry.op_type in ("Cast", "CastLike", "If", "Loop", "Scan", "Constant", "ConstantOfShape"):
            continue
        if LOW[dtype] in {known.get(value) for value in (*entry.input, *entry.output)}:
            op = f"{entry.domain or 'onnx'}.{entry.op_type}"
            assert providers.obstacle(op, opset[entry.domain], LOW_TYPES[dtype]) is None, (entry.name, op)


def test_a_plan_names_the_line_of_the_table_and_the_tables_differ():
    source = built("mlp")[0]
    plans = {target: amp.explain(source, target=target) for target in TARGETS}
    assert plans["cpu"].low_nodes == 0 and plans["cuda"].low_nodes == amp.explain(source).low_nodes
    node = next(node for node in plans["cpu"].nodes if node.op == "onnx.MatMul")
    assert re.search(r"cpu has no fp16 kernel of onnx.MatMul at opset \d+ \(cpu.yaml:\d+\)", node.reason)


def test_an_opset_is_not_raised_for_a_type_that_the_target_has_no_kernel_for():
    """BF16 convolutions come with opset 22: CUDA has them there, the CPU in no opset."""
    source = built("resize_with_shared_initializers")[0]
    before = source.opset_import[0].version
    done = {target: convert_onnx(source, dtype="bf16", target=target) for target in ("cpu", "tensorrt")}
    opsets = {target: result.model.opset_import[0].version for target, result in done.items()}
    assert before < 22 and opsets["cpu"] == before and opsets["tensorrt"] >= 22


def test_an_opset_is_not_raised_where_other_nodes_lose_their_kernels():
    """CUDA has BF16 convolutions from opset 22 on, and no pooling of that opset."""
    nodes = [node("Conv", ["x", "w"], ["c"], "conv"), node("GlobalAveragePool", ["c"], ["y"], "pool")]
    source = model(nodes, [info("x", 1, 3, 8, 8)], [info("y", 1, 4, 1, 1)], [weight("w", 4, 3, 3, 3)], opset=20)
    done = convert_onnx(source, dtype="bf16", target="cuda")
    assert done.model.opset_import[0].version == 20 and counted(done)[0] == 0
    requested = convert_onnx(source, dtype="bf16", target="cuda", opset=22)
    assert {node.name: node.precision for node in requested.plan.nodes} == {"conv": "low", "pool": "fp32"}
    assert counted(requested)[0] == 1, "the pool falls to the CPU"


@pytest.mark.parametrize("dtype", LOW)
def test_tensorrt_keeps_quantised_pairs_whatever_the_rules_say(dtype):
    source = qdq(21)
    plain = convert_onnx(source, rules="quantized", dtype=dtype)
    done = convert_onnx(source, rules="quantized", dtype=dtype, target="tensorrt")
    pairs = [
        node for node in source.graph.node if node.op_type.endswith("quantizeLinear") or "Quantize" in node.op_type
    ]
    assert plain.changed and len(pairs) == 8
    written = {node.name: node for node in done.model.graph.node}
    assert all(written[node.name] == node for node in pairs)


@pytest.mark.sweep(14)
@pytest.mark.parametrize("name", QUICK)
def test_for_tensorrt_every_node_reads_one_floating_point_type(name):
    """A strongly typed network casts nothing by itself, so that what is FP32 has a cast on each of its borders."""
    for dtype in LOW:
        model = convert_onnx(built(name)[0], dtype=dtype, target="tensorrt").model
        known = types(model)
        for entry in nodes_of(model.graph):
            floats = {known.get(value) for value in entry.input} & {onnx.TensorProto.FLOAT, LOW[dtype]}
            assert len(floats) <= 1 or entry.op_type in ("Resize", "Dropout", "If", "Loop", "Scan"), (
                entry.name,
                entry.op_type,
            )


CNN = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4))
LAYER = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "module", "shape"), [("fp16", LAYER, (2, 5, 16)), ("bf16", CNN, (2, 3, 8, 8))])
def test_an_export_for_the_cpu_loads_and_gets_no_cast(dtype, module, shape, tmp_path):
    done = amp.export_onnx(module.eval(), (torch.randn(shape),), dtype=dtype, target="cpu")
    assert inserted(done.model, tmp_path) == 0
    assert any("(cpu.yaml:" in node.reason for node in done.plan.nodes)


@pytest.mark.long
def test_an_export_for_cuda_has_a_batch_norm_in_one_type():
    done = amp.export_onnx(CNN.eval(), (torch.randn(2, 3, 8, 8),), target="cuda")
    (norm,) = (node for node in done.model.graph.node if node.op_type == "BatchNormalization")
    assert {types(done.model)[name] for name in norm.input} == {onnx.TensorProto.FLOAT16}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"target": "gpu"}, "'gpu' is no target"),
        ({"target": "webgpu", "dtype": "bf16"}, "the target webgpu has no bf16"),
        ({"target": "directml", "dtype": "bf16"}, "the target directml has no bf16"),
    ],
)
def test_what_is_refused(options, what):
    with pytest.raises(AmpError, match=what) as error:
        convert_onnx(built("mlp")[0], **options)
    assert error.value.hint
