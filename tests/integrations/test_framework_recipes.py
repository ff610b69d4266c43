"""The blocks of docs/frameworks.md, each where the packages are installed that it needs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python(?: needs=(\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SECTIONS = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
COMMON = BLOCKS[0][1]
GENERATES = "from transformers import GPT2Config"  # the block that later ones take `config` from

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
    exec(compile(COMMON, "docs/frameworks.md", "exec"), names)
    if re.search(r"\bGPT2\w+\(config\)", code) and GENERATES not in code:
        block = next(one for _, one in BLOCKS if GENERATES in one)
        wanted = [line for line in block.splitlines() if line.startswith(("import tempfile", "config ="))]
        exec("from transformers import GPT2Config, GPT2LMHeadModel\n" + "\n".join(wanted), names)
    exec(compile(code, "docs/frameworks.md", "exec"), names)
