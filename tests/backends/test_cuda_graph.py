"""The bookkeeping of `GraphedRun`, with `FakeGraphs` in the place of CUDA graphs; a GPU runs test_training_gpu*.py."""

import gc
import logging
import operator

import pytest
import torch
from fake_graphs import FakeGraphs
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_compiler.backends.cuda_capture import TorchGraphs
from amp_compiler.backends.cuda_graph import MOST_MOVES, WARM_UPS, GraphedRun, GraphSettings, graph_obstacle


class Step:
    """`state += batch`; gives the new sum, and a 'gradient' that stays in the graph."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[torch.Tensor] = []

    def __call__(self, state, batch):
        self.calls += 1
        self.seen.append(batch)
        state += batch.sum(0)
        return [state.sum(), batch * 2]


def graphed(step, api=None, **options):
    settings = GraphSettings(api or FakeGraphs(), **options)
    return GraphedRun(step, ["state", "batch"], [1], 1, settings), settings


def test_every_call_is_one_step_and_outputs_are_copied_out():
    step = Step()
    run, settings = graphed(step)
    state, sums, last = torch.zeros(3), [], None
    for number in range(WARM_UPS + 4):
        batch = torch.full((2, 3), float(number + 1))
        sums.append(run(state, batch)[0])
        expected = sum(range(1, number + 2)) * 2.0
        assert torch.equal(state, torch.full((3,), expected)) and float(sums[-1]) == 3 * expected
    assert settings.api.log == ["warm_up"] * WARM_UPS + ["capture"] + ["replay"] * 4
    assert [float(value) for value in sums] == [3.0 * n * (n + 1) for n in range(1, WARM_UPS + 5)]  # none overwritten
    last = run(state, torch.ones(2, 3))
    again = run(state, torch.ones(2, 3))
    assert last[1].data_ptr() == again[1].data_ptr()  # the gradient is a reference into the graph
    assert last[0].data_ptr() != again[0].data_ptr()
    assert run.execution == "as one graph, replayed as a CUDA graph" and not run.reason


def test_the_graph_reads_its_own_buffer_of_the_batchs_layout():
    step = Step()
    run, _ = graphed(step)
    state = torch.zeros(3)
    for number in range(WARM_UPS + 3):
        batch = torch.arange(3.0).add(number).expand(2, 3)
        before = state.clone()
        run(state, batch)
        assert torch.equal(state, before + 2 * (torch.arange(3.0) + number))
    fixed = step.seen[WARM_UPS:]
    assert len({value.data_ptr() for value in fixed}) == 1
    assert all(value.stride() == (0, 1) for value in fixed)


def test_state_that_moves_is_captured_anew_and_the_old_graph_goes():
    step = Step()
    run, settings = graphed(step)
    state = torch.zeros(3)
    for _ in range(WARM_UPS + 2):
        run(state, torch.ones(2, 3))
    state = state.clone()
    settings.api.log.clear()
    for _ in range(3):
        run(state, torch.ones(2, 3))
        gc.collect()
        assert len(settings.live) <= 1
    assert settings.api.log == ["warm_up", "capture", "replay", "replay"]
    assert torch.equal(state, torch.full((3,), 2.0 * (WARM_UPS + 5)))


@pytest.mark.parametrize(
    "change", [lambda s: s.t().contiguous().t(), lambda s: s[:, :2], lambda s: s.view(torch.int32)]
)
def test_a_change_of_layout_alone_counts_as_a_move(change):
    run, settings = graphed(lambda state, batch: [state.sum()])
    state = torch.ones(4, 4)
    for _ in range(WARM_UPS + 1):
        run(state, torch.ones(1))
    settings.api.log.clear()
    run(change(state), torch.ones(1))
    assert settings.api.log == ["warm_up"]


def test_state_that_always_moves_ends_the_attempts(caplog):
    step = Step()
    run, settings = graphed(step)
    kept = [torch.zeros(3) for _ in range(MOST_MOVES + 3)]
    for state in kept:
        run(state, torch.ones(2, 3))
    assert "'state' was the last" in run.reason and step.calls == len(kept)
    assert "capture" not in settings.api.log and all(torch.equal(state, torch.full((3,), 2.0)) for state in kept)


@pytest.mark.parametrize("started", [False, True], ids=["at once", "half way"])
def test_a_capture_that_fails_changes_nothing_and_the_step_goes_on(started, caplog):
    step = Step()
    api = FakeGraphs(fails="operation not permitted when stream is capturing", half_way=started)
    run, settings = graphed(step, api)
    state = torch.zeros(3)
    with caplog.at_level(logging.INFO, "amp_compiler"):
        for number in range(WARM_UPS + 4):
            run(state, torch.ones(2, 3))
            assert torch.equal(state, torch.full((3,), 2.0 * (number + 1)))
    assert settings.api.log == ["warm_up"] * WARM_UPS + ["capture"]
    assert "the capture failed: RuntimeError: operation not permitted" in run.execution
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "not permitted" in warnings[0].getMessage()


def test_an_error_that_is_no_failure_of_the_capture_is_not_swallowed():
    def wrong(state, batch):
        if len(api.log) > WARM_UPS:
            raise KeyError("a bug")
        return [state]

    api = FakeGraphs()
    run, _ = graphed(wrong, api)
    state = torch.zeros(3)
    for _ in range(WARM_UPS):
        run(state, torch.ones(1))
    with pytest.raises(KeyError):
        run(state, torch.ones(1))


def test_the_number_of_graphs_is_limited_and_a_graph_that_goes_makes_room():
    settings = GraphSettings(FakeGraphs(), most=2)
    runs = [GraphedRun(Step(), ["state", "batch"], [1], 1, settings) for _ in range(3)]
    state = torch.zeros(3)
    for run in runs:
        for _ in range(WARM_UPS + 1):
            run(state, torch.ones(2, 3))
    assert [bool(run.reason) for run in runs] == [False, False, True] and "2 graphs are held" in runs[2].reason
    del runs[0], run
    gc.collect()
    late = GraphedRun(Step(), ["state", "batch"], [1], 1, settings)
    for _ in range(WARM_UPS + 1):
        late(state, torch.ones(2, 3))
    assert late.execution == "as one graph, replayed as a CUDA graph"


SPARSE = torch.eye(3).to_sparse()
CASES = [
    ("on the cpu", TorchGraphs(), torch.zeros(3), torch.ones(2, 3)),
    ("the tensors are on cpu and 'batch' on meta", FakeGraphs(), torch.zeros(3), torch.ones(2, 3, device="meta")),
    ("'batch' is a Tensor of layout torch.sparse_coo", FakeGraphs(), torch.zeros(3), SPARSE),
    ("it has no tensors", FakeGraphs(), 1, 2),
]


@pytest.mark.parametrize(("text", "api", "state", "batch"), CASES, ids=[case[0] for case in CASES])
def test_why_there_is_no_graph_can_be_read(text, api, state, batch, caplog):
    run, settings = graphed(lambda state, batch: [batch], api)
    with caplog.at_level(logging.INFO, "amp_compiler"):
        for _ in range(3):
            run(state, batch)
        GraphedRun(lambda *inputs: [], ["state", "batch"], [1], 1, settings)(state, batch)
    assert text in run.execution
    assert sum(text in record.getMessage() for record in caplog.records) == 1


def test_numbers_are_constants_and_symbols_are_refused():
    run, settings = graphed(lambda state, batch: [state * batch])
    for _ in range(WARM_UPS + 2):
        assert float(run(STATE, 3)[0]) == 3.0
    assert settings.api.log[-1] == "replay"
    symbol = ShapeEnv().create_unbacked_symint()
    run, settings = graphed(lambda state, batch: [state])
    run(STATE, symbol)
    assert "symbolic number" in run.reason


STATE = torch.ones(())


def graph_of(*values):
    """A graph with one node per value, in `meta["val"]`."""
    graph = fx.Graph()
    last = graph.placeholder("x")
    last.meta["val"] = torch.empty(2, device="meta")
    for target, value in values:
        last = graph.call_function(target, (last,))
        last.meta["val"] = value
    graph.output(last)
    return graph


def test_values_on_the_host_keep_a_graph_from_being_replayed():
    home, cpu = torch.empty(2, device="meta"), torch.empty(2)
    aten = torch.ops.aten
    assert graph_obstacle(graph_of((aten.neg.default, home), (aten.neg.default, [home, (home, None)]))) == ""
    assert "'rand_default' is on cpu" in graph_obstacle(graph_of((aten.rand.default, cpu), (aten.add.Tensor, home)))
    assert "'max_dim' is on cpu" in graph_obstacle(graph_of((aten.max.dim, (home, cpu))))
    one = torch.empty(())
    assert graph_obstacle(graph_of((aten.full.default, one), (aten.where.self, home))) == ""
    # A copy of a host scalar would be recorded with the host's address.
    copied = graph_of((aten.full.default, one), (aten._to_copy.default, home))
    assert "'full_default' is on cpu" in graph_obstacle(copied)
    symbol = ShapeEnv().create_unbacked_symint()
    assert "known only when the step runs" in graph_obstacle(graph_of((operator.add, symbol)))
