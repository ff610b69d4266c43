"""Every model of the corpus, converted to FP16 and to bfloat16: valid, idempotent, accurate with true rounding."""

import functools
import hashlib
import json
import os
from collections.abc import Callable

import onnx
import pytest
from onnx_corpus import CASES, MADE, NAMES, QUICK_BF16, built
from onnx_corpus.case import Batches, Case
from onnx_models import LOW, run_program, session

from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import Conversion, convert_onnx

# Llama and T5 write out their RMS norms, with squares that are summed and leave the range of FP16. From opset 23 on
# these become one op each. In the opset of the models a cast stands before and one behind each.
WITHIN = {"llama": 10, "t5": 24}
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
BENIGN = both(lambda case: case.kind == "benign")
EVERY_IN_BOTH = both(lambda case: True, slow=lambda case: case.name in HEAVY)


def data_for(name: str) -> Batches | None:
    """Calibration data, for the models with values that may overflow; without them no plan can know."""
    case = NAMES[name]
    return built(name)[1] if case.kind in ("overflow", "outlier") and not case.slow else None


@functools.cache
def converted(name: str, dtype: str, rules: str = "default") -> Conversion:
    return convert_onnx(built(name)[0], dtype=dtype, rules=rules, calibration=data_for(name))


@functools.cache
def lean(name: str, dtype: str) -> Conversion:
    """Under `fast`, with norms that are written out as one op."""
    fused = {"opset": 23, "fuse": True} if name in WITHIN else {}
    return convert_onnx(built(name)[0], dtype=dtype, rules="fast", **fused)


def interface(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    """Names, types and shapes of inputs and outputs. The doc strings are not part of it."""
    return [(value.name, value.type.SerializeToString()) for value in (*model.graph.input, *model.graph.output)]


def test_the_corpus_is_as_large_as_it_says():
    assert len(CASES) >= 45 and len(NAMES) == len(CASES)


@pytest.mark.sweep(28)
@pytest.mark.parametrize(
    "rules", ["default", *(pytest.param(rules, marks=pytest.mark.slow) for rules in ("fast", "apex-o3", "tensorflow"))]
)
@EVERY_IN_BOTH
def test_the_output_is_valid_loads_and_is_converted_to_itself(name, dtype, rules):
    """It loads with all optimisations of ONNX Runtime: a fusion wants types that agree, whatever the rules are."""
    original, done = built(name)[0], converted(name, dtype, rules)
    result = done.model
    onnx.checker.check_model(result, full_check=True)
    onnx.shape_inference.infer_shapes(result, check_type=True, strict_mode=True, data_prop=True)
    assert interface(result) == interface(original) and done.plan.low_nodes
    low = LOW[dtype]
    other = set(LOW.values()) - {low}
    stored = {tensor.data_type for tensor in result.graph.initializer}
    assert not stored & other or name == "existing_casts"
    if dtype == "fp16":
        session(result)
    again = convert_onnx(result, dtype=dtype, rules=rules, calibration=data_for(name)).model
    assert again.SerializeToString() == result.SerializeToString()


@pytest.mark.sweep(28)
@both(lambda case: True, slow=lambda case: case.slow or case.name in HEAVY)
def test_the_error_with_true_rounding(name, dtype):
    case = NAMES[name]
    model, batches = built(name)
    if case.slow and case.kind == "overflow":
        done = convert_onnx(model, dtype=dtype, calibration=batches)
    else:
        done = converted(name, dtype)
    report = verify(model, done.model, batches)
    bound = case.error * (BFLOAT16_PER_FLOAT16 if dtype == "bf16" else 1)
    assert report.largest_error <= bound, str(report)
    assert report.first_bad is None, str(report)
    if case.kind != "odd" and not name.startswith("light"):
        assert report.largest_error > 0, "nothing was rounded"


@BENIGN
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


HASHES = """
import json
from test_onnx_corpus import digests
print(json.dumps(digests()))
"""


def digests() -> dict[str, str]:
    """Of the models that are made by hand, converted, with their plans."""
    done = {case.name: converted(case.name, "fp16") for case in MADE}
    texts = {name: one.model.SerializeToString() + one.plan.to_json().encode() for name, one in done.items()}
    return {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()}


@pytest.mark.long
def test_the_same_bytes_under_any_hash_seed():
    """Under that of this process and under another."""
    other = "8" if os.environ.get("PYTHONHASHSEED") == "7" else "7"
    assert json.loads(run_program(HASHES, PYTHONHASHSEED=other)) == digests()


# ---- `fast` on the benign models: casts at the ends alone, and around norms that stay in parts


@BENIGN
def test_casts_stand_at_the_ends(name, dtype):
    original, done = built(name)[0], lean(name, dtype)
    graph = done.model.graph
    ends = {value.name for value in (*graph.input, *graph.output)}
    own = {out for node in original.graph.node if node.op_type == "Cast" for out in node.output}
    casts = [node for node in graph.node if node.op_type == "Cast" and node.output[0] not in own]
    within = [node for node in casts if node.input[0] not in ends | own and node.output[0] not in ends]
    assert within == [], [node.name for node in within]
    assert len(casts) <= len(ends) + len(own)
    wide = [node for node in done.plan.nodes if node.precision == "fp32"]
    # A table of positions may be looked up in FP32 where what reads it rounds it at no cost.
    assert {node.family for node in wide} <= {"index", "view", "movement"}, [node.name for node in wide]


@pytest.mark.long
@pytest.mark.parametrize("name", WITHIN)
def test_what_is_fp32_in_fp16_belongs_to_a_power_where_norms_stay_in_parts(name):
    done = convert_onnx(built(name)[0], dtype="fp16", rules="fast")
    assert len([cast for cast in done.plan.casts if cast.bytes and "return" not in dict(cast.users)]) == WITHIN[name]
    wide = [node for node in done.plan.nodes if node.precision == "fp32"]
    powers = sum(node.op == "onnx.Pow" for node in wide)
    assert powers == sum(node.op_type == "Pow" for node in built(name)[0].graph.node) > 0
    assert not {"matmul", "convolution", "softmax"} & {node.family for node in wide}


@pytest.mark.sweep(8)
@BENIGN
def test_the_error_of_lean_models_keeps_its_bound(name, dtype):
    model, batches = built(name)
    report = verify(model, lean(name, dtype).model, batches)
    assert report.first_bad is None, str(report)
    assert 0 < report.largest_error <= (3e-3 if dtype == "fp16" else 2.4e-2), str(report)
