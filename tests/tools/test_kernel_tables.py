"""`tools/kernel_tables.py`, as far as it goes without the package of ONNX Runtime for the CPU alone."""

import importlib.util
from pathlib import Path

SPEC = importlib.util.spec_from_file_location("kernel_tables", Path(__file__).parents[2] / "tools" / "kernel_tables.py")


def test_ops_of_onnx_runtime_itself_have_their_lines():
    tables = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(tables)
    kernel = tables.Kernel(1, tables.OPEN, {"T": {"tensor(float)", "tensor(float16)"}})
    result = list(tables.lines({("com.microsoft", "FastGelu"): [kernel]}, ["fp32", "fp16"]))
    assert result[0] == "  com.microsoft.FastGelu: {1-: fp32 fp16}\n"
