"""The text of every stage of seven small models: `tests/pipelines/*.txt`.

`AMP_REGENERATE=1 pytest tests/pipelines` writes them anew: read the diff before you keep it.

The first recording was made before the rewrites were passes. Every stage that it had is the same to the byte, but one:
the buffers of `conv` are written by `amp_compiler.commit`, where three nodes for each stood. Stages that it could not
tell apart, or that came later: `mark_math`, `widen_math`, `native_ops`, `sum_gradients`, all behind `fuse_update`.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toys import TOYS

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, eager
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.passes import PASSES
from amp_compiler.passes.pipeline import PIPELINES, Stages


def written(stages: Stages) -> str:
    """The stages as one text; places in files move with every edit of these, and are left out."""
    parts, before = [], ""
    for name, text in stages:
        parts.append(f"=== {name}" + (", nothing changed\n" if text == before else f"\n{text}"))
        before = text
    return re.sub(r"(toys\.py|\.yaml):\d+", r"\1", "".join(parts))


@pytest.mark.usefixtures("bf16_kernels")
@pytest.mark.parametrize("name", TOYS)
def test_every_stage(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "lstm" and cpu_update.most_inner() == 0:
        pytest.skip("no C++ compiler, or a processor without BF16 products: other memory is kept for the backward")
    monkeypatch.setitem(BACKENDS, "inductor", replace(BACKENDS["inductor"], build=eager.build))
    monkeypatch.setattr(cpu_update, "most_inner", lambda: 512)  # else it says what is fast on this processor
    toy = TOYS[name]
    step = toy.step(amp)
    torch.manual_seed(1)
    batch = toy.batch()
    found = []
    for _ in range(toy.options.get("accumulate", 1)):
        step(*batch)
        found.append(written(step.stages))
    path = Path(__file__).with_name(f"{name}.txt")
    if os.environ.get("AMP_REGENERATE"):
        path.write_text("".join(found), encoding="utf-8")
    assert "".join(found) == path.read_text(encoding="utf-8")


def test_every_pass_stands_in_a_pipeline() -> None:
    listed = [name for pipeline in PIPELINES for name in pipeline.names]
    assert set(listed) == set(PASSES)
