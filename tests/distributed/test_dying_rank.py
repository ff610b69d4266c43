"""A rank that is killed: the other one raises an error of ours within its timeout, and keeps what it had."""

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
loss = (lambda m, x: Killed.apply(m(x)).square().mean()) if when == "in a step" else (lambda m, x: m(x).square().mean())
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
rules = {"version": 1, "extends": "default", "reduce": {"shard": shard}}
step = amp.training_step(
    model, loss, optimizer, dtype="bf16", backend="eager", rules=rules, process_group=dist.group.WORLD
)
called, x = 0, torch.randn(4, 8)
step(x), step(x)
called, before = 2, [one.detach().clone() for one in model.parameters()]
if rank == 1 and when == "between steps":
    os.kill(os.getpid(), signal.SIGKILL)
begun = time.monotonic()
try:
    step(x)
except amp.AmpError as error:
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    print(type(error).__name__, "|", error, "|", "kept" if same else "changed", "|", time.monotonic() - begun < 25)
os._exit(0)
"""


# A Python function in the backward asks for pieces, which have no split update.
@pytest.mark.parametrize(
    ("when", "shard"), [("between steps", "none"), ("between steps", "update"), ("in a step", "none")]
)
def test_the_other_rank_is_told(when, shard, tmp_path):
    arguments = (when, shard, f"file://{tmp_path}/store")
    commands = [[sys.executable, "-c", RANK, str(rank), *arguments] for rank in range(2)]
    ranks = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in commands]
    (told, problems), _ = (one.communicate(timeout=180) for one in ranks)
    assert ranks[1].returncode == -9, problems
    kind, text, kept, in_time = (one.strip() for one in told.split("|"))
    assert kind == "RankError" and "rank 0 of 2 lost the others" in text and in_time == "True"
    assert kept == "kept"
