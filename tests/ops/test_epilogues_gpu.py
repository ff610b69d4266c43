"""Each epilogue of cuBLASLt on a CUDA device: its numbers, NaN, and its time beside that of a product and loops."""

from __future__ import annotations

import functools

import pytest
import torch

from amp_compiler.ops import epilogues
from amp_compiler.ops.cuda import cublaslt, epilogue_trials
from amp_compiler.ops.cuda.cublaslt import Refused
from amp_compiler.ops.cuda.epilogue_trials import Trials
from amp_compiler.ops.cuda.trying import seconds_of
from amp_compiler.ops.epilogues import ACTIVATION, GRADIENT, WITH_SUM, composed, mask_bytes, prepared

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SIZES = {"small": (512, 256, 384), "wide": (8192, 1024, 4096)}  # rows, inner, columns
CALLS = [
    pytest.param(operator, activation, more, id=f"{operator.overloadpacket.__name__}-{activation}-{more}")
    for operator in epilogues.OPERATORS
    for activation in epilogues.ACTIVATIONS[: 1 if operator is WITH_SUM else None]
    for more in (True, False)
]


def call(operator, activation, more, dtype, size):
    """Operands as a linear layer has them in its forward and its backward."""
    rows, inner, columns = SIZES[size]

    def of(*shape, dtype=dtype):
        return torch.randn(shape, device="cuda").to(dtype) if dtype.is_floating_point else torch.zeros(
            shape, dtype=dtype, device="cuda"
        )  # fmt: skip

    if operator is WITH_SUM:
        return of(rows, inner).t(), of(rows, columns), more
    left, right = of(rows, inner), of(columns, inner).t() * inner**-0.5
    if operator is ACTIVATION:
        return left, right, of(columns) if more else None, activation
    kept = of(rows, columns) if activation == "gelu" else of(rows, mask_bytes(columns), dtype=torch.uint8)
    return left, right, kept, activation, more


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("operator", "activation", "more"), CALLS)
def test_each_epilogue_by_itself(operator, activation, more, dtype, size, monkeypatch, record_property):
    """A trial finds no wrong number in it; what the times are is told, and fails nothing."""
    given = call(operator, activation, more, dtype, size)
    library = cublaslt.CUBLASLT
    Trials()(operator, given)  # torch keeps a workspace for its own products
    before = torch.cuda.memory_reserved()
    taken = {True: [], False: []}

    def timed(run, device):
        by_library = isinstance(run, functools.partial) and run.func == library.run
        taken[by_library].append(seconds_of(run, device))
        return float(not by_library)

    monkeypatch.setattr(epilogue_trials, "seconds_of", timed)
    verdict = Trials()(operator, given)
    assert torch.cuda.memory_reserved() <= before + (2 << 20), "a trial gives back what it took"
    if verdict.startswith("refused"):
        pytest.skip(f"cuBLASLt {verdict}")
    assert verdict == ""
    record_property("epilogue_us", round(1e6 * min(taken[True]), 1))
    record_property("loops_us", round(1e6 * min(taken[False]), 1))


@pytest.mark.parametrize("activation", epilogues.ACTIVATIONS)
def test_calls_are_captured_and_replayed(activation):
    """A graph holds the workspace; what it reads may change between two replays."""
    forward, backward = (call(one, activation, True, torch.bfloat16, "small") for one in (ACTIVATION, GRADIENT))
    for operator, given in ((ACTIVATION, forward), (GRADIENT, backward)):
        try:
            made, _ = prepared(operator, *given)
            cublaslt.CUBLASLT.choices(made)
            cublaslt.CUBLASLT.prefer(made, 0)
        except Refused as reason:
            pytest.skip(f"cuBLASLt refuses: {reason}")
    ACTIVATION(*forward), GRADIENT(*backward)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, kept = ACTIVATION(*forward)
        gradient, total = GRADIENT(backward[0], backward[1], kept, activation, True)
    forward[0].neg_()
    graph.replay()
    torch.cuda.synchronize()
    made, again = composed(ACTIVATION, *forward)
    expected, sums = composed(GRADIENT, backward[0], backward[1], again, activation, True)
    torch.testing.assert_close(out, made, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(gradient, expected, rtol=2**-6, atol=2**-5)
    torch.testing.assert_close(total, sums, rtol=2**-6, atol=2**-2)  # of 512 rows, each rounded or not
