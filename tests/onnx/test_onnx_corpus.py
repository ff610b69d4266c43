"""Every model of the corpus, converted to FP16 and to bfloat16: valid, idempotent, accurate with true rounding."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from onnx_corpus import CASES, MADE, NAMES, QUICK_BF16, built
from onnx_corpus.case import Batches, Case

from amp_compiler.onnx.check.verify import VerifyReport, verify
from amp_compiler.onnx.convert import Conversion, convert_onnx
from amp_compiler.onnx.model.walk import proto_bodies

BFLOAT16_PER_FLOAT16 = 8  # three bits of precision fewer


def marks(case: Case, dtype: str = "fp16", *, slow: bool = False) -> list[pytest.MarkDecorator]:
    """Those that are not made by hand take seconds to make."""
    slow = slow or (dtype == "bf16" and case.name not in QUICK_BF16)
    return [pytest.mark.long] * (case not in MADE) + [pytest.mark.slow] * slow


def over(wanted: Callable[[Case], object], slow: Callable[[Case], bool] = lambda case: False) -> pytest.MarkDecorator:
    """The cases that are wanted."""
    chosen = [pytest.param(case.name, marks=marks(case, slow=slow(case))) for case in CASES if wanted(case)]
    return pytest.mark.parametrize("name", chosen)


def both(wanted: Callable[[Case], object], slow: Callable[[Case], bool] = lambda case: False) -> pytest.MarkDecorator:
    """The cases that are wanted, in both types."""
    chosen = [
        pytest.param(case.name, dtype, marks=marks(case, dtype, slow=slow(case)))
        for case in CASES
        if wanted(case)
        for dtype in ("fp16", "bf16")
    ]
    return pytest.mark.parametrize(("name", "dtype"), chosen)


# Seconds each to convert; of the other light models some join branches too, and some have batch norms.
HEAVY = ("light_densenet121", "light_inception_v2")
EVERY = over(lambda case: True, slow=lambda case: case.name in HEAVY)
EVERY_IN_BOTH = both(lambda case: True, slow=lambda case: case.name in HEAVY)


def data_for(name: str) -> Batches | None:
    """Calibration data, for the models with values that may overflow; without them no plan can know."""
    case = NAMES[name]
    return built(name)[1] if case.kind in ("overflow", "outlier") and not case.slow else None


@functools.cache
def converted(name: str, dtype: str, rules: str = "default") -> Conversion:
    return convert_onnx(built(name)[0], dtype=dtype, rules=rules, calibration=data_for(name))


def report_of(name: str, dtype: str) -> VerifyReport:
    model, batches = built(name)
    case = NAMES[name]
    if case.slow and case.kind == "overflow":
        done = convert_onnx(model, dtype=dtype, calibration=batches)
    else:
        done = converted(name, dtype)
    return verify(model, done.model, batches)


def assert_sorted(graph: onnx.GraphProto, outer: frozenset[str] = frozenset()) -> None:
    """Every value is made before it is read, in bodies too, and once."""
    known = set(outer)
    known.update(value.name for value in graph.input)
    known.update(tensor.name for tensor in graph.initializer)
    made: set[str] = set()
    for node in graph.node:
        for name in node.input:
            assert not name or name in known, f"{node.name} reads {name} before it is made"
        for body in proto_bodies(node).values():
            assert_sorted(body, frozenset(known))
        for name in node.output:
            if name:
                assert name not in made, f"{name} is made twice"
                made.add(name)
                known.add(name)
    assert all(value.name in known for value in graph.output)


def interface(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    """Names, types and shapes of inputs and outputs. The doc strings are not part of it."""
    return [(value.name, value.type.SerializeToString()) for value in (*model.graph.input, *model.graph.output)]


def test_the_corpus_is_as_large_as_it_says():
    assert len(CASES) >= 45 and len(NAMES) == len(CASES)


@pytest.mark.parametrize("name", [case.name for case in MADE])
def test_builders_repeat(name):
    first, second = NAMES[name].build(), NAMES[name].build()
    assert first[0].SerializeToString() == second[0].SerializeToString()


@pytest.mark.sweep(28)
@EVERY_IN_BOTH
def test_the_output_is_valid(name, dtype):
    original, made = built(name)[0], converted(name, dtype).model
    onnx.checker.check_model(made, full_check=True)
    onnx.shape_inference.infer_shapes(made, check_type=True, strict_mode=True, data_prop=True)
    assert_sorted(made.graph)
    assert interface(made) == interface(original)
    low = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype]
    other = {TensorProto.FLOAT16, TensorProto.BFLOAT16} - {low}
    stored = {tensor.data_type for tensor in made.graph.initializer}
    assert not stored & other or name == "existing_casts"


@pytest.mark.sweep(14)
@pytest.mark.parametrize(
    "rules", ["default", *(pytest.param(rules, marks=pytest.mark.slow) for rules in ("fast", "apex-o3", "tensorflow"))]
)
@EVERY
def test_the_fp16_output_loads_in_onnxruntime(name, rules):
    """With all of its optimisations: a fusion wants types that agree, whatever the rules are."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # more wait by spinning
    model = converted(name, "fp16", rules).model
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == [output.name for output in model.graph.output]


@pytest.mark.sweep(28)
@EVERY_IN_BOTH
def test_converting_again_changes_nothing(name, dtype):
    made = converted(name, dtype).model
    again = convert_onnx(made, dtype=dtype, calibration=data_for(name)).model
    assert again.SerializeToString() == made.SerializeToString()


@pytest.mark.sweep(28)
@both(lambda case: True, slow=lambda case: case.slow or case.name in HEAVY)
def test_the_error_with_true_rounding(name, dtype):
    case = NAMES[name]
    report = report_of(name, dtype)
    bound = case.error * (BFLOAT16_PER_FLOAT16 if dtype == "bf16" else 1)
    assert report.largest_error <= bound, str(report)
    assert report.first_bad is None, str(report)
    if case.kind != "odd" and not name.startswith("light"):
        assert report.largest_error > 0, "nothing was rounded"


@both(lambda case: case.kind == "benign")
def test_on_benign_models_nothing_is_fp32_without_a_cause(name, dtype):
    """FP32 are norms (written out ones as a whole), softmax, long sums, powers and upsampling, and what moves such.

    Powers and upsampling are on autocast's list of FP32 ops.
    """
    plan = converted(name, dtype).plan
    for node in (node for node in plan.nodes if node.precision == "fp32"):
        if node.requested in ("widest", "follow"):
            assert node.family in ("view", "movement", "index", "reduction"), (node.name, node.reason)
        elif "range" not in node.reason and not node.reason.startswith(("part of one normalisation", "part of a norm")):
            denied = ("normalization", "softmax", "reduction", "loss", "resample", "transcendental")
            assert node.rule and node.family in denied, (node.name, node.reason)
    low = sum(node.precision == "low" for node in plan.nodes if node.family in ("matmul", "convolution"))
    assert low == sum(node.family in ("matmul", "convolution") for node in plan.nodes if node.precision != "keep") > 0


@over(lambda case: case.low_share)
def test_an_overflow_costs_few_nodes(name):
    plan = converted(name, "fp16").plan
    counted = [node for node in plan.nodes if node.precision != "keep"]
    share = plan.low_nodes / len(counted)
    kept = [f"{node.name}: {node.reason}" for node in counted if node.precision != "low"]
    assert share >= NAMES[name].low_share, "\n".join(kept)


@both(lambda case: case.kind in ("overflow", "outlier") and not case.slow)
def test_without_calibration_the_result_is_valid(name, dtype):
    """How accurate it is then depends on the model; bfloat16 has FP32's range and needs no data."""
    model, batches = built(name)
    done = convert_onnx(model, dtype=dtype)
    onnx.checker.check_model(done.model, full_check=True)
    if dtype == "bf16":
        assert verify(model, done.model, batches).largest_error <= NAMES[name].error * BFLOAT16_PER_FLOAT16


@both(lambda case: case.low_weights)
def test_the_size_halves(name, dtype):
    model = built(name)[0]
    assert converted(name, dtype).model.ByteSize() <= 0.52 * model.ByteSize()


HASHES = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
from onnx_corpus import MADE
from amp_compiler.onnx.convert import convert_onnx
digests = {}
for case in MADE:
    model, batches = case.build()
    done = convert_onnx(model, dtype="fp16", calibration=batches if case.kind in ("overflow", "outlier") else None)
    text = done.model.SerializeToString() + done.plan.to_json().encode()
    digests[case.name] = hashlib.sha256(text).hexdigest()
print(json.dumps(digests))
"""


@pytest.mark.long
def test_the_same_bytes_under_any_hash_seed():
    """Under that of this process and under another."""
    other = "8" if os.environ.get("PYTHONHASHSEED") == "7" else "7"
    done = subprocess.run(
        [sys.executable, "-c", HASHES, str(Path(__file__).parents[1])],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": other},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    mine = {}
    for case in MADE:
        one = converted(case.name, "fp16")
        text = one.model.SerializeToString() + one.plan.to_json().encode()
        mine[case.name] = hashlib.sha256(text).hexdigest()
    assert json.loads(done.stdout) == mine
