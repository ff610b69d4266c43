"""What every stage does to seven small models: `tests/pipelines/*.txt`, the graph once and then its changes.

`AMP_REGENERATE=1 pytest tests/pipelines` writes them anew: read the diff before you keep it.
"""

import difflib
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
    """The stages as one text: a graph as a diff to the graph before it, where that is shorter; else as it is.

    Places in files move with every edit of these, and are left out.
    """
    parts, last, graph = [], "", list[str]()
    for name, text in stages:
        lines = re.sub(r"(toys\.py|\.yaml):\d+", r"\1", text).splitlines()
        is_graph = any(line.startswith("return") for line in lines)
        diff = list(difflib.unified_diff(graph, lines, n=0, lineterm=""))[2:]  # without the names of the files
        if text == last:
            parts.append(f"=== {name}, nothing changed")
        elif is_graph and graph and len(diff) < len(lines):
            parts += [f"=== {name}, changes", *diff]
        else:
            parts += [f"=== {name}", *lines]
        last, graph = text, lines if is_graph else graph
    return "\n".join(parts) + "\n"


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
    result = []
    for _ in range(toy.options.get("accumulate", 1)):
        step(*batch)
        result.append(written(step.stages))
    path = Path(__file__).with_name(f"{name}.txt")
    if os.environ.get("AMP_REGENERATE"):
        path.write_text("".join(result), encoding="utf-8")
    assert "".join(result) == path.read_text(encoding="utf-8")


def test_every_pass_stands_in_a_pipeline() -> None:
    listed = [name for pipeline in PIPELINES for name in pipeline.names]
    assert set(listed) == set(PASSES)
