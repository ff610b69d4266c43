"""The demo at a small size: its data, its rows, its table, and that what it trains does learn."""

import io
import sys

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

import amp_compiler as amp
from amp_compiler.cli import demo
from amp_compiler.errors import AmpError
from amp_compiler.fx.torch_private.runtime import has_bf16_kernels


@pytest.fixture(scope="module")
def digits():
    return demo.load_digits()


@pytest.fixture(scope="module")
def shown_and_rows():
    console = Console(width=100, record=True, file=io.StringIO())
    rows = demo.run_demo(epochs=3, device="cpu", backend="eager", console=console, train_images=7 * demo.BATCH)
    return console.export_text(), rows


def test_the_digits_are_split_the_same_way_every_time(digits):
    again = demo.load_digits(train_images=100)
    assert digits.train_images.shape[1:] == digits.test_images.shape[1:] == (1, 8, 8)
    assert len(digits.train_images) + len(digits.test_images) == 1797
    assert len(again.train_images) == len(again.train_labels) == 100
    assert torch.equal(again.train_images, digits.train_images[:100])
    assert 0 <= digits.train_images.min() <= digits.train_images.max() == 1
    assert sorted(digits.test_labels.unique().tolist()) == list(range(10))


def test_there_is_a_row_for_each_network_and_mode(shown_and_rows):
    _, rows = shown_and_rows
    assert [(row.model, row.mode) for row in rows] == [
        (name, mode) for name in ("BatchNorm CNN", "plain CNN") for mode in (demo.FP32, demo.AUTOCAST, demo.STEP)
    ]


def test_every_network_learns(shown_and_rows):
    _, rows = shown_and_rows
    for row in rows:
        assert row.accuracy > 0.5, row
        assert row.ms_per_step > 0


def test_the_training_step_learns_as_autocast_does_and_casts_no_more(shown_and_rows):
    _, rows = shown_and_rows
    for theirs, ours in (rows[1:3], rows[4:6]):
        assert abs(ours.accuracy - theirs.accuracy) < 0.03
        assert 0 < ours.cast_bytes <= theirs.cast_bytes or not has_bf16_kernels()  # else products are in FP32


def test_fp32_casts_nothing(shown_and_rows):
    _, rows = shown_and_rows
    assert [row.cast_bytes for row in rows if row.mode == demo.FP32] == [0, 0]


def test_the_table_is_shown(shown_and_rows):
    text, rows = shown_and_rows
    for part in (
        "test",
        "accuracy",
        "torch.autocast",
        "amp.training_step",
        f"{100 * rows[0].accuracy:.1f} %",
        "on cpu",
    ):
        assert part in text


@pytest.mark.slow  # tests/backends/test_inductor.py holds the option that keeps it right
@pytest.mark.compiles
@pytest.mark.parametrize("batch_norm", [True, False])
def test_inductor_gives_the_gradients_of_the_graph_run_node_by_node(digits, batch_norm):
    # At this width, and without BatchNorm, torch 2.13's pass `reorder_for_peak_memory` lets the CPU code read the
    # gradient of the max-pool before the scatter that makes it: every gradient before the pool is zero.
    found = {}
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = demo.SmallCnn(batch_norm, width=16)
        logits = amp.compile(model, dtype="bf16", backend=backend)(digits.train_images[:32])
        F.cross_entropy(logits, digits.train_labels[:32]).backward()
        found[backend] = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, exact in found["eager"].items():
        assert (found["inductor"][name] - exact).norm() < 0.1 * exact.norm(), name


def test_a_missing_scikit_learn_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(AmpError, match=r"scikit-learn.*pip install"):
        demo.load_digits()


def test_a_device_that_is_not_there():
    if not torch.cuda.is_available():
        with pytest.raises(AmpError, match="no CUDA device"):
            demo.run_demo(device="cuda")


def test_too_few_steps_to_time():
    with pytest.raises(AmpError, match="too few"):
        demo.run_demo(epochs=1, device="cpu", train_images=demo.BATCH)
