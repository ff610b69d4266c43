"""Checkpoints that several ranks write and read; what they do is in `checkpoint_scenarios` and `killed_training`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_scenarios import READ
from rank_harness import equal, of

pytestmark = pytest.mark.ranks


def same(one, other, but=()):
    """Whether all is equal to the bit."""
    assert one.keys() == other.keys()
    for key in one.keys() - set(but):
        if isinstance(one[key], list) and isinstance(one[key][0], torch.Tensor):
            assert equal(one[key], other[key]), key
        else:
            assert one[key] == other[key], key
    return True


@pytest.mark.parametrize(("writer", "form", "size"), [(w, f, s) for w, some in READ.items() for f, s, _ in some])
def test_any_number_of_ranks_goes_on_from_any_other(four, writer, form, size):
    first = of(four, "resharded")[0]
    for one in of(four, "resharded", size):
        read = one[writer, form, size]
        assert read["extra"] == {"rank": 0}
        assert same(read["loaded"], first[writer]["saved"])
        assert read["loaded"]["rates"] == [0.005]
        if size < 4:  # four ranks add four numbers in another order
            assert same(read["went on"], first["split"]["went on"])
        else:
            assert same(read["went on"], first[writer, form, size]["went on"])
        low = torch.float16 if form == "split" else torch.float32
        assert read["low"][0].dtype is low
        assert equal([read["low"][0]], [read["went on"]["masters"][0].to(low)])


def test_one_process_and_ranks_write_the_same(four):
    first, second = of(four, "resharded", 2)
    assert first["split"]["low"] is torch.float16
    assert same(first["split"]["saved"], second["split"]["saved"])
    for writer in ("whole", "one process"):
        assert same(first[writer]["saved"], first["split"]["saved"])


def test_what_each_rank_has_of_its_own_is_that_ranks(four):
    first, second = of(four, "of_each_rank", 2)
    for one in (first, second):
        assert same(one["resumed"], one["went on"])
    assert not equal(first["statistics"], second["statistics"])
    assert equal(first["alone"], first["statistics"])


TOLD = {
    "other numbers": ["the ranks differ in the checkpoint that they find: rank 1 has 2 (.*), rank 0 has 1"] * 2,
    "other folders": ["the ranks differ in the checkpoint that they find: rank 1 has none, rank 0 has 2"] * 2,
    "numbers to save": ["the ranks differ in number: rank 1 has 4, rank 0 has 3; call it on all ranks"] * 2,
    "a wrong number": ["rank 1 failed: AmpError: number=-1; pass a whole number", "number=-1; pass a whole number"],
    "folders to save": [
        "rank 0 does not see rank-1.pt, which another rank wrote; give all ranks one folder",
        "rank 0 failed: .*rank 0 does not see rank-1.pt",
    ],
    "there already": ["wrong/2: there is a checkpoint already; delete it"] * 2,
    "one trains": ["rank 0 asks for amp.save_checkpoint, and rank 1 goes on to train; call amp.save_checkpoint on"] * 2,
    "one loads": ["rank 0 asks for amp.save_checkpoint, and rank 1 for amp.load_checkpoint"] * 2,
    "a full disk": [r"wrong/3\.partial/rank-1\.pt: .* written: .*No space left on device; see that there is room"] * 2,
    "another model": [r"2: does not fit the step: model.0.bias is float32 \[9\] there and float32 \[10\] here"] * 2,
    "a truncated file": [
        r"rank 1 failed: AmpError: .*wrong/2/rank-1.pt: has \d+ bytes .*; copy it anew",
        r"^\S*wrong/2/rank-1.pt: has \d+ bytes with the checksum .*; copy it anew",
    ],
}


@pytest.mark.parametrize("case", TOLD)
def test_what_goes_wrong_on_one_rank_is_an_error_on_each(four, case):
    for one, expected in zip(of(four, "what_goes_wrong", 2), TOLD[case], strict=True):
        assert re.search(expected, one[case]), one[case]


def test_after_an_error_all_goes_on(four):
    first, second = of(four, "what_goes_wrong", 2)
    assert first["names"] == ["1", "2", "3.partial"]
    assert first["same"] and second["same"]
    assert first["after"][:2] == second["after"][:2] == (1, "3")
    assert same(first["after"][2], second["after"][2])


def test_the_example_of_the_docs_goes_on_where_it_was(four):
    for one in of(four, "the_example_of_the_docs", 2):
        assert [one[name]["start"] for name in ("undisturbed", "stopped", "started again")] == [0, 0, 10]
        assert one["kept"] == [15, 20]
        assert equal(one["started again"]["weights"], one["undisturbed"]["weights"])
        assert not equal(one["stopped"]["weights"], one["undisturbed"]["weights"])


@pytest.mark.slow
def test_ranks_that_are_killed_go_on_from_the_last_checkpoint_to_the_bit(tmp_path):
    """torchrun starts all of them again: rank 1 was killed between two checkpoints, then rank 0 while it saved one."""
    script = Path(__file__).with_name("killed_training.py")
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # see docs/ranks.md
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"exitcode: (-\d+)\) local_rank: (\d)", done.stderr) == [("-9", "1"), ("-9", "0")]
    for rank in range(2):
        starts = [(tmp_path / f"start {number} of rank {rank}").read_text() for number in range(3)]
        assert starts == ["0", "6", "6"]
        result = json.loads((tmp_path / f"result {rank}.json").read_text())
        assert len(result["same"]) == 38 and all(result["same"])
        assert all(0 < skipped < 10 for skipped in result["skipped"].values())
    assert sorted(one.name for one in (tmp_path / "checkpoints").iterdir()) == ["3", "6", "9"]
