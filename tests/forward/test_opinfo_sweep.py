"""Every op of torch's own list: run as eager torch runs it, or refused; never another number, never a raw exception.

`AMP_REGENERATE=1 pytest -m slow tests/forward/test_opinfo_sweep.py` writes its section of `docs/refusals.md` anew.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from refusals_page import check_section, table_of_reasons, table_of_totals

if TYPE_CHECKING:  # below it is imported where it is used: torch's list takes seconds
    from opinfo_sweep import Result

pytestmark = pytest.mark.long

BOTH = [(way, form) for way in ("compile", "step") for form in ("plain", "linear", "strided")]

# What is wrong still, by form and op, with the reason. An entry that no longer fails makes the test fail.
KNOWN: dict[str, dict[str, str]] = {}

SHORT = (
    ("compile", "plain", "linalg.inv"),
    ("compile", "linear", "softmax.with_dtype"),
    ("compile", "linear", "nn.functional.group_norm"),
    ("compile", "strided", "matmul"),
    ("compile", "plain", "nonzero"),
    ("compile", "plain", "histogramdd"),
    ("step", "linear", "nn.functional.conv2d"),
    ("step", "plain", "linalg.cholesky"),
    ("step", "strided", "cumsum"),
    ("step", "linear", "index_add"),
)


@pytest.mark.parametrize(("way", "form", "name"), SHORT)
def test_an_op_gives_what_eager_torch_gives(way: str, form: str, name: str) -> None:
    from opinfo_sweep import judged

    result = judged(name, way, form)
    assert (result.outcome, result.note) == ("right", "")


@functools.cache
def swept(way: str, form: str) -> tuple[Result, ...]:
    """All ops in one form, once."""
    from opinfo_sweep import sweep

    return tuple(sweep(way, form))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "form"), BOTH)
def test_the_whole_list(way: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    from opinfo_sweep import FORMS, OPS, WAYS, totals

    assert [(one, other) for one in WAYS for other in FORMS] == BOTH
    result = swept(way, form)
    with capsys.disabled():
        print(f"\n{way}, {form}: {totals(result)}")
    assert [one.op for one in result] == list(OPS)
    failed = {one.op: f"{one.outcome}: {one.note}" for one in result if one.outcome in ("raw", "wrong")}
    known = KNOWN.get(f"{way} {form}", {})
    assert not {op: note for op, note in failed.items() if op not in known}
    assert not known.keys() - failed.keys(), "these no longer fail: take them out of KNOWN"


@pytest.mark.slow
def test_the_page_of_refusals_is_current() -> None:
    check_section("ops", section({f"{way} {form}": swept(way, form) for way, form in BOTH}))


INTRODUCTION = """\
Every op of torch's own list (`op_db`, those that take FP32 on a CPU) runs through `amp.compile` and through one SGD
step of `amp.training_step`, with the backend `eager` in BF16: with torch's sample as it is (`plain`), behind a linear
layer (`linear`) and with strided inputs (`strided`). Values and gradients are held against eager torch: at most 4 times
as far off FP32 as eager torch.autocast, and 4 ULPs of BF16. `raw` is an exception that is not ours, `wrong` another
number; `not run` is what eager torch does not run so on a CPU, or what takes no tensor that could stand behind a
layer.

`AMP_REGENERATE=1 pytest -m slow tests/forward/test_opinfo_sweep.py` writes this section anew.
"""


def section(matches: dict[str, tuple[Result, ...]]) -> str:
    """The section of the page: totals, and what is refused with the reason."""
    from opinfo_sweep import totals

    refused = [
        (re.sub(r" \(`return [^`]*`\)", "", one.note.splitlines()[0]), one.op, form)  # without the sweep's own line
        for form, results in matches.items()
        for one in results
        if one.outcome == "refused"
    ]
    counts = {form: totals(results) for form, results in matches.items()}
    lines = [
        *INTRODUCTION.splitlines(),
        "",
        *table_of_totals(counts),
        "",
        *table_of_reasons(refused, "ops, and in which forms"),
    ]
    return "\n".join(lines)


# ---- on a CUDA device: run as eager torch runs it there, or refused

SWEEP = Path(__file__).parents[1] / "opinfo_sweep.py"
PARTS = 8  # each in processes of its own
PROGRAM = """
import json, sys
sys.path.insert(0, {folder!r})
import opinfo_sweep
part, parts = {part}, {parts}
found = opinfo_sweep.sweep({way!r}, "linear", list(opinfo_sweep.OPS)[part::parts])
print(json.dumps([opinfo_sweep.totals(found), [[one.op, one.outcome, one.note] for one in found]]))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", ["compile", "step"])
def test_ops_give_what_eager_torch_gives(way: str, part: int, record_property: Any) -> None:
    program = PROGRAM.format(folder=str(SWEEP.parent), way=way, part=part, parts=PARTS)
    environment = {**os.environ, "SWEEP_DEVICE": "cuda"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    totals, result = json.loads(done.stdout.splitlines()[-1])
    record_property("ops", str(totals))
    assert totals["right"] > 30
    assert not [one for one in result if one[1] in ("raw", "wrong")]
