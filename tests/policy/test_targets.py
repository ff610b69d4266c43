"""The tables of kernels, `rules/targets/*.yaml`: what they say, and how a damaged one is refused."""

import re
from pathlib import Path

import pytest

from amp_compiler.errors import AmpError, RuleError
from amp_compiler.ir.dtypes import DType
from amp_compiler.policy.targets import TARGETS, load_target, parse_table

FOLDER = Path(__file__).parents[2] / "rules" / "targets"
FP32, FP16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16


def test_there_is_a_table_for_every_target_and_each_names_its_source():
    assert {path.stem for path in FOLDER.glob("*")} == set(TARGETS)
    for name in TARGETS:
        assert re.search(r"of onnx[\w-]* \d+\.\d+", load_target(name).tables[0].source), name


@pytest.mark.parametrize(
    ("target", "op", "opset", "dtype", "matches"),
    [
        ("cpu", "onnx.MatMul", 17, FP16, False),
        ("cpu", "onnx.MatMul", 17, FP32, True),
        ("cpu", "onnx.Transpose", 17, FP16, True),
        ("cpu", "onnx.Clip", 11, FP16, False),  # its kernel comes with opset 12
        ("cpu", "onnx.Clip", 12, FP16, True),
        ("cuda", "onnx.Conv", 21, BF16, False),
        ("cuda", "onnx.Conv", 22, BF16, True),
        ("cuda", "onnx.HardSwish", 17, FP16, True),  # ONNX writes it out in ops that have kernels
        ("directml", "onnx.Conv", 21, FP16, True),
        ("directml", "onnx.Conv", 22, FP16, False),  # registered for the version before alone
        ("webgpu", "onnx.Split", 18, FP16, False),
        ("tensorrt", "onnx.Softmax", 13, BF16, True),
        ("cuda", "com.microsoft.BiasGelu", 1, FP16, True),
    ],
)
def test_what_a_table_says(target, op, opset, dtype, matches):
    assert load_target(target).tables[0].has(op, opset, dtype) is matches


def test_why_a_node_must_not_have_a_type_names_the_line_of_the_table():
    cpu = load_target("cpu")
    reason = cpu.obstacle("onnx.MatMul", 17, FP16)
    file, line = re.search(r"\((\w+\.yaml):(\d+)\)", reason).groups()
    assert "no fp16 kernel" in reason and "onnx.MatMul:" in (FOLDER / file).read_text().splitlines()[int(line) - 1]
    assert cpu.obstacle("onnx.Transpose", 17, FP16) is None


def test_where_a_provider_has_no_kernel_at_all_the_next_one_is_asked():
    webgpu = load_target("webgpu")
    assert webgpu.obstacle("onnx.Identity", 17, FP16) is None  # the CPU runs it, and has the kernel
    assert re.search(
        r"falls from webgpu \(webgpu.yaml\): cpu has no fp16 kernel.*\(cpu.yaml:\d+\)",
        webgpu.obstacle("onnx.Sum", 17, FP16),
    )
    assert "own.Op" in load_target("cuda").obstacle("own.Op", 1, FP16)


def test_names_that_no_target_has():
    with pytest.raises(AmpError, match="'cdua' is no target") as error:
        load_target("cdua")
    assert error.value.hint == "did you mean 'cuda'?"


@pytest.mark.parametrize("target", ["directml", "webgpu"])
def test_a_type_that_a_provider_does_not_know_is_refused(target):
    with pytest.raises(AmpError, match=f"{target} has no bf16") as error:
        load_target(target, BF16)
    assert 'dtype="fp16"' in error.value.hint
    load_target("cuda", BF16)


HEAD = "source: by hand\ntypes: fp32 fp16\nkernels:\n"


@pytest.mark.parametrize(
    ("text", "what", "line"),
    [
        ("[]", "a table of kernels has the keys", 1),
        ("source: x\ntypes: fp32\nkernel: {}", "a table of kernels has the keys", 1),
        ("source: x\ntypes: fp12\nkernels: {}", "'fp12' names no type of a table", 2),
        (HEAD + "  onnx.Mattmul: {1-: fp32}\n", "'onnx.Mattmul' matches no known op", 4),
        (HEAD + "  onnx.MatMul: [fp32]\n", "types by range of opsets", 4),
        (HEAD + "  onnx.MatMul: {'1': fp32}\n", "'1' is no range of opsets", 4),
        (HEAD + "  onnx.MatMul:\n    1-: fp32 bf16\n", "'bf16' is none of the types above", 5),
        (HEAD + "  onnx.MatMul: {1-13: fp32, 13-: fp16}\n", "begins before the one above it ends", 4),
    ],
)
def test_a_damaged_table_is_refused_at_its_place(text, what, line):
    with pytest.raises(RuleError, match=re.escape(what)) as error:
        parse_table(text, "t.yaml")
    assert (error.value.file, error.value.line) == ("t.yaml", line) and error.value.hint
