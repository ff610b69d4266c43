"""A step that runs hundreds of times: no more memory, no new program, nothing compiled anew."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from toys import classes, eager_step


@pytest.fixture
def compilations(monkeypatch):
    """One entry for every graph that Inductor was asked to compile."""
    import torch._inductor.compile_fx as inductor

    seen, real = [], inductor.compile_fx
    monkeypatch.setattr(inductor, "compile_fx", lambda *args, **kwargs: (seen.append(1), real(*args, **kwargs))[1])
    return seen


def live_tensors():
    gc.collect(), gc.collect()  # what the first one finds may hold more, of tests before this one
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def resident_bytes():
    statm = Path("/proc/self/statm")
    return 4096 * int(statm.read_text().split()[1]) if statm.exists() else 0


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_many_steps_need_no_more_memory_and_no_new_program(compilations, backend):
    steps = 500  # with fewer, objects that are made once weigh as much as a leak would
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.999)
    step = eager_step(model, classes, optimizer, dtype="fp16", backend=backend, clip_norm=1.0)
    inputs, labels = torch.randn(16, 8), torch.randint(0, 4, (16,))

    def run(share):
        for number in range(share * steps // 10):
            step(inputs * float("inf") if number % (steps // 10) == steps // 20 else inputs, labels)
            schedule.step()

    def everything():
        return [value.clone() for value in torch.utils._pytree.tree_leaves([model.state_dict(), optimizer.state_dict()])
                if isinstance(value, torch.Tensor)]  # fmt: skip

    run(1)
    kept = everything()
    step(inputs * float("nan"), labels)
    assert all(map(torch.equal, kept, everything()))
    step(inputs, labels)  # it keeps the last batch
    del kept
    compiled = len(compilations), dict(counters["inductor"])
    assert bool(compilations) == (backend == "inductor")
    tensors, before = live_tensors(), resident_bytes()
    run(4)
    gc.collect()
    blocks = sys.getallocatedblocks()
    run(5)
    gc.collect()
    growth = sys.getallocatedblocks() - blocks
    assert growth < 0.4 * steps  # an object that each of the last half of them keeps is 0.5, what is made once 0.2
    if before:
        assert resident_bytes() - before < 64 * 2**20
    assert live_tensors() <= tensors  # a leak is one for each step; of earlier tests one may go
    assert len(step._choice.programs) == 1
    assert (len(compilations), dict(counters["inductor"])) == compiled
    assert int(step.skipped_steps) == 11
