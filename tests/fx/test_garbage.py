"""Full garbage collections while a graph is built."""

import gc
import threading
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from toys import eager_step, mean_square

import amp_compiler as amp
from amp_compiler.fx.garbage import without_full_collections
from amp_compiler.passes.base import InPlacePass, PassResult


@pytest.fixture
def eager():
    """Thresholds at which every few objects bring a full collection."""
    before = gc.get_threshold()
    gc.set_threshold(10, 1, 1)
    yield
    gc.set_threshold(*before)


def test_the_last_one_out_restores_it(eager):
    """Blocks of several threads end in any order; an error ends one like any other."""
    entered, leave = threading.Event(), threading.Event()

    def other():
        with without_full_collections():
            entered.set()
            leave.wait()

    with pytest.raises(KeyError), without_full_collections():
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        raise KeyError
    assert gc.get_threshold()[2] > 10
    leave.set()
    thread.join()
    assert gc.get_threshold() == (10, 1, 1)


def test_a_build_is_within():
    """Of a step and of a compiled model: seen by a pass of the user's in each."""
    seen = []

    @dataclass(frozen=True)
    class Spy(InPlacePass):
        """Sees how the collector stands. Before and after are the same."""

        name: ClassVar[str] = "spy"
        exact: ClassVar[bool] = True
        skippable: ClassVar[bool] = True

        def run(self, subject):
            seen.append(gc.get_threshold()[2])
            return PassResult(subject, False)

    passes = amp.pipelines.FORWARD.insert_after("apply_plan", Spy())
    x, before, plain = torch.randn(2, 3), gc.get_threshold(), torch.nn.Linear(3, 1)
    eager_step(plain, mean_square, passes=passes)(x)
    amp.compile(plain, dtype="bf16", backend="eager", passes=passes)(x)
    assert len(seen) == 2 and min(seen) > before[2] and gc.get_threshold() == before
