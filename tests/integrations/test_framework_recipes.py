"""The blocks of docs/frameworks.md and 100 steps of each framework's loop, where the packages are that they need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from benchmark_modules import benchmark_modules

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python(?: needs=(\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SECTIONS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
LOOPS = benchmark_modules()["frameworks"]

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of the frameworks, on their own defaults


def test_every_section_has_a_block() -> None:
    assert not BLOCKS[0][0] and len(BLOCKS) == len(SECTIONS) + 1 and all(needs for needs, _ in BLOCKS[1:])
    assert all(f"(#{title.lower().replace(' ', '-')})" in PAGE for title in SECTIONS)


@pytest.mark.usefixtures("own_accelerate")
@pytest.mark.parametrize(("needs", "code"), BLOCKS[1:], ids=SECTIONS)
def test_the_block_runs(needs: str, code: str) -> None:
    for package in needs.split(","):
        pytest.importorskip(package, reason=f"{package} is not installed: make test-frameworks")
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(BLOCKS[0][1], "docs/frameworks.md", "exec"), names)
    exec(compile(code, "docs/frameworks.md", "exec"), names)


@pytest.mark.slow
@pytest.mark.compiles  # torchao's optimizers compile themselves
@pytest.mark.parametrize("name", LOOPS.LOOPS)
def test_its_loop_trains_as_with_its_own_mixed_precision_and_resumes_bit_for_bit(name: str) -> None:
    pytest.importorskip(LOOPS.LOOPS[name].package, reason="not installed: make test-frameworks")
    row = LOOPS.row_of(name, 100, 32, {"dtype": "bf16", "backend": "eager"})
    assert row["resumed"] and row["off"] <= LOOPS.MOST_OFF and row["last_loss"] < row["first_loss"]
