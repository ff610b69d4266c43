"""What the passes for ONNX export promise beyond their golden text: numbers, legal graphs, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fx_reader import parse_fx
from test_golden_fx import FILES, MARK, pass_of
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_compiler.errors import CaptureError
from amp_compiler.fx.graph import node_tensor, results_of
from amp_compiler.fx.meta import Key
from amp_compiler.passes.pipeline import ONNX_CAPTURE, ONNX_EXPORT
from amp_compiler.passes.spec import SPECS, complaint

PASSES = ("drop_idle_dropout", "write_out_attention", "fold_stored_casts", "open_ends")
CASES = {f"{path.parent.name}/{path.stem}": path for path in FILES if path.parent.name in PASSES}


def given(case: str) -> str:
    return CASES[case].read_text(encoding="utf-8").partition(MARK)[0]


def after(case: str, text: str) -> fx.GraphModule:
    made: fx.GraphModule = pass_of(case, text)(parse_fx(text)).subject
    return made


def run(graph_module: fx.GraphModule, data: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The results for the same numbers, in the types that the inputs have here."""
    values = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        wanted, name = node_tensor(node), node.meta.get(Key.STORED, node.name)
        made = data.setdefault(name, torch.randn(wanted.shape, generator=torch.Generator().manual_seed(len(data))))
        values.append(made > 0 if wanted.dtype is torch.bool else made.to(wanted.dtype))
    torch.manual_seed(5)  # for dropout
    graph_module.recompile()
    return [one for one in graph_module(*values) if one is not None]


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_near_and_the_graph_is_legal(case: str) -> None:
    """Written-out attention sums in another order; `open_ends` gives out what was cast up. Types are as told."""
    data: dict[str, torch.Tensor] = {}
    wanted = run(parse_fx(given(case)), data)
    graph = after(case, given(case))
    made = run(graph, data)
    promised = [node_tensor(item) for item in results_of(graph.graph) if item is not None]
    assert [(one.dtype, one.shape) for one in made] == [(one.dtype, one.shape) for one in promised]
    for mine, theirs in zip(made, wanted, strict=True):
        torch.testing.assert_close(mine.to(theirs.dtype), theirs, rtol=1e-5, atol=1e-6)
    before_plan = case.partition("/")[0] in ONNX_CAPTURE.names
    assert complaint(graph, SPECS["ONNX_CAPTURE" if before_plan else "ONNX_EXPORT"]) is None


def test_every_pass_stands_in_a_pipeline() -> None:
    assert {Path(path).parent.name for path in CASES.values()} == set(PASSES)
    assert {*ONNX_CAPTURE.names, *ONNX_EXPORT.names} == {*PASSES, "apply_plan", "widen_math"}


def test_a_row_that_a_mask_hides_whole_is_zeros() -> None:
    case = "write_out_attention/a_boolean_mask_and_dropout"
    text = given(case).replace("mask, 0.1", "mask, 0.0")
    data = {"mask": torch.ones(1, 1, 4, 4)}
    data["mask"][0, 0, 2] = -1.0
    (made,) = run(after(case, text), data)
    assert not made[0, :, 2].any() and made[0, :, 1].all()


def test_a_dynamic_width_needs_a_scale() -> None:
    case = "write_out_attention/scaled_by_the_width"
    graph, mode = parse_fx(given(case)), FakeTensorMode(shape_env=ShapeEnv())
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["val"] = mode.from_tensor(torch.empty(1, 2, 4, 16), static_shapes=False)
    with pytest.raises(CaptureError, match=r"width of an attention head is dynamic.*scale="):
        pass_of(case, "")(graph)
