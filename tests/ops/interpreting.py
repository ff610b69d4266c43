"""Triton's interpreter made to do as a device does; for the files that run under TRITON_INTERPRET=1."""

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter


def convert_as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round from FP32 to BF16, where it drops bits; and take an array of one element for a number in Triton 3.6 too."""
    truncate = interpreter.InterpreterBuilder.cast_impl
    in_python = interpreter._patch_lang_tensor

    def cast(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy()
            return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)
        return truncate(self, src, dst_type)

    def numbers_in_python(tensor, scope):
        in_python(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", numbers_in_python)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", cast)
