"""What torch tried of the processor's vector instructions is not tried again by the next process."""

import os
from pathlib import Path

import pytest
import torch
from torch._inductor.cpu_vec_isa import VecISA, pick_vec_isa

from amp_compiler.backends.vector_probes import remembered
from amp_compiler.fx.torch_private import inductor as torch_inductor


class _Loads:
    """Stands for torch's way of trying, and counts."""

    def __init__(self, answer: bool) -> None:
        self.answer, self.calls = answer, 0

    def __call__(self, library: str) -> bool:
        self.calls += 1
        return self.answer


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path / "kept"))
    result = tmp_path / "probe.so"
    result.write_bytes(b"library")
    return result


def test_what_loaded_once_is_not_loaded_again(library: Path) -> None:
    first, second = _Loads(True), _Loads(False)
    assert remembered(first)(str(library)) and remembered(second)(str(library))
    assert (first.calls, second.calls) == (1, 0)


def test_what_failed_is_tried_again(library: Path) -> None:
    for answer in (False, False, True):
        load = _Loads(answer)
        assert remembered(load)(str(library)) is answer and load.calls == 1


@pytest.mark.parametrize("change", ["built anew", "another torch", "another machine"])
def test_it_is_tried_again_where_it_may_have_become_otherwise(
    library: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert remembered(_Loads(True))(str(library))
    if change == "built anew":
        os.utime(library, ns=(1, 1))
    elif change == "another torch":
        monkeypatch.setattr(torch, "__version__", "3.0.0")
    else:
        monkeypatch.setattr("platform.node", lambda: "elsewhere")
    load = _Loads(False)
    assert not remembered(load)(str(library)) and load.calls == 1


def test_without_a_folder_it_is_tried_each_time(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(library / "no folder"))
    for _ in range(2):
        load = _Loads(True)
        assert remembered(load)(str(library)) and load.calls == 1


def test_a_library_that_is_not_there_is_left_to_torch(library: Path) -> None:
    load = _Loads(False)
    assert not remembered(load)(str(library.with_name("none.so"))) and load.calls == 1


@pytest.mark.skipif(not hasattr(VecISA, "_probe_load"), reason="torch 2.11 loads it where it builds it")
def test_torch_asks_here_and_gets_its_own_answer_elsewhere() -> None:
    isa, requested, before = pick_vec_isa(), [], VecISA._probe_load

    def noted(load):
        def probe(path: str) -> bool:
            requested.append(path)
            return True

        return probe

    with torch_inductor.vector_probes(noted):
        assert isa._probe_load("no such library.so")
    assert requested == ["no such library.so"] and VecISA._probe_load is before
    assert not isa._probe_load("no such library.so")
