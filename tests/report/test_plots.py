"""A recorded run as a picture, and the command that draws it."""

import math
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import amp_compiler as amp
from amp_compiler.cli.main import app
from amp_compiler.ir.run_file import StepRecord
from amp_compiler.report.plots import draw_runs

matplotlib = pytest.importorskip("matplotlib", reason="an optional library")
PANELS = (
    "loss", "gradient norm", "loss scale, ▾ behind skipped steps", "gradients in fp16, % of all elements",
    "milliseconds a step", "most memory so far, MiB",
)  # fmt: skip


def run(count: int) -> list[StepRecord]:
    return [
        StepRecord(
            step, 1000.0 + step, loss=1.0 / step, grad_norm=2.0 / step, loss_scale=2.0 ** (16 - step // 4),
            skipped_steps=step // 4, dtype="fp16", zero=0.25, subnormal=0.01 * step, infinite=0.0,
            milliseconds=None if step == 1 else 4.0, memory=1 << 30,
        )
        for step in range(1, count + 1)
    ]  # fmt: skip


def texts(path: Path) -> list[str]:
    root = ElementTree.parse(path).getroot()
    return ["".join(one.itertext()).strip() for one in root.iter("{http://www.w3.org/2000/svg}text")]


def test_every_quantity_has_a_panel(tmp_path: Path) -> None:
    draw_runs({"a": run(9), "b": run(5)}, tmp_path / "run.svg")
    result = texts(tmp_path / "run.svg")
    assert set(PANELS) <= set(result) and {"a", "b", "zero", "subnormal", "infinite or NaN", "step"} <= set(result)
    draw_runs({"a": run(1)}, tmp_path / "run.svg")
    assert not {"milliseconds a step", "a"} & set(texts(tmp_path / "run.svg"))  # what a run has not takes no panel


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_same_run_gives_the_same_file(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 9.0)  # a user's own setting counts for none of it
    pictures = []
    for name in ("a", "b"):
        draw_runs({"run": run(9)}, tmp_path / f"{name}.{kind}")
        pictures.append((tmp_path / f"{name}.{kind}").read_bytes())
    assert pictures[0] == pictures[1]
    assert matplotlib.rcParams["lines.linewidth"] == 9.0


def test_a_point_between_gaps_is_drawn(tmp_path: Path) -> None:
    """A line leads to none of them: only a marker shows that they are there."""
    marks = []
    for lost in ((), (2,), (2, 4)):  # between 2 and 4 stands 3 alone
        records = [replace(one, loss=math.nan) if one.step in lost else one for one in run(6)]
        draw_runs({"a": records}, tmp_path / "run.svg")
        root = ElementTree.parse(tmp_path / "run.svg").getroot()
        panel = next(one for one in root.iter("{http://www.w3.org/2000/svg}g") if one.get("id") == "axes_1")
        lines = [one for one in panel if one.get("id", "").startswith("line2d")]
        marks.append(sum(len(list(one.iter("{http://www.w3.org/2000/svg}use"))) for one in lines))
    assert marks == [0, 1, 2]  # 1 is alone once 2 is lost


@pytest.mark.parametrize("names", ["abc", "abcdefghijkl"])
def test_no_curve_hides_another(tmp_path: Path, names: str) -> None:
    """Of curves that lie on one another the lower ones are wider, or the upper ones let them through."""
    same = [replace(one, zero=0.0, subnormal=0.0, skipped_steps=0) for one in run(9)]
    draw_runs(dict.fromkeys(names, same), tmp_path / "run.svg")
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    on_one_another: dict[tuple[int, str], list[dict[str, str]]] = {}
    for panel in range(1, 7):
        (axes,) = (one for one in root.iter("{http://www.w3.org/2000/svg}g") if one.get("id") == f"axes_{panel}")
        for path in axes.iter("{http://www.w3.org/2000/svg}path"):
            style = dict(part.split(": ") for part in path.get("style", "").split("; ") if ": " in part)
            if "clip-path" in path.attrib and style["stroke"] != "#b0b0b0":
                on_one_another.setdefault((panel, path.get("d", "")), []).append(style)
    assert [len(styles) for styles in on_one_another.values()] == [len(names)] * 3 + [3 * len(names)] + [len(names)] * 2
    for styles in on_one_another.values():
        for number, above in enumerate(styles):
            for below in styles[:number]:
                wider = float(below["stroke-width"]) > float(above["stroke-width"])
                assert wider or float(above.get("stroke-opacity", 1)) < 1


def test_what_draws_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(amp.AmpError, match="'txt' is no kind of picture"):
        draw_runs({"a": run(3)}, tmp_path / "run.txt")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(amp.AmpError, match="matplotlib is not installed, which draws runs; pip install matplotlib"):
        draw_runs({"a": run(3)}, tmp_path / "run.png")


def test_the_command_draws_several_runs(tmp_path: Path) -> None:
    for name, count in (("a", 9), ("b", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.jsonl").write_text("".join(one.to_json() + "\n" for one in run(count)) + '{"step": ')
    files = [str(tmp_path / name / "run.jsonl") for name in "ab"]
    done = CliRunner().invoke(app, ["plot", *files, "-o", str(tmp_path / "both.svg")])
    assert done.exit_code == 0, done.output
    assert "a/run.jsonl 9" in done.output and "note: " in done.output and "line 10 is no record" in done.output
    assert set(files) <= set(texts(tmp_path / "both.svg"))  # the names of the files alone are the same
    done = CliRunner().invoke(app, ["plot", files[0]])
    assert (tmp_path / "a" / "run.png").exists()


def test_signs_of_formulas_are_letters(tmp_path: Path) -> None:
    named = [replace(one, aux={"$a_$": 1.0 * one.step, "$5 or $6": 2.0}) for one in run(3)]
    draw_runs({"$x^$": named, "$y$": run(2)}, tmp_path / "run.svg")
    assert {"$a_$", "$5 or $6", "$x^$", "$y$"} <= set(texts(tmp_path / "run.svg"))


def test_the_command_overwrites_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.svg").write_text(run(1)[0].to_json() + "\n")
    done = CliRunner().invoke(app, ["plot", str(tmp_path / "run.svg"), "-o", str(tmp_path / "run.svg")])
    assert isinstance(done.exception, amp.AmpError) and "which it would overwrite" in str(done.exception)
    assert (tmp_path / "run.svg").read_text().startswith("{")
