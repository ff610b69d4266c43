"""Every op of torch's own list on a CUDA device: run as eager torch runs it there, or refused; see `opinfo_sweep`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SWEEP = Path(__file__).parents[1] / "opinfo_sweep.py"
PARTS = 8  # each in processes of its own
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROGRAM = """
import json, sys
sys.path.insert(0, {folder!r})
import opinfo_sweep
part, parts = {part}, {parts}
found = opinfo_sweep.sweep({way!r}, "linear", list(opinfo_sweep.OPS)[part::parts])
print(json.dumps([opinfo_sweep.totals(found), [[one.op, one.outcome, one.note] for one in found]]))
"""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", ["compile", "step"])
def test_ops_give_what_eager_torch_gives(way, part, record_property):
    program = PROGRAM.format(folder=str(SWEEP.parent), way=way, part=part, parts=PARTS)
    environment = {**os.environ, "SWEEP_DEVICE": "cuda"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    totals, result = json.loads(done.stdout.splitlines()[-1])
    record_property("ops", str(totals))
    assert totals["right"] > 30
    assert not [one for one in result if one[1] in ("raw", "wrong")]
