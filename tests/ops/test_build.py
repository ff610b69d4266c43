"""The library of the C++ loops is compiled once, however many processes ask for it together."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from amp_compiler.ops.cpu import build


def test_of_those_that_ask_together_one_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
    compiled = []

    def compile_slowly(command, **options):
        compiled.append(command)
        time.sleep(0.2)
        Path(command[-1]).write_text("library")

    monkeypatch.setattr(build.subprocess, "run", compile_slowly)
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: build._built(["g++"], {"a.cpp": ""}), range(3)))
    assert len(compiled) == 1 and len(set(made)) == 1
    assert made[0].read_text() == "library"
    assert build._built(["g++"], {"a.cpp": "other"}) != made[0] and len(compiled) == 2
