"""The passes for ONNX export: golden text, whose input is a file, and what their contract promises.

`tests/golden/<pass>/*.txt` holds a graph in the text form of `fx.text`, a line `---`, and the graph that the pass makes
of it. A first line `# low=fp16 opset=20` says the options. `AMP_REGENERATE=1` writes the second graph anew: read it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from amp_compiler.errors import CaptureError
from amp_compiler.fx.graph import node_tensor
from amp_compiler.fx.meta import Key
from amp_compiler.fx.text import format_fx, parse_fx
from amp_compiler.ir.dtypes import dtype_from_short
from amp_compiler.passes import find_pass
from amp_compiler.passes.pipeline import ONNX_CAPTURE, ONNX_EXPORT
from amp_compiler.passes.spec import SPECS, complaint

GOLDEN = Path(__file__).parents[1] / "golden"
MARK = "---\n"
NAMES = ("drop_idle_dropout", "write_out_attention", "fold_stored_casts", "open_ends")
FILES = {f"{name}/{path.stem}": path for name in NAMES for path in sorted((GOLDEN / name).glob("*.txt"))}
READ = {"low": dtype_from_short, "opset": int}


def given(case: str) -> tuple[Any, str, str]:
    """The pass with its options, the text that goes in and the text that comes out."""
    before, _, after = FILES[case].read_text(encoding="utf-8").partition(MARK)
    first = before.splitlines()[0].removeprefix("# ") if before.startswith("# ") else ""
    pairs = [one.split("=") for one in first.split()]
    return find_pass(case.partition("/")[0])(**{name: READ[name](text) for name, text in pairs}), before, after


def graph_of(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def values(graph_module: fx.GraphModule, data: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of the types that the graph has, of the same numbers for the same data."""
    found = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        wanted = node_tensor(node)
        name = node.meta.get(Key.STORED, node.name)
        made = data.setdefault(name, torch.randn(wanted.shape, generator=torch.Generator().manual_seed(len(data))))
        found.append(made > 0 if wanted.dtype is torch.bool else made.to(wanted.dtype))
    return found


def run(graph_module: fx.GraphModule, data: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(5)  # for dropout
    graph_module.recompile()
    return [one for one in graph_module(*values(graph_module, data)) if one is not None]


@pytest.mark.parametrize("case", FILES)
def test_golden(case: str) -> None:
    chosen, before, after = given(case)
    graph = parse_fx(before)
    assert format_fx(graph) == graph_of(before)  # the file says all that the graph knows
    result = chosen(graph)
    found = format_fx(result.subject)
    if os.environ.get("AMP_REGENERATE"):
        FILES[case].write_text(before + MARK + found, encoding="utf-8")
    else:
        assert found == after
    assert result.modified is not case.endswith("left_alone")
    assert not chosen(result.subject).modified  # twice is once


@pytest.mark.parametrize("case", FILES)
def test_the_numbers(case: str) -> None:
    """Equal to the bit where the pass is exact, near where it is not; every fake tensor tells the truth."""
    chosen, before, _ = given(case)
    data: dict[str, torch.Tensor] = {}
    wanted = run(parse_fx(before), data)
    graph = chosen(parse_fx(before)).subject
    made = run(graph, data)
    promised = [node_tensor(item) for item in graph.graph.output_node().args[0] if item is not None]
    assert [(one.dtype, one.shape) for one in made] == [(one.dtype, one.shape) for one in promised]
    for mine, theirs in zip(made, wanted, strict=True):
        if chosen.exact:
            assert torch.equal(mine, theirs)
        else:  # open_ends gives out what was cast up; written-out attention sums in another order
            torch.testing.assert_close(mine.to(theirs.dtype), theirs, rtol=1e-5, atol=1e-6)
    legal = SPECS["ONNX_CAPTURE" if chosen.name in ONNX_CAPTURE.names else "ONNX_EXPORT"]
    assert complaint(graph, legal) is None


def test_every_pass_has_a_case_left_alone_and_stands_in_a_pipeline() -> None:
    for name in NAMES:
        cases = [case for case in FILES if case.startswith(f"{name}/")]
        assert len(cases) >= 2 and sum(case.endswith("left_alone") for case in cases) == 1
    assert {*ONNX_CAPTURE.names, *ONNX_EXPORT.names} == {*NAMES, "apply_plan"}


def test_a_row_that_a_mask_hides_whole_is_zeros() -> None:
    chosen, before, _ = given("write_out_attention/a_boolean_mask_and_dropout")
    graph = chosen(parse_fx(before.replace("mask, 0.1", "mask, 0.0"))).subject
    data: dict[str, torch.Tensor] = {}
    values(graph, data)
    data["mask"][0, 0, 2] = -1.0
    (made,) = run(graph, data)
    assert not made[0, :, 2].any() and made[0, :, 1].all()


def test_a_dynamic_width_needs_a_scale() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    chosen, before, _ = given("write_out_attention/scaled_by_the_width")
    graph = parse_fx(before)
    mode = torch._subclasses.fake_tensor.FakeTensorMode(shape_env=ShapeEnv())
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["val"] = mode.from_tensor(torch.empty(1, 2, 4, 16), static_shapes=False)
    with pytest.raises(CaptureError, match=r"width of an attention head is dynamic.*scale="):
        chosen(graph)
