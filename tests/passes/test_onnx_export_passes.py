"""What the passes for ONNX export promise beyond their golden text: numbers and legal graphs."""

from __future__ import annotations

import torch
from fx_reader import parse_fx
from test_golden import FILES, MARK, pass_of

from amp_compiler.passes.pipeline import ONNX_CAPTURE
from amp_compiler.passes.spec import SPECS, complaint

CASE = "zero_hidden_rows/a_mask_of_truth_values"


def test_a_row_that_a_mask_hides_whole_is_zeros() -> None:
    (path,) = (path for path in FILES if f"{path.parent.name}/{path.stem}" == CASE)
    text = path.read_text(encoding="utf-8").partition(MARK)[0]
    graph = pass_of(CASE, text)(parse_fx(text)).subject
    q, mask = torch.rand(1, 2, 4, 16), torch.ones(1, 1, 4, 4, dtype=torch.bool)
    mask[0, 0, 2] = False
    (made,) = graph(q, q, q, mask)
    assert torch.equal(made, parse_fx(text)(q, q, q, mask)[0].nan_to_num())
    assert not made[0, :, 2].any() and made[0, :, 1].all()
    assert complaint(graph, SPECS["ONNX_CAPTURE"]) is None and ONNX_CAPTURE.names == ("zero_hidden_rows",)
