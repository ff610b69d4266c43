"""The demo at a small size: its data, its rows, its table, and that what it trains does learn."""

import io
import sys

import pytest
import torch
from rich.console import Console

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


def test_every_network_learns_in_each_mode_as_the_table_says(shown_and_rows):
    """The step as autocast does, with no more casts."""
    text, rows = shown_and_rows
    assert [(row.model, row.mode) for row in rows] == [
        (name, mode) for name in ("BatchNorm CNN", "plain CNN") for mode in (demo.FP32, demo.AUTOCAST, demo.STEP)
    ]
    assert all(row.accuracy > 0.5 and row.ms_per_step > 0 for row in rows), rows
    for exact, theirs, ours in (rows[:3], rows[3:]):
        assert abs(ours.accuracy - theirs.accuracy) < 0.03 and exact.cast_bytes == 0
        assert 0 < ours.cast_bytes <= theirs.cast_bytes or not has_bf16_kernels()  # else products are in FP32
    for part in ("test", "accuracy", "torch.autocast", "amp.training_step", f"{100 * rows[0].accuracy:.1f} %", "cpu"):
        assert part in text


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
