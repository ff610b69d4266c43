"""A tuned step whose products do more at their end, on a CPU with what stands in for cuBLASLt."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cublaslt_stand_in import StandIn
from torch import nn
from toys import squares

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, eager
from amp_compiler.backends.backend import TUNED
from amp_compiler.fx.text import format_fx
from amp_compiler.ops.cuda import cublaslt, epilogue_trials
from amp_compiler.training import build

WIDE, INNER, ROWS = 16, 64, 24
DYNAMIC = torch.export.Dim.DYNAMIC


class WrittenOut(nn.Module):
    """GELU as GPT-2 writes it."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Block(nn.Module):
    """The half of a transformer's block that this is about, and a head."""

    def __init__(self, activation, bias=True):
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDE), activation
        self.up, self.down = nn.Linear(WIDE, INNER, bias), nn.Linear(INNER, WIDE, bias)
        self.head = nn.Linear(WIDE, 8, bias)

    def forward(self, x):
        return self.head(x + self.down(self.act(self.up(self.norm(x)))))


@pytest.fixture
def stand_in(monkeypatch):
    """A CPU that has cuBLASLt, and a compiler that runs what it is given node by node."""
    made = StandIn()
    monkeypatch.setattr(cublaslt, "CUBLASLT", cublaslt.Cublaslt(made, "cpu"))
    monkeypatch.setattr(build, "TRIALS", epilogue_trials.Trials())
    monkeypatch.setattr(build, "_TRIED", "cpu")

    monkeypatch.setattr(epilogue_trials, "seconds_of", lambda run, device: 1.0 if by_library(made, run) else 2.0)
    tuned = dataclasses.replace(BACKENDS["inductor"], build=eager.build, modes={TUNED: eager.build})
    monkeypatch.setitem(BACKENDS, "inductor", tuned)
    return made


def by_library(made, run):
    """Run, and say whether cuBLASLt did."""
    before = len(made.ran)
    run()
    return len(made.ran) > before


def trained(model, mode, steps=4, **options):
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    step = amp.training_step(
        model, squares, torch.optim.AdamW(model.parameters(), 1e-2), dtype="bf16", mode=mode, **options
    )
    x, y = torch.randn(2, ROWS // 2, WIDE), torch.randn(2, ROWS // 2, 8)
    losses = torch.stack([step(x, y) for _ in range(steps)])
    return step, losses


def compared(make, expected, stand_in, **options):
    """The epilogues of one step; its losses and gradients are those of a step that is not tuned, by rounding."""
    step, losses = trained(make(), TUNED, **options)
    ran = len(stand_in.ran)
    x, y = torch.randn(2, ROWS // 2, WIDE), torch.randn(2, ROWS // 2, 8)
    step(x, y)
    assert sorted(one.epilogue for one in stand_in.ran[ran:]) == sorted(expected)
    plain, theirs = trained(make(), "default", **options)
    plain(x, y)
    assert len(stand_in.ran) == ran + len(expected), "a step that is not tuned asks for none"
    torch.testing.assert_close(losses, theirs, rtol=2e-2, atol=0)
    for name, gradient in step.gradients().items():
        other = plain.gradients()[name]
        assert (gradient - other).norm() <= 5e-2 * other.norm(), name
    return step


def test_gelu_written_out_its_gradient_and_those_of_all_biases(stand_in):
    # `head` and `down` have their sums beside the weights' gradients, `up` beside GELU's.
    step = compared(lambda: Block(WrittenOut()), ["GELU_AUX_BIAS", "DGELU_BGRAD", "BGRADB", "BGRADB"], stand_in)
    text = step.stages["fuse_epilogues"].text
    assert "aten.tanh" not in text and "aten.sum.dim_IntList" not in text and "gelu_backward.default" not in text
    assert "aten.tanh" not in format_fx(step.graph_module), "GELU is one operator before autograd sees it"
    assert not step.plan.notes


def test_relu_without_biases_as_t5s(stand_in):
    compared(lambda: Block(nn.ReLU(), bias=False), ["RELU_AUX", "DRELU"], stand_in)


@pytest.mark.slow  # the golden text of `fuse_epilogues` has it
def test_gelu_by_the_error_function_leaves_the_sums(stand_in):
    compared(lambda: Block(nn.GELU()), ["BGRADB"] * 3, stand_in)


@pytest.mark.slow  # the golden text of `fuse_epilogues` has it
def test_dropout_between_leaves_the_loops(stand_in):
    make = lambda: Block(nn.Sequential(nn.GELU(approximate="tanh"), nn.Dropout(0.5)))  # noqa: E731
    step, _ = trained(make(), TUNED)
    names = {one.epilogue for one in stand_in.ran}
    assert names == {"BGRADB"} and "gelu_backward" in step.stages["fuse_epilogues"].text


def test_it_goes_with_recomputation_and_with_gathered_batches(stand_in):
    again = amp.pipelines.DEVICE.skip("recompute_cheap").insert_before(
        "fuse_epilogues", amp.passes.RecomputeCheap(devices=("cpu",), least=0, most=10.0)
    )
    expected = ["GELU_AUX_BIAS", "DGELU_BGRAD", "BGRADB", "BGRADB"]
    step = compared(lambda: Block(nn.GELU(approximate="tanh")), expected, stand_in, passes=again)
    text = step.stages["fuse_epilogues"].text
    assert any("aten.gelu.default" in line and "phase=backward" in line for line in text.splitlines())
    step, _ = trained(Block(nn.GELU(approximate="tanh")), TUNED, accumulate=2)
    assert "DGELU_BGRAD" in {one.epilogue for one in stand_in.ran}


def test_what_is_refused_or_slower_stays_and_the_plan_says_so(stand_in, monkeypatch):
    stand_in.refuses = ("DGELU_BGRAD", "BGRADB")
    step = compared(lambda: Block(nn.GELU(approximate="tanh")), ["GELU_AUX_BIAS", "DGELU"], stand_in)
    assert len(step.plan.notes) == 2
    assert all("refused: not supported (at " in note for note in step.plan.notes)
    assert f"note: {step.plan.notes[0]}" in str(step.plan)
    monkeypatch.setattr(build, "TRIALS", epilogue_trials.Trials())
    monkeypatch.setattr(epilogue_trials, "seconds_of", lambda run, device: 2.0 if by_library(stand_in, run) else 1.0)
    step = compared(lambda: Block(nn.GELU(approximate="tanh")), [], stand_in)
    assert "mm_activation slower: 2.00 of the time" in " ".join(step.plan.notes)


def test_sizes_that_may_change_are_left_alone_and_get_no_bound(stand_in, builds):
    model = Block(nn.GELU(approximate="tanh"))
    optimizer, sizes = torch.optim.SGD(model.parameters(), 1e-2), ({0: DYNAMIC}, {0: DYNAMIC})
    step = amp.training_step(model, squares, optimizer, dtype="bf16", mode=TUNED, dynamic_shapes=sizes)
    for rows in (24, 40, 7):
        step(torch.randn(rows, WIDE), torch.randn(rows, 8))
    assert len(builds) == 1 and not stand_in.ran and "amp_compiler.mm_" not in step.stages["fuse_epilogues"].text


def test_a_step_is_tuned_where_kernels_can_be_tried_alone(stand_in, monkeypatch):
    monkeypatch.setattr(build, "_TRIED", "cuda")
    step, _ = trained(Block(WrittenOut()), TUNED)
    assert not stand_in.ran and "aten.tanh" in step.stages["fuse_epilogues"].text
