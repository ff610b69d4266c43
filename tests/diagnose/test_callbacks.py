"""`amp.callbacks`: lines of JSON, TensorBoard, the terminal; and what happens where they cannot write."""

import dataclasses
import json
import logging
import math
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import sgd_step
from typer.testing import CliRunner

import amp_compiler as amp
from amp_compiler.cli.main import app
from amp_compiler.diagnose.callbacks import JSONLines, StepRecord, TensorBoard, Terminal, read_run


def record(step: int, **changed: Any) -> StepRecord:
    values = {
        "time": 1000.0 + step, "loss": 1.0 / step, "loss_scale": 8.0, "skipped_steps": 0, "grad_norm": 2.0,
        "dtype": "fp16", "zero": 0.25, "subnormal": 0.125, "infinite": 0.0,
    }  # fmt: skip
    return StepRecord(step, **{**values, **changed})


def step_of(*callbacks: amp.callbacks.Callback) -> amp.TrainingStep:
    torch.manual_seed(0)
    return sgd_step(torch.nn.Linear(4, 1), lambda m, x: m(x).square().mean(), dtype="fp16", callbacks=callbacks)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files can grow no further, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "one",
    [
        record(1),
        record(2, loss=math.inf, grad_norm=-math.inf, milliseconds=0.5, memory=1 << 33),
        record(3, aux={"right": 0.5, "odd name\n": math.inf}),
    ],
    ids=["plain", "infinite", "aux"],
)
def test_a_record_is_a_line_of_strict_json(one: StepRecord) -> None:
    line = one.to_json()
    assert "\n" not in line
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert StepRecord.from_json(line) == one
    assert StepRecord.from_json(line.replace("{", '{"later": 1, ', 1)) == one  # a key of a later version
    assert math.isnan(StepRecord.from_json(record(1, loss=math.nan).to_json()).loss)


def test_lines_are_whole_at_every_moment(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    step = step_of(JSONLines(path, every=2))
    for number in range(1, 7):
        step(torch.ones(2, 4))
        text = path.read_text()
        assert text.count("\n") == number // 2 and (not text or text.endswith("\n"))
    run = read_run(path)
    assert [one.step for one in run.records] == [2, 4, 6] and run.notes == ()


def test_a_killed_run_leaves_its_lines_and_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    code = (
        "import os, signal, sys\n"
        "sys.path[:0] = sys.argv[2:]\n"
        "from test_callbacks import JSONLines, record\n"
        "writer = JSONLines(sys.argv[1])\n"
        "for step in range(1, 6):\n    writer.on_step(record(step))\n"
        "open(sys.argv[1], 'a').write(record(6).to_json()[:50])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code, path, here, here.parent], check=False)
    assert done.returncode == -9
    torn = read_run(path)
    assert [one.step for one in torn.records] == [1, 2, 3, 4, 5]
    assert len(torn.notes) == 1 and "line 6 is no record" in torn.notes[0]
    writer = JSONLines(path)
    writer.on_step(record(4, loss=0.5))  # from a checkpoint behind step 3
    writer.on_step(record(5, loss=0.25))
    run = read_run(path)
    assert [(one.step, one.loss) for one in run.records] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.5), (5, 0.25)]
    assert [note.split(" (")[0].split(":")[0] for note in run.notes] == [
        "line 6 is no record and is left out", "line 7 goes on from step 4",
    ]  # fmt: skip


def test_a_full_disk_is_told_and_its_line_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    writer = JSONLines(path)
    writer.on_step(record(1))
    with largest_file(path.stat().st_size + 20):  # a part of the next line has room
        for step in (2, 3):
            writer.on_step(record(step))
    assert [one.levelno for one in caplog.records] == [logging.WARNING]  # once
    assert "run.jsonl cannot be written: File too large; the training goes on without it" in caplog.text
    writer.on_step(record(4))
    assert "run.jsonl is written again; 2 records are missing" in caplog.text
    assert [one.step for one in read_run(path).records] == [1, 4]


def test_a_training_goes_on_where_nothing_can_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.jsonl"
    step, plain = step_of(JSONLines(path)), step_of()
    with largest_file(0):
        losses = [float(step(torch.ones(2, 4))) for _ in range(3)]
    assert losses == [float(plain(torch.ones(2, 4))) for _ in range(3)]
    assert path.read_text() == "" and "cannot be written" in caplog.text


@pytest.mark.parametrize(("place", "message"), [(".", "it is a folder"), ("none/run.jsonl", "there is no such folder")])
def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path, place: str, message: str) -> None:
    with pytest.raises(amp.AmpError, match=message):
        JSONLines(tmp_path / place)
    pytest.importorskip("tensorboard", reason="an optional library")
    (tmp_path / "file").write_text("")
    with pytest.raises(amp.AmpError, match="it cannot be written"):
        TensorBoard(tmp_path / "file" / place)


def test_files_that_are_no_runs_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("3\n")
    with pytest.raises(amp.AmpError, match="no record of a step"):
        read_run(tmp_path / "a.jsonl")
    with pytest.raises(amp.AmpError, match="cannot be read: No such file"):
        read_run(tmp_path / "b.jsonl")


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    whole = record(1).to_json()
    wrong = [whole.replace('"step":1,', f'"step":{step},') for step in ('"Infinity"', '"NaN"', "1e999", "true", "null")]
    wrong += [whole.replace('"time":', f'"time":{"9" * 400}'), "[" * 100_000]
    (tmp_path / "a.jsonl").write_text("\n".join([*wrong, whole, ""]))
    result = read_run(tmp_path / "a.jsonl")
    assert [one.step for one in result.records] == [1] and len(result.notes) == len(wrong)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = accumulator.EventAccumulator(str(folder))
    result.Reload()
    return {name: [(one.step, one.value) for one in result.Scalars(name)] for name in result.Tags()["scalars"]}


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="an optional library")
    writer = TensorBoard(tmp_path / "runs" / "x")
    for step in (1, 2):
        writer.on_step(record(step, aux={"right": 0.5}, milliseconds=4.0))
        assert [one for one, _ in events(tmp_path / "runs" / "x")["loss"]] == list(range(1, step + 1))  # not buffered
    writer.close()
    result = events(tmp_path / "runs" / "x")
    assert result["loss"] == [(1, 1.0), (2, 0.5)] and result["aux/right"] == [(1, 0.5), (2, 0.5)]
    assert result["amp/zero_in_fp16"] == [(1, 0.25), (2, 0.25)] and result["speed/milliseconds"][0] == (1, 4.0)
    assert {"grad_norm", "amp/loss_scale", "amp/skipped_steps", "amp/infinite_in_fp16"} <= result.keys()
    resumed = TensorBoard(tmp_path / "runs" / "x")
    resumed.on_step(record(2, loss=7.0))
    resumed.close()
    assert events(tmp_path / "runs" / "x")["loss"] == [(1, 1.0), (2, 7.0)]  # what stood behind step 1 is hidden


def test_without_tensorboard_the_fix_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(amp.AmpError, match="TensorBoard is not installed; pip install tensorboard"):
        TensorBoard(tmp_path)


def test_a_record_is_a_line_of_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    view = Terminal()
    for step in (1, 2):
        view.on_step(record(step, aux={"right": 0.5}, memory=3 << 20))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[1].startswith("step      2  loss 0.5  right 0.5  grad norm 2  scale 8  skipped 0")
    assert "fp16: zero 25.0%" in lines[0] and lines[0].endswith("MiB 3")


@pytest.mark.usefixtures("node_by_node")
def test_what_the_page_shows_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = (Path(__file__).parents[2] / "docs" / "live.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(block, scope)
    assert [one.step for one in read_run("run.jsonl").records] == list(range(10, 101, 10))
    assert capsys.readouterr().out.count("step ") == 10
    for name in ("scaled", "unscaled"):  # which the example writes
        Path(f"{name}.jsonl").write_bytes(Path("run.jsonl").read_bytes())
    for line in re.findall(r"^amp-compiler (.*)$", text, flags=re.MULTILINE):
        assert CliRunner().invoke(app, shlex.split(line, comments=True)).exit_code == 0
    assert Path("run.png").stat().st_size and Path("runs.svg").stat().st_size
    keys = set(re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE))
    message = {name for key in keys for name in re.findall(r"`(\w+)`", key)}
    assert message | {"dtype"} == {one.name for one in dataclasses.fields(StepRecord)}


def test_a_run_that_goes_back_behind_the_end_of_its_file_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        step = step_of(JSONLines(path))
        for _ in range(3):
            step(torch.ones(2, 4))
        path.write_text(path.read_text() + '{"torn')
    (said,) = [one.getMessage() for one in caplog.records if "run.jsonl" in one.getMessage()]
    assert "up to step 3" in said and "from step 1" in said
    assert [one.step for one in read_run(path).records] == [1, 2, 3]
