"""`fast` on the benign ONNX models of the corpus: casts at the ends alone, and around norms that stay in parts."""

import functools
from collections.abc import Callable

import pytest
from onnx_corpus import CASES, MADE, QUICK_BF16, built

from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import Conversion, convert_onnx

BENIGN = [case for case in CASES if case.kind == "benign"]
# Llama and T5 write out their RMS norms, with squares that are summed and leave the range of FP16. From opset 23 on
# these become one op each. In the opset of the models a cast stands before and one behind each.
WITHIN = {"llama": 10, "t5": 24}


def in_both(wanted: Callable[[str, str], bool] = lambda name, dtype: True) -> pytest.MarkDecorator:
    """The benign models in both types, where wanted."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(
                case.name,
                dtype,
                marks=[pytest.mark.long] * (case not in MADE)
                + [pytest.mark.slow] * (dtype == "bf16" and case.name not in QUICK_BF16),
            )
            for case in BENIGN
            for dtype in ("fp16", "bf16")
            if wanted(case.name, dtype)
        ],
    )


@functools.cache
def converted(name: str, dtype: str) -> Conversion:
    fused = {"opset": 23, "fuse": True} if name in WITHIN else {}
    return convert_onnx(built(name)[0], dtype=dtype, rules="fast", **fused)


@in_both()
def test_casts_stand_at_the_ends(name, dtype):
    original, done = built(name)[0], converted(name, dtype)
    graph = done.model.graph
    ends = {value.name for value in (*graph.input, *graph.output)}
    own = {out for node in original.graph.node if node.op_type == "Cast" for out in node.output}
    casts = [node for node in graph.node if node.op_type == "Cast" and node.output[0] not in own]
    within = [node for node in casts if node.input[0] not in ends | own and node.output[0] not in ends]
    assert within == [], [node.name for node in within]
    assert len(casts) <= len(ends) + len(own)


@in_both()
def test_nothing_that_computes_is_fp32(name, dtype):
    wide = [node for node in converted(name, dtype).plan.nodes if node.precision == "fp32"]
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
@in_both()
def test_the_error_keeps_its_bound(name, dtype):
    model, batches = built(name)
    report = verify(model, converted(name, dtype).model, batches)
    assert report.first_bad is None, str(report)
    assert 0 < report.largest_error <= (3e-3 if dtype == "fp16" else 2.4e-2), str(report)
