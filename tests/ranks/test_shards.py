"""The update split over several ranks: the weights of an update that is whole, with its state once in the group."""

import re

import pytest
import torch
from rank_harness import equal, of
from shard_scenarios import PARTS

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("case", PARTS)
def test_a_split_update_makes_the_weights_of_a_whole_one(two, case):
    ranks = of(two, "parts")
    for one in ranks:
        whole, split = one[case]["whole"], one[case]["split"]
        if case == "clipping":  # the squares of the norm are added in another order
            torch.testing.assert_close(split["norm"], whole["norm"], rtol=1e-6, atol=0)
            for key in ("masters", "moments"):
                torch.testing.assert_close(split[key], whole[key], rtol=1e-5, atol=1e-6)
        else:
            assert equal(whole["masters"], split["masters"]) and equal(whole["moments"], split["moments"])
            pairs = zip(whole["weights"], split["weights"], strict=True)  # of which some are rounded to 16 bits
            assert all(torch.equal(a.to(b.dtype), b) for a, b in pairs)
        assert equal(whole["numbers"], split["numbers"])
    first, second = ranks
    for key in ("weights", "masters", "moments", "numbers"):
        assert equal(first[case]["split"][key], second[case]["split"][key])


def test_each_rank_holds_a_part_of_master_and_moments(two):
    for one in of(two, "parts"):
        assert one["two groups"]["held"] == {
            "master": (36,),
            "step": (),
            "exp_avg": (36,),
            "exp_avg_sq": (36,),
        }  # of 9 x 8
        assert one["two groups"]["split"]["weights"][0].dtype is torch.bfloat16
        assert one["two groups"]["split"]["weights"][2].dtype is torch.float32  # of a norm
        assert float(one["accumulated"]["split"]["numbers"][1]) > 0  # the first scale is too high


def test_bytes_are_those_of_the_formula(two):
    for one in of(two, "bytes_of_a_step"):
        elements, ranks = one["elements"], 2
        sent = one["sent"]
        assert sent["reduce_scatter_tensor"] + sent["all_gather_into_tensor"] == 4 * (ranks - 1) / ranks * elements
        assert sent["all_reduce"] == 2 * (ranks - 1) / ranks * 4 * (1 + 4)  # the norm, and whether each of 4 is finite
        assert one["state"] + one["weights"] == (12 / ranks + 2) * elements
        assert one["again"] and one["stages"].count("all_reduce.default(") == 1
        counted = re.search(r"each sends (.*) bytes a parameter and step in \d+ messages, (\d+) in all", one["plan"])
        assert float(counted[2]) == sum(sent.values()) and float(counted[1]) == round(sum(sent.values()) / elements, 2)
        assert "a 16-bit all-reduce sends 2.00" in one["plan"]
        assert "each holds 2.00 bytes a parameter of weights and 6.00 of masters and moments" in one["plan"]


@pytest.mark.parametrize(
    ("way", "sent", "weights", "states"), [("whole", 2, 6, 8), ("split", 2, 2, 6), ("subgraphs", 4, 4, 8)]
)
def test_what_lives_between_steps_is_what_the_plan_says(two, way, sent, weights, states):
    for one in of(two, "memory_between_steps"):
        live, plan, elements = one[way]["live"], one[way]["plan"], one["elements"]
        assert f"2 ranks: each sends {sent}.00 bytes a parameter and step" in plan
        assert f"each holds {weights}.00 bytes a parameter of weights and {states}.00 of masters and moments" in plan
        kept = {"whole": 2, "split": 0, "subgraphs": 4}[way] * elements
        assert (f"2 ranks: each keeps {kept} bytes of gradients until the next call" in plan) is (way != "split")
        assert 0 <= live - (weights + states) * elements - kept < 0.1 * elements  # of random numbers' state
        assert ("subgraph" in one[way]["by"]) is (way == "subgraphs")
        assert "of the gradients of weights" in one["counted"]


def test_messages_go_while_the_backward_and_the_updates_run(two):
    for one in of(two, "bytes_of_a_step"):
        lines = one["stages"].splitlines()
        sends = [place for place, line in enumerate(lines) if "reduce_scatter_tensor.default(" in line]
        backward = [place for place, line in enumerate(lines) if "phase=backward" in line]
        gathers = [place for place, line in enumerate(lines) if "all_gather_into_tensor.default(" in line]
        updates = [place for place, line in enumerate(lines) if "adam_update.default(" in line]
        weights = re.compile(r"wait_tensor.default\(all_gather\w*\)")
        awaited = [place for place, line in enumerate(lines) if weights.search(line)]
        assert len(sends) > 1 and sends[0] < backward[-1]
        assert (
            len(awaited) == len(gathers) == len(updates) > 1 and gathers[0] < updates[1] and max(gathers) < min(awaited)
        )


def test_a_checkpoint_goes_to_one_process_and_back(two):
    first, second = of(two, "a_checkpoint_of_parts")
    assert str(first["saved"]) == str(second["saved"])
    for one in (first, second):
        assert one["saved"]["optimizer"]["state"][0]["master"].shape == (9, 8)
        for name in ("one process", "a 16-bit model"):
            assert equal(one[name]["masters"], one["split"]["masters"]), name
            assert equal(one[name]["moments"], one["split"]["moments"]), name
        for name in ("made anew", "that trained before"):
            assert equal(one["from one"][name]["masters"], one["from one"]["itself"]["masters"]), name
            assert equal(one["from one"][name]["moments"], one["from one"]["itself"]["moments"]), name


def test_a_state_that_one_rank_alone_asks_for_is_an_error_on_each(two):
    first, second = of(two, "saved_on_one_rank")
    assert first["told"] == second["told"]
    assert "rank 0 asks for optimizer.state_dict(), and rank 1 goes on to train" in first["told"]
    assert equal(first["after"]["weights"], second["after"]["weights"])


def test_masters_follow_weights_that_are_written(two):
    for one in of(two, "written_between"):
        assert equal(one["whole"]["masters"], one["split"]["masters"])
        assert one["single"]["written"] == [64.0] * 3  # past version counters


def test_what_cannot_be_split_is_named(two):
    for one in of(two, "what_cannot_be_split"):
        assert "Adagrad may need whole weights" in one["traced"] and "AdamW" in one["traced"]
        assert "no masters to split" in one["low"]
        assert "SGD with dampening" in one["dampening"]
        assert "a step in subgraphs cannot split its update" in one["subgraphs"]
        assert "a part of the gradients" in one["gradients"]
        assert all("leave `shard: update` out" in text for name, text in one.items() if name not in ("fp32", "whole"))
        assert "optimizer.state holds 'master' of shape [64] for a parameter of [16, 8]" in one["whole"]
        assert one["fp32"] == ""


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_steps_do_the_same(two):
    first, second = of(two, "compiled_parts")
    behind = (
        first["cut"].split("behind_check: ", 1)[1].split("\nreturn ", 1)[0]
    )  # of the subgraphs the first, between kernels
    gives = "all_gather_into_tensor.default"
    assert re.search(rf"adam_update.default.*\n(.*\n)*.*{gives}.*\n(.*\n)*.*adam_update.default", behind)
    for name in ("compiled", "opened"):
        assert equal(first[name]["weights"], second[name]["weights"])
        torch.testing.assert_close(first[name]["masters"], first["eager"]["masters"], rtol=0, atol=1e-3)
        assert equal(first[name]["numbers"], first["eager"]["numbers"])
