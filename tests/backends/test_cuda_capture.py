"""`TorchGraphs` above a stand-in for torch's CUDA: what a capture leaves behind, whether it succeeds or fails.

The stand-in keeps the state that torch 2.11 keeps: which pools are recorded to, by the allocators of device and host;
whether the generator is in a capture; and where the workspaces of cuBLAS lie. A GPU runs test_training_gpu_state.py.
"""

import contextlib
import gc
import weakref
from collections import Counter

import pytest
import torch

from amp_compiler.backends import cuda_capture
from amp_compiler.backends.cuda_capture import TorchGraphs
from amp_compiler.ops.cuda.pointer_tables import TableCache

ORDINARY = "ordinary pool"
X = torch.ones(3)


class Graph:
    """A CUDA graph; a pool is in use for as long as a graph in it is held."""

    def __init__(self, cuda):
        self.cuda, self.pool, self.ended = cuda, None, False

    def replay(self):
        assert self.ended

    def reset(self):
        if self.ended:
            self.cuda.users[self.pool] -= 1
        self.ended = False


class StandIn:
    """Torch's state about captures. `draw` and `multiply` do what dropout and a matrix product do to it."""

    def __init__(self):
        self.users: Counter[str] = Counter()
        self.device_records, self.host_records = set(), set()
        self.capturing, self.generator_captured, self.fails = None, False, False
        self.workspace, self.handles, self.log = None, 0, []
        self.host_asks: list[Graph] = []

    def graph_pool_handle(self):
        self.handles += 1
        return f"pool {self.handles}"

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        pool = pool or self.graph_pool_handle()
        self.users[pool] += 1
        for records in (self.device_records, self.host_records):
            if pool in records:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            records.add(pool)
        self.host_asks.append(graph)
        graph.pool, self.capturing, self.generator_captured = pool, pool, True
        self.log.append(f"capture, workspace in {self.workspace}")
        try:
            yield
        finally:
            self.capturing = None
            fails, self.fails = self.fails, False
            if fails:
                raise RuntimeError("operation failed due to a previous error during capture")
        self.device_records.discard(pool), self.host_records.discard(pool)
        self.generator_captured, graph.ended = False, True

    def end(self, device, pool):
        if pool not in self.device_records:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.device_records.discard(pool)

    def release(self, device, pool):
        self.users[pool] -= 1
        assert self.users[pool] >= 0

    def clear(self):
        self.workspace = None

    def multiply(self):
        """A product takes the workspace that there is, or one from the pool in use."""
        self.workspace = self.workspace or self.capturing or ORDINARY
        return self.workspace

    def draw(self):
        if self.generator_captured and self.capturing is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        return X * 2


@pytest.fixture
def cuda(monkeypatch):
    stand_in = StandIn()
    for name, value in {
        "device": lambda device: contextlib.nullcontext(),
        "current_stream": lambda: "stream",
        "set_stream": lambda stream: None,
        "Stream": lambda: "side stream",
        "graph_pool_handle": stand_in.graph_pool_handle,
        "CUDAGraph": lambda: Graph(stand_in),
        "graph": stand_in.graph,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {
        "_cuda_endAllocateToPool": stand_in.end,
        "_cuda_releasePool": stand_in.release,
        "_cuda_clearCublasWorkspaces": stand_in.clear,
    }.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    return stand_in


def failed(cuda, graphs):
    """A capture that fails when half of the step is recorded, with the error of the step."""

    def waits(x):
        cuda.draw()
        cuda.fails = True
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.capture(waits, [X])


def test_behind_a_failed_capture_torch_goes_on(cuda):
    """Torch's host allocator keeps a pointer to a graph whose capture failed, and asks it at every allocation."""
    graphs = TorchGraphs()
    first, _ = graphs.capture(lambda x: [cuda.draw()], [X])
    failed(cuda, graphs)
    assert torch.equal(cuda.draw(), X * 2)
    assert cuda.users[first.__self__.pool] == 1 and cuda.device_records == set()
    (bad,) = [graph for graph in cuda.host_asks if graph is not first.__self__ and graph.pool in cuda.host_records]
    assert bad in cuda_capture._FAILED
    second, _ = graphs.capture(lambda x: [cuda.draw()], [X])
    first(), second()
    third, _ = graphs.capture(lambda x: [cuda.draw()], [X])
    assert third.__self__.pool == second.__self__.pool != first.__self__.pool
    failed(cuda, TorchGraphs())
    assert sum(users for pool, users in cuda.users.items() if pool in cuda.host_records) == 1  # that of `first`


def test_a_first_error_stands_even_where_nothing_can_be_captured_any_more(cuda, monkeypatch):
    @contextlib.contextmanager
    def dead(*arguments, **options):
        yield
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "graph", dead)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        TorchGraphs().capture(lambda x: [x], [X])


def test_a_graph_has_workspaces_of_its_own(cuda):
    graphs, inside = TorchGraphs(), []
    assert cuda.multiply() == ORDINARY
    replay, _ = graphs.capture(lambda x: [x, inside.append(cuda.multiply())], [X])
    assert inside == [replay.__self__.pool], "a workspace from outside could be freed while the graph uses it"
    assert cuda.multiply() == ORDINARY, "a workspace of the graph's pool must not be used beside the graph"
    failed(cuda, graphs)
    assert cuda.log[1] == "capture, workspace in None"
    assert cuda.multiply() == ORDINARY


def test_results_of_a_capture_keep_no_memory_so_that_the_next_signature_takes_the_same(cuda):
    result = [torch.arange(6.0), torch.arange(12.0).view(3, 4).t()[1:]]
    gone = [weakref.ref(one) for one in result]
    addresses = [one.data_ptr() for one in result]
    state = torch.ones(3)
    _, outputs = TorchGraphs().capture(lambda state, x: [*result, state, state[1:], 7], [state, X])
    assert [one.data_ptr() for one in outputs[:2]] == addresses
    assert torch.equal(outputs[0], torch.arange(6.0)) and outputs[1].tolist() == result[1].tolist()
    assert outputs[1].stride() == (1, 4) and outputs[2] is state and outputs[4] == 7
    assert outputs[3].data_ptr() == state.data_ptr() + 4 and outputs[3]._base is state
    result.clear()
    assert [one() for one in gone] == [None, None]


def test_tables_are_filled_behind_the_capture_and_go_with_the_graph(cuda, monkeypatch):
    seen = []
    tables = TableCache()
    monkeypatch.setattr(cuda_capture, "TABLES", tables)

    def run(x):
        held = tables._graph
        table = torch.zeros(2, dtype=torch.int64)
        held.kept.append(table), held.unfilled.append((torch.tensor([3, 4]), table))
        seen.append(weakref.ref(table))
        return [x, table.tolist()]

    graphs = TorchGraphs()
    replay, outputs = graphs.capture(run, [X])
    assert outputs[1] == [0, 0] and seen[0]().tolist() == [3, 4] and tables._graph is None
    cuda.host_asks.clear()
    del replay
    gc.collect()
    assert seen[0]() is None
