"""A rank is killed, hangs, or ends by an error in its graph: the others are told in time, and keep what they had."""

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

rank, size, when, shard, store = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=20))


def stop():
    if when.startswith("hangs"):
        time.sleep(30)
    else:
        os.kill(os.getpid(), signal.SIGKILL)


class Killed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if rank == 1 and called == 2:
            stop()
        return grad


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
kill = (lambda x: Killed.apply(x)) if when.endswith("in a step") else (lambda x: x)
loss = lambda m, x, rows: kill(m(x)).index_select(0, rows).square().mean()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
rules = {"version": 1, "extends": "default", "reduce": {"shard": shard}}
step = amp.training_step(
    model, loss, optimizer, dtype="bf16", backend="eager", rules=rules, process_group=dist.group.WORLD
)
called, x, rows = 0, torch.randn(4, 8), torch.arange(4)
step(x, rows), step(x, rows)
called, before = 2, [one.detach().clone() for one in model.parameters()]
if rank == 1 and when.endswith("between steps"):
    stop()
begun = time.monotonic()
try:
    step(x, rows + 4 * rank if when == "by an error" else rows)
except amp.AmpError as error:
    same = all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    kept = "kept" if same else "changed"
    print(type(error).__name__, "|", error, "|", kept, "|", time.monotonic() - begun, flush=True)
if when.startswith("hangs") and rank == 0:
    time.sleep(30)  # this process is still there when the other one comes
os._exit(0)
"""


# A Python function in the backward asks for subgraphs, which have no split update.
@pytest.mark.parametrize(
    ("when", "shard", "size"),
    [
        ("between steps", "none", 2),
        ("between steps", "update", 2),
        ("in a step", "none", 2),
        ("in a step", "none", 4),
        ("by an error", "none", 2),
        ("hangs between steps", "none", 2),
        ("hangs in a step", "none", 2),
        ("hangs in a step", "none", 4),
    ],
)
def test_the_other_ranks_are_told(when, shard, size, tmp_path):
    arguments = (str(size), when, shard, f"file://{tmp_path}/store")
    commands = [[sys.executable, "-c", RANK, str(rank), *arguments] for rank in range(size)]
    ranks = [subprocess.Popen(one, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for one in commands]
    said = [one.communicate(timeout=600) for one in ranks]
    hangs = when.startswith("hangs")
    assert ranks[1].returncode == (0 if hangs else 1 if when == "by an error" else -9), said
    for rank, (message, problems) in enumerate(said):
        if rank == 1 and not hangs:
            continue
        kind, text, kept, seconds = (one.strip() for one in message.split("|"))
        assert kind == "RankError" and f"rank {rank} of {size} lost the others" in text, problems
        assert float(seconds) < (60 if rank == 1 else 25)  # that one hangs for 30
        assert kept == "kept"
        if when == "by an error":  # as soon as that process ends, which nobody waits for
            assert float(seconds) < 15 and "Connection closed by peer" in text
