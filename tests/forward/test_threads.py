"""Calls from many threads: no wrong value and no error, whatever another thread captures meanwhile."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from toys import eager_step, mean_square

import amp_compiler as amp

pytestmark = pytest.mark.long

THREADS = 8
X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


class Branches(Net):
    """Breaks its graph."""

    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 1e9 else -y


def at_once(work: Callable[[int], None], number: int) -> None:
    """Run `work(0)`, `work(1)`, … in `THREADS` threads; the first error is raised here."""
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(work, one) for one in range(number)]:
            done.result()


def test_a_call_that_needs_no_capture_waits_for_no_compiler(monkeypatch):
    import amp_compiler.forward.subgraphs as subgraphs

    inside, go_on, real = threading.Event(), threading.Event(), subgraphs.build_run

    def slowly(*arguments):
        inside.set()
        assert go_on.wait(200)
        return real(*arguments)

    compiled = amp.compile(Net(), dtype="bf16", backend="eager")
    compiled(torch.ones(3, 4))
    monkeypatch.setattr(subgraphs, "build_run", slowly)
    with ThreadPoolExecutor(2) as pool:
        building = pool.submit(compiled, torch.ones(5, 4))
        assert inside.wait(100)
        pool.submit(compiled, torch.ones(3, 4)).result(100)
        assert not building.done()
        go_on.set()
        building.result()


def test_steps_in_subgraphs_from_many_threads():
    """Each thread has a step of its own; what they change in Dynamo meanwhile is back when they are done."""
    torch.manual_seed(1)
    batches = [torch.randn(4, 4) for _ in range(2)]
    config = torch._dynamo.config

    def set_for_dynamo() -> tuple[object, ...]:
        return config.recompile_limit, nn.Sequential.forward

    before = set_for_dynamo()

    def trained(number: int) -> dict[str, torch.Tensor]:
        model = models[number]
        step = eager_step(model, mean_square)
        for x in batches:
            step(x)
        assert "subgraph" in step.execution
        return model.state_dict()

    models = [Branches() for _ in range(4)]
    expected = trained(3)
    result: dict[int, dict[str, torch.Tensor]] = {}
    at_once(lambda number: result.__setitem__(number, trained(number)), 3)
    for state in result.values():
        assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert set_for_dynamo() == before


def test_a_model_that_breaks_beside_a_step_that_is_one_graph():
    """Torch counts compiled frames of `fullgraph=True` for the whole process."""
    compiled = amp.compile(Branches(), dtype="bf16", backend="eager")
    step = eager_step(other := Net(), mean_square, torch.optim.SGD(other.parameters(), 0.0))
    with torch.no_grad():
        expected = compiled(X)
        assert not torch.equal(expected, compiled.original(X))
    step(X)
    result, alone = list[bool](), threading.Lock()

    def call(number: int) -> None:
        if number % 2:
            with alone:  # a step is one thread's at a time
                step(X)
        else:
            with torch.no_grad():
                result.append(torch.equal(compiled(X), expected))

    at_once(call, 300)
    assert len(result) == 150 and all(result)
