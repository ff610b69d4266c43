"""What a conversion writes to: only regular files, never its input, model and data together, mode and links kept."""

import os
import socket
import stat
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper as nh
from onnx_models import copy, mlp, run_program

import amp_compiler as amp
from amp_compiler.errors import OnnxError
from amp_compiler.ir.files import PREFIX, sweep, workspace, write_atomically
from amp_compiler.onnx.convert import convert_onnx


def stored_beside(folder: Path, name: str, number: float = 1.0) -> Path:
    """A model whose data lie in a file of their own; all its numbers are one number."""
    result = mlp(64)
    for tensor in result.graph.initializer:
        tensor.CopyFrom(nh.from_array(np.full((64, 64), number, np.float32), tensor.name))
    folder.mkdir(exist_ok=True)
    onnx.save(result, folder / name, save_as_external_data=True, location=f"{name}.bin", size_threshold=0)
    return folder / name


def numbers(path: Path) -> set[float]:
    """The numbers that a model holds."""
    result = onnx.load(path)
    return {float(one) for tensor in result.graph.initializer for one in np.unique(nh.to_array(tensor))}


# ---- what is no regular file


@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "link to a pipe"])
def test_an_output_that_is_no_regular_file_is_refused(kind, tmp_path):
    target = tmp_path / "out.onnx"
    if kind == "folder":
        target.mkdir()
    elif kind == "socket":
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(target))
    elif kind == "device":
        target = Path("/dev/null")
    else:
        os.mkfifo(tmp_path / "pipe")
        target = tmp_path / "pipe"
        if kind != "pipe":
            target = tmp_path / "out.onnx"
            target.symlink_to("pipe")
    before = target.lstat().st_mode
    with pytest.raises(OnnxError, match="and not a file; name a file"):
        convert_onnx(mlp(), target)
    with pytest.raises(amp.AmpError, match="and not a file; name a file"):
        write_atomically(target, "text")
    assert target.lstat().st_mode == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(PREFIX)]


@pytest.mark.parametrize("name", ["", "a\0b.onnx", "x" * 300 + ".onnx"])
def test_a_name_that_no_file_can_have_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in (name, tmp_path / name) if name else (name,):
        with pytest.raises(OnnxError, match=r"; name a(nother)? file"):
            convert_onnx(mlp(), path)
    assert not list(tmp_path.iterdir())


def test_a_circle_of_links_is_refused(tmp_path):
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OnnxError, match="cannot write there"):
        convert_onnx(mlp(), tmp_path / "one")


def test_export_refuses_them_before_it_works(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OnnxError, match="a pipe, a device or a socket, and not a file"):
        amp.export_onnx(torch.nn.Linear(2, 2), (torch.ones(2),), tmp_path / "pipe")


# ---- mode and links


@pytest.mark.parametrize("external", [False, True])
def test_mode_and_link_of_an_output_stay(external, tmp_path):
    source = stored_beside(tmp_path / "in", "m.onnx") if external else mlp(64)
    real, link = tmp_path / "real.onnx", tmp_path / "out.onnx"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link.symlink_to("real.onnx")
    convert_onnx(source, link)
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert len(onnx.load(link).graph.node) == len(onnx.load(real).graph.node) > 3
    data = sorted(tmp_path.glob("real.onnx.*data"))
    assert len(data) == external and all(stat.S_IMODE(path.stat().st_mode) == 0o640 for path in data)


def test_a_new_output_has_the_mode_of_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        convert_onnx(stored_beside(tmp_path / "in", "m.onnx"), tmp_path / "out.onnx")
        write_atomically(tmp_path / "text", "text")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir() if path.is_file()}
    assert modes == dict.fromkeys(("out.onnx", "out.onnx.data", "text"), 0o640)


def test_a_link_to_a_file_that_is_not_there_yet_is_followed(tmp_path):
    (tmp_path / "out.onnx").symlink_to("real.onnx")
    convert_onnx(mlp(), tmp_path / "out.onnx")
    assert (tmp_path / "real.onnx").is_file() and (tmp_path / "out.onnx").is_symlink()


def test_data_beside_a_link_to_another_folder_are_refused(tmp_path):
    source = stored_beside(tmp_path / "in", "m.onnx")
    (tmp_path / "other").mkdir()
    (tmp_path / "out.onnx").symlink_to("other/real.onnx")
    with pytest.raises(OnnxError, match=r"a symbolic link to another folder .*; name the file itself"):
        convert_onnx(source, tmp_path / "out.onnx")
    assert not list((tmp_path / "other").iterdir())


# ---- model and data


def test_another_outputs_data_take_another_name_and_the_old_ones_go(tmp_path):
    out = tmp_path / "out.onnx"
    names = []
    for number in (1.0, 2.0, 3.0, 3.0):
        convert_onnx(stored_beside(tmp_path / "in", "m.onnx", number), out)
        assert numbers(out) == {number}
        (data,) = (path.name for path in tmp_path.glob("out.onnx.*"))
        names.append(data)
    assert names[0] == "out.onnx.data" and len(set(names)) == 3 and names[2] == names[3]
    convert_onnx(mlp(), out)
    assert not list(tmp_path.glob("out.onnx.*")), "a model without data takes the place of one with data"


def test_files_that_are_somebody_elses_stay(tmp_path):
    """A file of the name that the data would have, which no output reads; and data that the input reads."""
    (tmp_path / "out.onnx.data").write_bytes(b"mine")
    source = stored_beside(tmp_path / "in", "m.onnx", 2.0)
    convert_onnx(source, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").read_bytes() == b"mine" and numbers(tmp_path / "out.onnx") == {2.0}
    result = mlp(64)
    onnx.save(copy(result), tmp_path / "a.onnx", save_as_external_data=True, location="b.onnx.data", size_threshold=0)
    onnx.save(copy(result), tmp_path / "b.onnx", save_as_external_data=True, location="b.onnx.data", size_threshold=0)
    kept = (tmp_path / "b.onnx.data").read_bytes()
    convert_onnx(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert (tmp_path / "b.onnx.data").read_bytes() == kept
    assert onnx.load(tmp_path / "a.onnx").graph.initializer[0].data_type == onnx.TensorProto.FLOAT


STEPS = """
import os, sys
from pathlib import Path
from test_onnx_outputs import numbers, stored_beside
from amp_compiler.onnx.convert import convert_onnx

folder = Path(sys.argv[1])
out = folder / "out.onnx"
old, new = stored_beside(folder / "old", "m.onnx", 1.0), stored_beside(folder / "new", "m.onnx", 2.0)
armed, left = False, 0

def hook(event, arguments):
    global armed, left
    if not armed or event not in ("os.rename", "os.remove") or "out.onnx" not in str(arguments[0]):
        return
    if doing == "kill":
        left -= 1
        if left < 0:
            os._exit(9)
        return
    armed = False
    print(event, sorted(numbers(out)), flush=True)
    armed = True

sys.addaudithook(hook)
doing = "read"
convert_onnx(old, out, check=False)
armed = True
convert_onnx(new, out, check=False)
armed = False
print("end", sorted(numbers(out)))
doing = "kill"
for step in range(20):
    convert_onnx(old, out, check=False)
    child = os.fork()
    if not child:
        armed, left = True, step
        convert_onnx(new, out, check=False)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left_behind = len(list(folder.glob(".amp_compiler-*")))
    print(step, code, sorted(numbers(out)), left_behind, len(list(folder.glob("out.onnx.*"))), flush=True)
    convert_onnx(old, out, check=False)
    assert not list(folder.glob(".amp_compiler-*")) and numbers(out) == {1.0}
    assert len(list(folder.glob("out.onnx.*"))) == 1, sorted(folder.iterdir())
    if code == 0:
        break
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory) -> tuple[list[str], list[str]]:
    """What a reader sees between the steps of a conversion, and what kills between them leave."""
    lines = run_program(STEPS, tmp_path_factory.mktemp("steps")).splitlines()
    end = next(number for number, line in enumerate(lines, 1) if line.startswith("end"))
    return lines[:end], lines[end:]


def test_a_reader_between_the_steps_sees_the_old_model_or_the_new_one(steps):
    seen, _ = steps
    assert seen[-1] == "end [2.0]"
    events = [line.split(" ", 1)[1] for line in seen]
    assert len(events) >= 4 and set(events) == {"[1.0]", "[2.0]"}
    assert events == sorted(events), "never the old one again"


def test_a_kill_between_the_steps_leaves_the_old_model_or_the_new_one(steps):
    seen = [line.split() for line in steps[1]]
    assert [row[1] for row in seen] == [*["9"] * (len(seen) - 1), "0"] and len(seen) >= 4
    whole = [row[2] for row in seen]
    assert whole == sorted(whole) and set(whole) == {"[1.0]", "[2.0]"}
    assert any(int(row[3]) for row in seen), "a kill leaves its folder behind, and the next run removes it"
    assert any(int(row[4]) == 2 for row in seen), "and data that nobody reads, which the next run removes too"


# ---- folders that killed runs have left


def test_a_folder_in_use_is_not_swept_away(tmp_path):
    with workspace(tmp_path) as first, workspace(tmp_path) as second:
        sweep(tmp_path)
        assert first.is_dir() and second.is_dir() and first != second
    assert not list(tmp_path.iterdir())
    (tmp_path / f"{PREFIX}dead").mkdir()
    (tmp_path / f"{PREFIX}dead" / "half").write_bytes(b"half of a model")
    (tmp_path / f"{PREFIX}file").write_bytes(b"no folder")
    (tmp_path / "kept").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to("kept")
    write_atomically(tmp_path / "plan.json", "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{PREFIX}file", f"{PREFIX}link", "kept", "plan.json",
    ]  # fmt: skip


# ---- the shell


@pytest.mark.parametrize("place", ["in.onnx", "in.onnx.bin", "out.onnx", "out.onnx.data", "rules.yaml", "link", "pipe"])
def test_a_report_never_takes_the_place_of_another_file(place, shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stored_beside(tmp_path, "in.onnx")
    Path("rules.yaml").write_text("version: 1\nextends: default\n", encoding="utf-8")
    Path("link").symlink_to("in.onnx")
    os.mkfifo("pipe")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()}
    code, err = shell("convert", "in.onnx", "out.onnx", "--rules", "rules.yaml", "--report", place)
    assert code == 2 and "hint: " in err and ("overwrite" in err or "not a file" in err)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file() and not path.is_symlink()}
    assert after == before


@pytest.mark.parametrize("option", ["--output", "--html"])
def test_explain_does_not_overwrite_what_it_reads(option, shell, tmp_path):
    onnx.save(mlp(), tmp_path / "in.onnx")
    before = (tmp_path / "in.onnx").read_bytes()
    code, err = shell("explain", tmp_path / "in.onnx", option, tmp_path / "in.onnx")
    assert code == 2 and "it is the model, which it would overwrite" in err
    code, err = shell("explain", tmp_path / "in.onnx", "--output", tmp_path / "a", "--html", tmp_path / "a")
    assert code == 2 and "it is --output" in err
    assert (tmp_path / "in.onnx").read_bytes() == before


def test_a_result_in_memory_holds_all_its_data(tmp_path):
    path = stored_beside(tmp_path / "in", "m.onnx", 3.0)
    result = convert_onnx(path, rules={"version": 1, "rules": [{"match": {}, "precision": "fp32"}]}).model
    assert {float(nh.to_array(tensor).max()) for tensor in result.graph.initializer} == {3.0}
