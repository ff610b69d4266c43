"""What is tried out before it is used: right numbers, NaN where NaN is, and faster than what it replaces."""

from __future__ import annotations

import cublaslt_stand_in
import numpy as np
import pytest
import torch
from cublaslt_stand_in import StandIn

from amp_compiler.ops import epilogues
from amp_compiler.ops.cuda import cublaslt, epilogue_trials
from amp_compiler.ops.cuda.epilogue_trials import Trials
from amp_compiler.ops.epilogues import ACTIVATION, GRADIENT, WITH_SUM, mask_bytes

ROWS, INNER, COLUMNS = 64, 32, 136


@pytest.fixture
def stand_in(monkeypatch):
    """A library that is as fast as its number of algorithms says, and loops that take 10."""
    made = StandIn()
    monkeypatch.setattr(cublaslt, "CUBLASLT", cublaslt.Cublaslt(made, "cpu"))
    monkeypatch.setattr(epilogue_trials, "seconds_of", lambda run, device: seconds(made, run))
    return made


def seconds(made, run):
    before = len(made.ran)
    run()
    return 10.0 if len(made.ran) == before else {1: 5.0, 2: 3.0}[made.ran[-1].algorithm]


def call(operator, activation="gelu", dtype=torch.bfloat16, more=True):
    """Fake arguments; `more` is a bias, sums, or the left operand."""

    def of(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype)

    if operator is WITH_SUM:
        return of(INNER, ROWS).t(), of(INNER, COLUMNS), more
    left, right = of(ROWS, INNER), of(COLUMNS, INNER).t()
    if operator is ACTIVATION:
        return left, right, of(COLUMNS) if more else None, activation
    kept = of(ROWS, COLUMNS) if activation == "gelu" else of(ROWS, mask_bytes(COLUMNS), dtype=torch.uint8)
    return left, right, kept, activation, more


CALLS = [
    pytest.param(operator, activation, more, id=f"{operator.overloadpacket.__name__}-{activation}-{more}")
    for operator in epilogues.OPERATORS
    for activation in epilogues.ACTIVATIONS[: 1 if operator is WITH_SUM else None]
    for more in (True, False)
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("operator", "activation", "more"), CALLS)
def test_what_is_right_and_faster_is_used_by_its_fastest_algorithm(operator, activation, more, dtype, stand_in):
    trials, state = Trials(), torch.get_rng_state()
    given = call(operator, activation, dtype, more)
    assert trials(operator, given) == ""
    assert torch.equal(torch.get_rng_state(), state), "the user's random numbers are not touched"
    count = len(stand_in.ran)
    assert trials(operator, given) == "" and len(stand_in.ran) == count, "tried once"
    real = [torch.zeros_like(one) if isinstance(one, torch.Tensor) else one for one in given]
    operator(*real)
    assert stand_in.ran[-1].algorithm == 2


@pytest.mark.parametrize(("operator", "activation", "more"), CALLS)
@pytest.mark.parametrize("wrong", ["scaled", "one element", "rounded once too often", "not written"])
def test_other_numbers_are_found(wrong, operator, activation, more, stand_in):
    def breaks(name, algorithm, values):
        values = values.copy()
        if wrong == "scaled":
            return values * np.float32(1.1)
        if wrong == "one element":
            values[5, 7] += 1
        elif wrong == "not written":
            values[:, -1] = -77
        else:  # as by partial sums in 8 bits
            values = np.round(values * 8) / 8
        return values

    stand_in.breaks = breaks
    assert Trials()(operator, call(operator, activation, more=more)) == "wrong:-other-numbers"


@pytest.mark.parametrize(("operator", "activation", "more"), CALLS)
def test_what_an_algorithm_leaves_out_is_found(operator, activation, more, stand_in):
    """The first one has left the right numbers there."""
    stand_in.silent = (2,)
    given = call(operator, activation, more=more)
    assert Trials()(operator, given) == ""
    operator(*(torch.zeros_like(one) if isinstance(one, torch.Tensor) else one for one in given))
    assert stand_in.ran[-1].algorithm == (2 if operator is GRADIENT and not more else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("operator", [ACTIVATION, GRADIENT])
def test_gelu_by_the_error_function_is_found(operator, dtype, monkeypatch, stand_in):
    def by_erf(values):
        return torch.nn.functional.gelu(torch.from_numpy(values.astype(np.float32))).numpy()

    def slope_by_erf(values):
        ones = torch.ones(values.shape)
        return torch.ops.aten.gelu_backward.default(ones, torch.from_numpy(values.astype(np.float32))).numpy()

    monkeypatch.setattr(cublaslt_stand_in, "gelu", by_erf)
    monkeypatch.setattr(cublaslt_stand_in, "gelu_slope", slope_by_erf)
    assert Trials()(operator, call(operator, dtype=dtype)) == "wrong:-another-GELU"


def test_one_algorithm_may_be_wrong_and_another_right(stand_in):
    stand_in.breaks = lambda name, algorithm, values: values if algorithm == 1 else values + 1
    given = call(WITH_SUM)
    assert Trials()(WITH_SUM, given) == ""
    WITH_SUM(*(torch.zeros_like(one) for one in given[:2]), True)
    assert stand_in.ran[-1].algorithm == 1


@pytest.mark.parametrize("activation", epilogues.ACTIVATIONS)
def test_a_lost_nan_is_found(activation, stand_in):
    stand_in.breaks = lambda name, algorithm, values: np.where(np.isnan(values), np.float32(0), values)
    assert Trials()(ACTIVATION, call(ACTIVATION, activation)) == "wrong:-NaN-is-lost-or-made"
    stand_in.breaks = lambda name, algorithm, values: values + 0 * values.sum()
    assert Trials()(GRADIENT, call(GRADIENT, activation)) == "wrong:-NaN-is-lost-or-made"


def test_what_is_slower_or_refused_is_not_used(stand_in, monkeypatch):
    monkeypatch.setattr(epilogue_trials, "seconds_of", lambda run, device: 0.25 * seconds(stand_in, run) ** -1)
    assert Trials()(WITH_SUM, call(WITH_SUM)) == "slower:-2.00-of-the-time"
    stand_in.refuses = ("BGRADA", "BGRADB")
    monkeypatch.setattr(cublaslt, "CUBLASLT", cublaslt.Cublaslt(stand_in, "cpu"))
    assert Trials()(WITH_SUM, call(WITH_SUM)) == "refused:-not-supported"
    monkeypatch.setattr(cublaslt, "CUBLASLT", cublaslt.Cublaslt(stand_in, "cuda"))
    assert Trials()(WITH_SUM, call(WITH_SUM)) == "no-cuBLASLt"


def test_deterministic_algorithms_are_asked_for_elsewhere(stand_in):
    trials = Trials()
    torch.use_deterministic_algorithms(True)
    try:
        assert trials(WITH_SUM, call(WITH_SUM)) == "not-known-to-be-deterministic" and not stand_in.ran
    finally:
        torch.use_deterministic_algorithms(False)
    assert trials(WITH_SUM, call(WITH_SUM)) == ""


def test_without_memory_it_is_tried_again_another_time(stand_in, monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trials, given = Trials(), call(WITH_SUM)
    with monkeypatch.context() as patched:
        patched.setattr(epilogue_trials, "random_like", full)
        assert trials(WITH_SUM, given) == "no-memory-to-try-it"
    assert trials(WITH_SUM, given) == ""
