"""Buffers of a compiled step in one block of memory: the layout, and functions that ask for their memory there."""

import threading
import weakref

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amp_compiler.ops.cpu.arena import ArenaMemory, ArenaRun, Span, allocator, lay_out

UNIT, CALLS = 64, 5
F32, BF16 = torch.float32, torch.bfloat16
TIMES = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 15), st.integers(1, 8)), max_size=24)


class Source:
    """Ordinary memory, full of rubbish; counts what it was asked for."""

    def __init__(self) -> None:
        self.calls = 0
        self.allocate = allocator(self)

    def __call__(self, size, stride, dtype):
        self.calls += 1
        return torch.full(size, 77, dtype=dtype).as_strided(size, stride)

    def filled(self, value, count=16):
        return self.allocate((count,), (1,), F32).fill_(value)


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def in_block(tensor, memory):
    return storage(tensor) == storage(memory._block)


@settings(deadline=None)
@given(TIMES)
@example([])
def test_buffers_that_are_in_use_together_do_not_overlap(times):
    spans = [Span(units * UNIT, born, born + length) for units, born, length in times]
    offsets, total = lay_out(spans)
    assert len(offsets) == len(spans) and all(offset >= 0 and offset % UNIT == 0 for offset in offsets)
    for n, one in enumerate(spans):
        for m, other in enumerate(spans[:n]):
            if one.born < other.died and other.born < one.died:
                assert offsets[n] + one.size <= offsets[m] or offsets[m] + other.size <= offsets[n]
    alive = [sum(span.size for span in spans if span.born <= time < span.died) for time in range(24)]
    assert max(alive) <= total <= sum(span.size for span in spans)
    assert all(offset + span.size <= total for offset, span in zip(offsets, spans, strict=True))
    assert lay_out(list(spans)) == (offsets, total)


@st.composite
def programs(draw):
    """Requests as (elements, type, earlier buffers that are let go before), the outputs, how many of them are kept."""
    requests, alive = [], []
    for number in range(draw(st.integers(1, 10))):
        gone = draw(st.lists(st.sampled_from(alive), unique=True, max_size=3)) if alive else []
        alive = [one for one in alive if one not in gone] + [number]
        requests.append(
            (draw(st.integers(0, 70)), draw(st.sampled_from((F32, BF16, torch.uint8, torch.float64))), gone)
        )
    outputs = draw(st.permutations(alive))[: draw(st.integers(0, len(alive)))]
    return requests, outputs, draw(st.integers(0, len(outputs)))


def holds(tensor, value):
    return bool((tensor == value).all())


def follow(program, source):
    def run(base):
        alive = {}
        for number, (count, dtype, gone) in enumerate(program[0]):
            for one in gone:
                del alive[one]
            whole = source.allocate((count,), (1,), dtype).fill_(base + number)
            alive[number] = whole[count // 3 :] if number % 2 else whole
            del whole
            assert all(holds(value, base + one) for one, value in alive.items())
        return tuple(alive[one] for one in program[1])

    return run


@settings(max_examples=150, deadline=None)
@given(st.lists(programs(), min_size=1, max_size=3))
def test_any_programs_over_one_block_keep_their_values(built):
    source, memory = Source(), ArenaMemory()
    runs = [ArenaRun(follow(program, source), program[2], memory, least=0) for program in built]
    kept = []
    for base in range(0, 40, 10):
        for run, (_, names, count) in zip(runs, built, strict=True):
            outputs = run(base)
            assert all(holds(value, base + name) for value, name in zip(outputs, names, strict=True))
            kept += [(value, base + name) for value, name in zip(outputs[:count], names, strict=False)]
    assert all(holds(*one) for one in kept)


def filling(source, count):
    def run(base):
        first = source.filled(base, count)
        return (source.filled(1, count).add_(first),)

    return run


def test_a_block_that_grows_leaves_nothing_of_the_old_one():
    source, memory = Source(), ArenaMemory()
    small, large = (ArenaRun(filling(source, count), 0, memory, least=0) for count in (10, 1000))
    small(0), small(1)
    old = weakref.ref(memory._block.untyped_storage())
    large(0)
    assert old() is not None and memory._block.numel() == 2 * UNIT
    assert holds(large(5)[0], 6) and old() is None
    calls, block = source.calls, storage(memory._block)
    for base in range(3):
        (one,) = small(base)
        assert holds(one, base + 1) and in_block(one, memory)
        assert holds(large(base)[0], base + 1)
    assert source.calls == calls and storage(memory._block) == block


def test_a_block_goes_with_the_last_that_uses_it():
    memory = ArenaMemory()
    run = ArenaRun(filling(Source(), 10), 0, memory, least=0)
    _, (output,) = run(0), run(1)
    block = weakref.ref(memory._block.untyped_storage())
    del memory, run
    assert block() is not None and holds(output, 2)
    del output
    assert block() is None


USUAL = [((10,), (1,), F32), ((30,), (1,), BF16), ((4, 5), (5, 1), F32)]
OTHERS = {
    "fewer": USUAL[:2],
    "more": [*USUAL, ((40,), (1,), F32)],
    "none": [],
    "shape": [((10,), (1,), F32), ((40,), (1,), BF16), USUAL[2]],
    "strides": [*USUAL[:2], ((4, 5), (1, 4), F32)],
    "type": [((10,), (1,), BF16), *USUAL[1:]],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_call_that_asks_otherwise_than_the_first_is_right(other):
    source = Source()

    def plain(base, requests):
        return [source.allocate(*one).fill_(base + n) for n, one in enumerate(requests)]

    run = ArenaRun(plain, 0, ArenaMemory(), least=0)
    for base in range(8):
        requests, before = other if base % 3 == 2 else USUAL, source.calls
        outputs = run(base, requests)
        assert [(tuple(one.shape), one.stride(), one.dtype) for one in outputs] == requests
        assert all(holds(one, base + n) for n, one in enumerate(outputs))
        served = [*[mine == usual for mine, usual in zip(requests, USUAL, strict=False)], False].index(False)
        assert source.calls - before == len(requests) - (served if base else 0)


@pytest.mark.parametrize("call", range(3))
def test_an_error_in_a_call_leaves_the_thread_as_before(call):
    source, memory = Source(), ArenaMemory()

    def plain(base):
        buffer = source.filled(base)
        if base == call:
            raise ValueError("not this one")
        return (source.filled(0).copy_(buffer),)

    run = ArenaRun(plain, 0, memory, least=0)
    for base in range(CALLS):
        if base == call:
            with pytest.raises(ValueError, match="not this one"):
                run(base)
        else:
            assert holds(run(base)[0], base)
        calls = source.calls
        assert not in_block(source.filled(0), memory) and source.calls == calls + 1
    assert in_block(run(CALLS)[0], memory)


def test_other_threads_get_ordinary_memory():
    source, memory, others = Source(), ArenaMemory(), []

    def plain(base):
        mine = source.filled(base)
        thread = threading.Thread(target=lambda: others.append(source.filled(-1)))
        thread.start()
        thread.join()
        return (source.filled(0).copy_(mine),)

    run = ArenaRun(plain, 0, memory, least=0)
    assert all(holds(run(base)[0], base) for base in range(CALLS))
    assert len(others) == CALLS and not any(in_block(one, memory) for one in others)
    assert all(holds(one, -1) for one in others) and source.calls == 2 + CALLS


def test_a_call_within_a_call_disturbs_neither():
    source, memory = Source(), ArenaMemory()
    inner = ArenaRun(filling(source, 10), 0, memory, least=0)

    def plain(base):
        first, (middle,) = source.filled(base, 10), inner(base)
        return source.filled(0, 10).add_(first).add_(middle), middle

    run = ArenaRun(plain, 0, memory, least=0)
    for base in range(CALLS):
        last, middle = run(base)
        assert holds(last, 2 * base + 1) and holds(middle, base + 1)
    assert in_block(last, memory) and in_block(middle, memory)


@pytest.mark.parametrize("more", [0, 1])
def test_programs_with_fewer_bytes_than_the_least_run_on_ordinary_memory(more):
    source, memory = Source(), ArenaMemory()
    run = ArenaRun(filling(source, 16), 0, memory, least=2 * UNIT + more)
    for base in range(CALLS):
        before, (output,) = source.calls, run(base)
        assert holds(output, base + 1)
        assert in_block(output, memory) == (base > 0 and not more)
        assert source.calls - before == (0 if base > 0 and not more else 2)
    assert memory._block.numel() == (0 if more else 2 * UNIT)
