"""A rank that is killed, or ends by an error in its graph: the other one is told in time, and keeps what it had."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"),
]

RANK = """
import datetime, os, signal, sys, time
import torch, torch.distributed as dist
import amp_compiler as amp

rank, when, shard, store = int(sys.argv[1]), *sys.argv[2:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20))


class Killed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if rank == 1 and called == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return grad


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
kill = (lambda x: Killed.apply(x)) if when == "in a step" else (lambda x: x)
loss = lambda m, x, rows: kill(m(x)).index_select(0, rows).square().mean()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
rules = {"version": 1, "extends": "default", "reduce": {"shard": shard}}
step = amp.training_step(
    model, loss, optimizer, dtype="bf16", backend="eager", rules=rules, process_group=dist.group.WORLD
)
called, x, rows = 0, torch.randn(4, 8), torch.arange(4)
step(x, rows), step(x, rows)
called, before = 2, [one.detach().clone() for one in model.parameters()]
if rank == 1 and when == "between steps":
    os.kill(os.getpid(), signal.SIGKILL)
begun = time.monotonic()
try:
    step(x, rows + 4 * rank if when == "by an error" else rows)
except amp.AmpError as error:
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    print(type(error).__name__, "|", error, "|", "kept" if same else "changed", "|", time.monotonic() - begun)
os._exit(0)
"""


# A Python function in the backward asks for pieces, which have no split update.
@pytest.mark.parametrize(
    ("when", "shard"),
    [("between steps", "none"), ("between steps", "update"), ("in a step", "none"), ("by an error", "none")],
)
def test_the_other_rank_is_told(when, shard, tmp_path):
    arguments = (when, shard, f"file://{tmp_path}/store")
    commands = [[sys.executable, "-c", RANK, str(rank), *arguments] for rank in range(2)]
    ranks = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in commands]
    (told, problems), _ = (one.communicate(timeout=180) for one in ranks)
    assert ranks[1].returncode == (1 if when == "by an error" else -9), problems
    kind, text, kept, seconds = (one.strip() for one in told.split("|"))
    assert kind == "RankError" and "rank 0 of 2 lost the others" in text and float(seconds) < 25
    assert kept == "kept"
    if when == "by an error":  # as soon as that process ends, which nobody waits for
        assert float(seconds) < 15 and "Connection closed by peer" in text
