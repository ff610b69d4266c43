"""A plan as terminal tables, as a file, and the counter that torch.autocast is measured with."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from amp_compiler.errors import AmpError
from amp_compiler.forward.autocast import CastCounter
from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan, UnusedRule
from amp_compiler.report.table import human_bytes, print_plan, summary_line


def node(name: str, precision: str = "low", **changes) -> PlannedNode:
    fields = {
        "op": "aten.linear",
        "family": "matmul",
        "module": "encoder.layer.0",
        "rule": "/home/me/rules/mine.yaml:7",
        "reason": "tensor cores run it in 16 bits; every input is low",
        "requested": precision,
        "source": "/home/me/model.py:12",
        "outputs": ((name, "bf16"),),
    }
    return PlannedNode(name=name, precision=precision, **{**fields, **changes})


def plan(*nodes: PlannedNode, casts: tuple[PlannedCast, ...] = ()) -> PrecisionPlan:
    return PrecisionPlan("bf16", "default", "cpu", nodes, casts)


MIXED = plan(
    node("linear"),
    node("relu", requested="follow", op="aten.relu", family="elementwise"),
    node("softmax", "fp32", op="aten.softmax", family="softmax", outputs=(("softmax", "fp32"),)),
    node("index", "keep", op="aten.index", family="view", rule="", module="", outputs=(("index", "i64"),)),
    casts=(
        PlannedCast("x", "fp32", "bf16", 6144, (("linear", 0),)),
        PlannedCast("relu", "bf16", "fp32", 600, (("softmax", 0), ("return", 1)), explicit=True),
    ),
)


def table_of(shown: PrecisionPlan, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_plan(shown, console)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1024**2, "1.0 MiB"), (1024**5, "1024.0 TiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def test_the_wide_table_shows_everything_of_a_node_and_the_narrow_one_no_reasons():
    narrow = table_of(replace(MIXED, unused_rules=(UnusedRule("my.yaml:4", "module=head"),)), width=100)
    assert "unused rule my.yaml:4" in narrow
    assert max(map(len, narrow.splitlines())) <= 100
    assert "mine.yaml:7" in narrow and "model.py:12" in narrow and "tensor cores" not in narrow
    text = table_of(MIXED)
    line = next(line for line in text.splitlines() if line.startswith(" relu"))
    for part in (
        "aten.relu",
        "bf16 (follow)",
        "mine.yaml:7",
        "tensor cores",
        "every input is low",
        "model.py:12",
        "encoder.layer.0",
    ):
        assert part in line


def test_the_cast_table_tells_the_models_own_casts():
    lines = table_of(MIXED).splitlines()
    assert any("x" in line and "6.0 KiB" in line and "linear[0]" in line and "the plan" in line for line in lines)
    assert any("600 B" in line and "softmax[0], return[1]" in line and "the model" in line for line in lines)


def test_the_summary_counts():
    line = summary_line(MIXED)
    assert "4 nodes (2 bf16, 1 fp32, 1 keep)" in line
    assert "2 casts (1 the model's own), 6.6 KiB" in line
    assert "0 nodes · 0 casts, 0 B a forward" in table_of(plan())


def test_names_are_not_read_as_markup(capsys):
    print_plan(plan(node("x[bold]", module="[red]m[/red]")), Console(width=200))
    shown = capsys.readouterr().out
    assert "x[bold]" in shown
    assert "[red]m[/red]" in shown


def test_to_html_names_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(AmpError, match="there is no such folder"):
        MIXED.to_html(tmp_path / "nowhere" / "a.html")


def test_the_counter_counts_float_casts_and_nothing_else():
    x = torch.ones(8)
    with CastCounter() as counter:
        low = x.to(torch.bfloat16)  # 8 * (4 + 2)
        low.to(torch.float64)  # 8 * (2 + 8)
        x.to(torch.int64)
        x.to(torch.float32)
        x.to("meta")
    assert (counter.casts, counter.cast_bytes) == (2, 48 + 80)


def test_autocast_casts_a_weight_once_a_forward():
    layer, x = torch.nn.Linear(4, 8, bias=False), torch.ones(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16), CastCounter() as counter:
        layer(x), layer(x)
    weight, inputs = 4 * 8 * 6, 3 * 4 * 6
    assert counter.cast_bytes == weight + 2 * inputs
