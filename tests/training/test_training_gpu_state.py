"""A training step on a CUDA device: state that moves, resumed runs, several graphs, and captures that cannot be."""

import copy
import gc
import itertools

import pytest
import torch
from torch import nn
from toys import classes, squares
from training_gpu import REPLAYED, NoWaiting, batches, make, one_order_of_sums, weights, without_graphs

import amp_compiler as amp
from amp_compiler.backends.cuda_graph import WARM_UPS
from amp_compiler.errors import LossScaleError
from amp_compiler.ops.loss_scale import DynamicLossScale
from amp_compiler.passes.device.recompute_cheap import RecomputeCheap

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def in_one_order():
    with one_order_of_sums():
        yield


def test_state_that_moves_is_captured_anew():
    results = []
    for moves in (False, True):
        model, optimizer, step = make()
        for number, (x, y) in enumerate(batches(24)):
            step(x, y)
            if moves and number == 8:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            elif moves and number == 14:
                model.head.weight.data = model.head.weight.detach().clone()
            elif moves and number == 18:
                step.load_state_dict(step.state_dict())
        assert step.execution == REPLAYED
        results.append(weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_resumed_run_goes_on_where_it_was():
    model, optimizer, step = make(drop=0.1)
    inputs = list(batches(20))
    for x, y in inputs[:10]:
        step(x, y)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), step.state_dict()))
    random = torch.cuda.get_rng_state()
    straight = [step(x, y) for x, y in inputs[10:]]
    other, other_optimizer, resumed = make(drop=0.1)
    other.load_state_dict(saved[0]), other_optimizer.load_state_dict(saved[1]), resumed.load_state_dict(saved[2])
    torch.cuda.set_rng_state(random)
    again = [resumed(x, y) for x, y in inputs[10:]]
    torch.testing.assert_close(straight, again, rtol=1e-5, atol=1e-6)
    for a, b in zip(weights(model), weights(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_two_shapes_have_two_graphs_of_one_pool():
    _, _, step = make(dynamic_shapes=None)
    _, _, plain = make(dynamic_shapes=None)
    without_graphs(plain)
    for large, small in zip(batches(12, 32), batches(12, 20, seed=1), strict=True):
        for batch in (large, small):
            torch.testing.assert_close(step(*batch), plain(*batch), rtol=1e-5, atol=1e-6)
            for name, gradient in plain.gradients().items():
                torch.testing.assert_close(step.gradients()[name], gradient, rtol=1e-3, atol=1e-5)
    assert len(step._state.graphs.live) == 2 and step.execution == REPLAYED


def test_what_cannot_be_captured_still_trains():
    def reads_the_host(model, x, y):
        return classes(model, x, y) + torch.rand(4).to(x.device).sum() * 0

    model, _, step = make(loss=reads_the_host)
    before = weights(model)
    for x, y in batches(WARM_UPS + 3):
        loss = step(x, y)
    assert "without a CUDA graph" in step.execution and torch.isfinite(loss)
    assert not torch.equal(before[0], model.conv.weight)


def fail_half_way(step):
    """From now on the last program waits for the device at the end of its capture, which is forbidden there."""
    run = step._last[0].compiled.run
    compiled = run._run

    def waits(*inputs):
        outputs = compiled(*inputs)
        if torch.cuda.is_current_stream_capturing():
            outputs[0].item()
        return outputs

    run._run = waits


def test_a_capture_that_fails_leaves_torch_and_the_training_as_they_were():
    model, _, step = make()
    reference, _, plain = make()
    without_graphs(plain)
    inputs = list(batches(WARM_UPS + 6))
    for number, (x, y) in enumerate(inputs):
        if number == WARM_UPS:
            fail_half_way(step)
        stream = torch.cuda.current_stream()
        step(x, y), plain(x, y)
        assert torch.cuda.current_stream() == stream
    assert "the capture failed" in step.execution
    for a, b in zip(weights(model), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    _, _, later = make()
    for x, y in inputs:
        later(x, y)
    assert later.execution == REPLAYED


def test_behind_a_failed_capture_random_numbers_and_other_shapes_go_on():
    """A failed capture leaves torch's generator in a capture, and the pool open, where nobody fixes it."""
    _, _, step = make(drop=0.5, dynamic_shapes=None)
    _, _, other = make(drop=0.5)
    sizes = {size: list(batches(WARM_UPS + 4, size)) for size in (32, 20, 24)}
    for batch in sizes[32]:
        step(*batch), other(*batch)
    for number, batch in enumerate(sizes[20]):
        if number == WARM_UPS:
            fail_half_way(step)
        step(*batch)
    assert "the capture failed" in step.execution
    before = torch.cuda.get_rng_state().tolist()
    torch.rand(8, device="cuda")
    assert torch.cuda.get_rng_state().tolist() != before
    for batch in sizes[24]:
        step(*batch)
    assert step.execution == REPLAYED
    for _ in range(3):
        step(*sizes[32][0]), other(*sizes[32][0])
    assert step.execution == other.execution == REPLAYED


def test_the_memory_of_a_failed_capture_is_given_back():
    _, _, step = make()
    inputs = list(batches(WARM_UPS + 2, 4096))
    held = []
    for number, batch in enumerate(inputs):
        if number == WARM_UPS:
            fail_half_way(step)
        step(*batch)
        if number >= WARM_UPS - 1:
            gc.collect(), torch.cuda.empty_cache()
            held.append(torch.cuda.memory_reserved())
    assert "the capture failed" in step.execution and max(held[1:]) <= held[0] + 2**21


def test_signatures_share_the_memory_of_their_gradients():
    _, _, step = make(dynamic_shapes=None)
    gradients = sum(parameter.numel() * 4 for parameter in step.model.parameters())
    held = []
    for size in (64, 48, 32, 16):
        inputs = list(batches(WARM_UPS + 2, size))
        for batch in inputs:
            step(*batch)
        held.append(torch.cuda.memory_allocated() - sum(x.nbytes + y.nbytes for x, y in inputs))
        assert step.execution == REPLAYED
    buffers = 64 * (3 * 8 * 8 * 4 + 8) + 2**15  # of the batch, and tables of addresses
    assert all(later - earlier < gradients // 4 + buffers for earlier, later in itertools.pairwise(held))


def test_the_workspaces_of_cublas_are_the_graphs_own():
    """Any recording by torch.compile in the process clears those that lie outside."""
    model, _, step = make()
    reference, _, plain = make()
    without_graphs(plain)
    inputs = list(batches(WARM_UPS + 6))
    for x, y in inputs[: WARM_UPS + 2]:
        step(x, y), plain(x, y)
    assert step.execution == REPLAYED
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    filled = [torch.full((2**20,), float("nan"), device="cuda") for _ in range(64)]
    for x, y in inputs[WARM_UPS + 2 :]:
        step(x, y), plain(x, y)
    assert all(bool(tensor.isnan().all()) for tensor in filled)
    for a, b in zip(weights(model), weights(reference), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_stuck_run_ends_by_itself_without_waiting():
    _, _, step = make(loss_scale=DynamicLossScale(2.0, min=1.0))
    inputs = list(batches(WARM_UPS + 2))
    for x, y in inputs:
        step(x, y)
    bad = inputs[0][0] * float("inf")
    with NoWaiting():
        for _ in range(15):
            step(bad, inputs[0][1])
    with pytest.raises(LossScaleError, match=r"conv\.weight"):
        for _ in range(500):
            step(bad, inputs[0][1])
            torch.cuda.synchronize()


# ---- what a step keeps for its backward: the allocator's peak, and the numbers

ROWS, WIDE, INNER, BLOCKS = 2048, 128, 1024, 6
KEPT = amp.pipelines.DEVICE.skip("recompute_cheap")
RECOMPUTED = KEPT.insert_before("defer_gradients", RecomputeCheap(most=1.0))  # products as small as these take no time


class Residual(nn.Module):
    """Two products with GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, INNER), nn.Linear(INNER, WIDE)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def trained(passes):
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(BLOCKS)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = amp.training_step(model, squares, optimizer, dtype="bf16", passes=passes)
    batch = torch.randn(2, ROWS, WIDE, device="cuda")
    losses = [step(*batch)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    losses.append(step(*batch))  # in the allocator's own memory still, not in that of a graph
    peak = torch.cuda.max_memory_allocated() - start
    losses += [step(*batch) for _ in range(4)]
    assert step.execution == REPLAYED
    return torch.stack(losses), peak


def test_activations_that_are_computed_again_are_not_kept(record_property):
    (losses, peak), (expected, whole) = trained(RECOMPUTED), trained(KEPT)
    record_property("memory at most, MB", f"{peak / 1e6:.1f} of {whole / 1e6:.1f}")
    torch.testing.assert_close(losses, expected, rtol=2**-8, atol=0)  # loops that fuse otherwise round elsewhere
    assert whole - peak > 2 * ROWS * INNER * (BLOCKS - 2), "GELU's results in 16 bits, but those of the last blocks"
