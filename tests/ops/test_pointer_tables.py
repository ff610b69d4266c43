"""The tables of addresses of captured graphs, with host memory in the place of a device's."""

import gc
import weakref

import pytest
import torch

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda.pointer_tables import TableCache

HERE = torch.device("cpu")


class Memory:
    """Host memory that a `TableCache` takes for a device's; counts what is asked for."""

    def __init__(self):
        self.captures, self.requests, self.live = False, 0, weakref.WeakSet()

    def remote(self, device):
        return True

    def capturing(self):
        return self.captures

    def pinned(self, words):
        if self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.requests += 1
        return torch.zeros(words, dtype=torch.int64)

    def on_device(self, words, device):
        self.requests += 1
        result = torch.zeros(words, dtype=torch.int64)
        self.live.add(result)
        return result


def grads(count=3):
    return [torch.randn(7) for _ in range(count)]


def captured(cache, memory, tensors):
    """The tables of a graph over some tensors, and its groups."""
    with cache.of_graph() as tables:
        memory.captures = True
        groups = cache.groups([tensors], HERE, 4)
        memory.captures = False
    return tables, groups


def addresses(groups):
    return [int(row[2]) for group in groups for row in group.rows]


def test_the_table_of_a_graph_is_filled_once_behind_the_capture():
    memory = Memory()
    cache = TableCache(memory)
    cache.groups([grads()], HERE, 4)  # the warm-up
    inputs = grads()
    tables, groups = captured(cache, memory, inputs)
    assert addresses(groups) == [0, 0, 0], "nothing is copied while a graph is captured"
    tables.fill()
    assert addresses(groups) == [tensor.data_ptr() for tensor in inputs]
    groups[0].rows.fill_(-1)
    tables.fill()
    assert addresses(groups) == [-1, -1, -1], "a second time nothing is copied"


def test_the_tables_of_a_graph_go_when_it_goes():
    memory = Memory()
    cache = TableCache(memory)
    warm = grads()
    cache.groups([warm], HERE, 4)
    for _ in range(50):
        tables, groups = captured(cache, memory, grads())
        again, _ = captured(cache, memory, warm)  # whose table was there before
        tables.fill(), again.fill()
    del tables, again, groups
    gc.collect()
    assert len(memory.live) == 2, "the table of the warm-up, and the spare one"


def test_a_table_that_a_graph_reads_outlives_its_place_among_the_kept_ones():
    memory = Memory()
    cache = TableCache(memory)
    warm = grads()
    cache.groups([warm], HERE, 4)
    assert cache.groups([warm], HERE, 4) is cache.groups([warm], HERE, 4)
    assert cache.groups([[warm[0][:4], *warm[1:]]], HERE, 4) is not cache.groups([warm], HERE, 4)
    tables, groups = captured(cache, memory, warm)
    for size in range(1, 200):
        cache.groups([[torch.empty(size)]], HERE, 1000)
    assert len(cache._tables) <= 64
    assert tables.kept and addresses(groups) == [tensor.data_ptr() for tensor in warm]


def test_every_capture_finds_memory_although_none_can_be_asked_for():
    """State that moves is captured time and again; its tables may be found among the kept ones in the warm-up."""
    memory = Memory()
    cache = TableCache(memory)
    for number in range(6):
        first, second = grads(), grads()
        for _ in range(2 if number < 3 else 1):
            cache.groups([first], HERE, 4), cache.groups([second], HERE, 4)
        with cache.of_graph() as tables:
            memory.captures = True
            inputs = grads(), grads()
            groups = [cache.groups([one], HERE, 4) for one in inputs]
            memory.captures = False
        tables.fill()
        assert [addresses(one) for one in groups] == [[tensor.data_ptr() for tensor in one] for one in inputs]


def test_a_capture_by_anyone_else_gets_no_tables():
    """Nobody would fill them behind it."""
    memory = Memory()
    cache = TableCache(memory)
    cache.groups([grads()], HERE, 4)
    memory.captures = True
    for size in (1, 5):
        with pytest.raises(LoweringError, match="run the step once before capturing"):
            cache.groups([grads(size)], HERE, 4)
