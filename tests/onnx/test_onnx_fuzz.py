"""Models damaged at random, seeded: each is converted or refused with an `OnnxError`, by every way in."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fuzz_models.py")


def run(first: int, count: int, folder: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(first), str(count), str(folder)], capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    last = lines[-1] if lines else "nothing"
    assert done.returncode == 0, f"it ended with {done.returncode} in case {last}: {done.stderr[-2000:]}"
    return lines


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(0, 100, marks=pytest.mark.long),
        pytest.param(100, 100, marks=pytest.mark.slow),
        *(pytest.param(at, 300, marks=pytest.mark.slow) for at in range(200, 2000, 300)),
    ],
)
def test_a_damaged_model_is_made_or_refused(first, count, tmp_path):
    lines = run(first, count, tmp_path)
    assert len(lines) == count
    faults = [line for line in lines if "FAULT" in line]
    assert not faults, f"{len(faults)} of {count}:\n" + "\n".join(faults[:20])
    found = Counter(part for line in lines for part in line.split(" | ")[1:])
    assert found["refused"] > count and found["made"] > count // 4, found
