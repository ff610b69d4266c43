"""ONNX files: converted, exported, planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from amp_compiler.errors import OnnxError

_PACKAGES = {"onnx", "onnx_ir", "onnxscript", "onnxruntime", "google"}  # the last one is protobuf


@contextmanager
def needs_onnx() -> Iterator[None]:
    """Within it a package that the extra `onnx` has is missed with the extra's name.

    Raises:
        OnnxError: it is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as cause:
        package = (cause.name or "").partition(".")[0]
        if package not in _PACKAGES:
            raise
        hint = "pip install 'amp_compiler[onnx]'" + (", or onnxruntime-gpu" if package == "onnxruntime" else "")
        name = "protobuf" if package == "google" else package
        what = f"{name} is not installed, which ONNX models and nets of Caffe need"
        raise OnnxError(what, hint=hint) from cause
