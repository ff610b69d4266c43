"""What one process has compiled, another one loads: nothing is compiled or traced again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.compiler._cache import CacheArtifactManager

import amp_compiler as amp
from amp_compiler.fx import cache_file
from amp_compiler.ops.cache_folder import cache_folder
from amp_compiler.ops.cpu.build import library

RUN = """
import json, os, sys, torch, amp_compiler as amp
from amp_compiler.passes.step.differentiate import Differentiate
from torch._inductor.cpp_builder import CppBuilder
path, what, backend = sys.argv[1:]
if what == "load":
    amp.load_cache(path)
done = []
def noted(owner, name, note):
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *args: done.append(note(self)) or original(self, *args))
noted(Differentiate, "_traced", lambda _: "trace")
noted(CppBuilder, "build", CppBuilder.get_target_file_path)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
step = amp.training_step(model, lambda m, x: m(x).square().mean(), optimizer, dtype="bf16", backend=backend)
losses = [step(torch.ones(4, 8)).item() for _ in range(2)]
if what == "save":
    amp.save_cache(path)
# Headers that torch compiles once per machine lie outside of its cache folder.
done = ["library" if one.startswith(os.environ["TORCHINDUCTOR_CACHE_DIR"]) else one for one in done]
print(json.dumps([losses, sorted({*done} & {"trace", "library"})]))
"""


def run(folder, what, backend):
    settings = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / what / "torch"),
        "AMP_COMPILER_CACHE": str(folder / what / "ours"),
        "PYTHONHASHSEED": {"save": "7", "load": "8"}[what],
    }
    command = [sys.executable, "-P", "-c", RUN, str(folder / "model.cache"), what, backend]
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_second_process_with_empty_folders_makes_nothing_anew(tmp_path, backend):
    loops = Path(library()._name)
    (tmp_path / "save" / "ours").mkdir(parents=True)
    (tmp_path / "save" / "ours" / loops.name).symlink_to(loops)  # another process would compile them anew
    losses, result = run(tmp_path, "save", backend)
    assert result == (["trace"] if backend == "eager" else ["library", "trace"])
    assert run(tmp_path, "load", backend) == [losses, []]
    kept = {one.name for one in (tmp_path / "load" / "ours").iterdir()}
    assert loops.name in kept and any(name.startswith("joint_") for name in kept)


@pytest.fixture
def content(tmp_path, monkeypatch):
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
    with CacheArtifactManager.with_fresh_cache():
        monkeypatch.setattr(cache_file, "_KEPT", {})
        file = cache_folder() / "joint_0.gz"
        file.write_bytes(b"a graph")
        cache_file.keep(file)
        saved = amp.save_cache()
        file.unlink()
        yield saved


def test_what_is_saved_is_loaded_from_bytes_and_from_a_file(content, tmp_path):
    assert torch.compiler.save_cache_artifacts() is None  # which needs no package of ours
    ours, file = tmp_path / "joint_0.gz", tmp_path / "model.cache"
    amp.load_cache(content)
    assert ours.read_bytes() == b"a graph" and amp.save_cache(file) == file.read_bytes()
    ours.unlink()
    amp.load_cache(file)
    assert ours.exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda content: b"", "no cache that amp.save_cache made"),
        (lambda content: content[:60], "damaged"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "damaged"),
        (lambda content: content[:46] + bytes([content[46] ^ 1]) + content[47:], "damaged"),  # in what the file holds
        (lambda content: content.replace(torch.__version__.encode(), b"1.0"), "made for torch 1.0, and this is 2"),
    ],
)
def test_what_is_no_cache_of_this_installation_is_refused(content, tmp_path, spoil, says):
    file = tmp_path / "model.cache"
    file.write_bytes(spoil(content))
    with pytest.raises(amp.AmpError, match=rf"model\.cache: .*{says}.*; write it again"):
        amp.load_cache(file)
    assert not (tmp_path / "joint_0.gz").exists()


def test_a_file_outside_of_the_folders_is_not_written(tmp_path, content):
    for name in ("ours/../joint_0.gz", "torch/ab/../../x.so", "/etc/x.so", "ours/joint_0.gz\n"):
        with pytest.raises(amp.AmpError, match="none of it"):
            cache_file._put(name, b"", "")


def test_errors_name_the_place(tmp_path):
    with CacheArtifactManager.with_fresh_cache(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_file, "library", type("", (), {"cache_info": lambda: type("", (), {"currsize": 0})}))
        patch.setattr(cache_file, "kernel_libraries", list)
        patch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
        patch.setattr(cache_file, "_KEPT", {})
        with pytest.raises(amp.AmpError, match="nothing has been compiled yet; call the model"):
            amp.save_cache()
    with pytest.raises(amp.AmpError, match=r"missing\.cache: cannot be read: No such file"):
        amp.load_cache(tmp_path / "missing.cache")
