"""What one rank alone sets is an error on all of them, and what is read off a step is what torch gives."""

import re

import pytest
import torch
from drift_scenarios import CHANGES, READ, UPDATES
from rank_harness import equal, of

pytestmark = pytest.mark.ranks
DIFFERS = {
    "static scale": "the loss scale: rank 1 has scale=64.0, rank 0 has scale=1024.0; set, load and write on all ranks",
    "dynamic scale": "the loss scale: rank 1 has scale=64.0, rank 0 has scale=32768.0; set, load and write on all",
    "rate": "the optimizer's settings: rank 1 has SGD group 0 lr=0.5, rank 0 has SGD group 0 lr=0.05; give all ranks",
    "betas": r"the optimizer's settings: rank 1 has AdamW group 0 betas=\(0.5, 0.9\), rank 0 has .*\(0.9, 0.999\)",
    "rate in a tensor": "the optimizer's settings: rank 1 has AdamW group 0 lr=0.5, rank 0 has AdamW group 0 lr=0.0099",
    "frozen": "parameters: rank 1 has 0.weight in SGD group 0, frozen, rank 0 has 0.weight in SGD group 0; give all",
    "groups": "the optimizer's parameters: rank 1 has 0.bias in SGD group 1, rank 0 has 0.weight in SGD group 0; give",
    "permuted": "weights: rank 1 has 0.weight with the checksum .*, rank 0 has 0.weight with the checksum .*; set,",
    "rounding": r"the random state of rounding: rank 1 has rounding=\[1, 2\], rank 0 has rounding=\[.*; set, load and",
    "buffer": "buffers: rank 1 has table with the checksum .*, rank 0 has table with the checksum .*; set, load and",
    "state": "the optimizer's state: rank 1 has exp_avg of 0.weight with the checksum .*; set, load and write on all",
}
FLOATS = ("loss", "norm")


@pytest.mark.parametrize("name", CHANGES)
def test_what_one_rank_alone_sets_is_an_error_on_all_and_none_goes_on(two, name):
    first, second = (one[name] for one in of(two, "set_on_one_rank"))
    assert first["told"] == second["told"]
    assert all(re.search(f"the ranks differ in .*{DIFFERS[name]}", one) for one in first["told"]), first["told"]
    for one in (first, second):
        assert equal(one["before"], one["weights"])


def test_what_one_rank_alone_writes_past_version_counters_is_found_by_the_next_comparison(two):
    """Before the 4th call, the first that follows."""
    first, second = of(two, "written_past_the_counters")
    assert first == second
    assert "weights: rank 1 has 1.weight with the checksum" in first["norm"][0]
    assert "the optimizer's state: rank 1 has exp_avg of 1.weight with the checksum" in first["moment"][0]
    assert first["nothing"] == [""] * 5


def test_a_scale_that_is_set_before_every_call_is_compared_at_every_call(two):
    first, second = of(two, "set_again")
    assert first["told"] == second["told"]
    assert [bool(one) for one in first["told"]] == [False, False, True, True, False, False]
    assert "rank 1 has scale=8.0, rank 0 has scale=4.0" in first["told"][2]
    assert equal(first["same"], second["same"])


def test_a_scale_of_two_steps_that_is_set_on_one_is_compared_by_the_other(two):
    first, second = of(two, "one_scale_of_two_steps")
    assert first == second and "rank 1 has scale=64.0, rank 0 has scale=1024.0" in first["told"]


def test_buffers_that_a_step_writes_and_those_of_each_rank_may_differ(two):
    first, second = of(two, "buffers_of_each_rank")
    for one in (first, second):
        assert one["told"] == one["told of its own"] == ""
        assert equal(one["same"], first["same"]) and equal(one["weights"], first["weights"])


@pytest.mark.parametrize("case", READ, ids=str)
def test_readings_are_those_of_ddp(two, case):
    """A float may be off by what products of 16 bits are rounded by; a norm of the sum is off by a factor of two."""
    ranks = [one["read"][READ.index(case)] for one in of(two, "readings")]
    rounding = 2.0**-10 if case[0].startswith("fp16") else 2.0**-7
    for ours, theirs in ranks:
        assert len(ours["read"]) == len(theirs) == UPDATES * case[2]
        for mine, other in zip(ours["read"], theirs, strict=True):
            for key, value in mine.items():
                expected = pytest.approx(other[key], rel=rounding, nan_ok=True) if key in FLOATS else other[key]
                assert value == expected, key
    (first, _), (second, _) = ranks
    updates = [one for one in first["read"] if one["updated"]]
    assert [one["skipped"] for one in updates] == ([0, 1, 1] if case[0].startswith("fp16") else [0, 0, 0])
    assert second["log"] == [] and first["events"] == second["events"]
    assert [(event.step, sorted(event.parameters)) for event in first["events"]] == [
        (number, one["bad"]) for number, one in enumerate(updates, 1) if one["bad"]
    ]
    assert [one["step"] for one in first["log"]] == [1, 2, 3]
    for record, one in zip(first["log"], updates, strict=True):
        assert record["skipped_steps"] == one["skipped"]
        assert float(record["grad_norm"]) == pytest.approx(one["norm"], rel=0, nan_ok=True)
    losses = torch.tensor([one["loss"] for one in first["read"]]).view(UPDATES, -1).mean(1).tolist()
    assert [record["loss"] for record in first["log"]] == losses
