"""Several ranks train one model: their weights are those of one process, and the same to the bit on all of them."""

import math
import re
import statistics

import pytest
import torch
from difference_scenarios import BATCHES
from rank_harness import distance, equal, of
from training_scenarios import IN_FP32, JOINTLY, LOW_TYPES, OTHERS

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("case", IN_FP32)
def test_in_fp32_two_ranks_have_the_weights_of_one_process(two, case):
    first, second = (one[case] for one in of(two, "in_fp32"))
    assert equal(first["together"], second["together"])
    assert equal(first["together"], first["alone"])  # the same two numbers are added, so to the bit
    # Whole batches sum in another order: how far that leads is what one process shows that sums as the ranks do.
    assert distance(first["together"], first["jointly"]) <= distance(first["alone"], first["jointly"]) < 1e-3
    assert torch.equal(first["norm"], second["norm"]) and float(first["norm"]) > 0
    assert all(torch.equal(one, second["gradients"][name]) for name, one in first["gradients"].items())


def test_each_rank_draws_from_its_own_seed(two):
    first, second = of(two, "seeds")
    for one in (first, second):
        assert torch.equal(one["together"]["drawn"], one["alone"]["drawn"])
        assert torch.equal(one["together"]["losses"][0], one["alone"]["losses"][0])  # later weights are of both
    assert not torch.equal(first["together"]["losses"][0], second["together"]["losses"][0])
    assert equal(first["same"], second["same"])


def test_the_first_rank_alone_speaks(two):
    first, second = of(two, "notices")
    texts = "captured the training step in", "recompiled the training step in", "matches no node", "subgraph"
    for text in texts:
        assert any(text in one for one in first["said"]), text
    assert ["zlib.adler32" in one for one in first["warned"]] == [True]
    assert second["said"] == second["warned"] == []


def test_gathered_batches_are_reduced_once(two):
    first, second = of(two, "accumulated")
    assert equal(first["same"], second["same"])
    assert distance(first["together"], first["alone"]) < 1e-5  # four numbers are added in another order
    assert first["messages"] == [0, 1]  # of the two programs the one that updates


@pytest.mark.parametrize("way", ["whole", "split"])
def test_no_rank_updates_where_one_of_them_or_the_sum_overflows(two, way):
    first, second = (one[way] for one in of(two, "overflows"))
    assert equal(first["weights"], second["weights"]) and equal(first["same"], second["same"])
    assert torch.equal(first["weights"][1], first["weights"][2])
    assert first["skipped"] == second["skipped"] == [0, 0, 1, 1, 2, 2]
    assert first["scales"] == second["scales"] == [1024.0, 1024.0, 512.0, 512.0, 256.0, 256.0]
    for one in (first, second):
        assert one["report"] == ("weight",) and one["events"] == [(3, ("weight",)), (5, ("weight",))]


def test_a_gan_of_two_steps_stays_the_same_on_all_ranks(two):
    first, second = of(two, "a_gan")
    assert first["batches"] == 2 * 10 and first["losses"] != second["losses"]
    assert sum(first["exact"][-5:]) < sum(first["exact"][:5])
    assert equal(first["same"], second["same"]) and equal(first["together"], second["together"])
    assert 0 < distance(first["together"], first["jointly"]) < 1e-5  # the sums of 50 steps are made in another order


def test_buffers_are_those_of_the_first_rank_or_of_each_its_own(two):
    first, second = of(two, "buffers")
    for one in (first, second):
        assert equal(first["broadcast"]["weights"], one["broadcast"]["weights"])
        assert equal(first["local"]["weights"], one["local"]["weights"])
    assert equal(first["broadcast"]["buffers"], second["broadcast"]["buffers"])
    assert not equal(first["local"]["buffers"], second["local"]["buffers"])
    for one, kind in ((first, "broadcast"), (first, "local"), (second, "local")):
        torch.testing.assert_close(one[kind]["buffers"][0], one[kind]["own"], rtol=0, atol=2.0**-8)  # of BF16 products


def test_scales_of_fp8_are_of_the_largest_magnitudes_of_all_ranks_and_weights_are_the_same(two):
    first, second = of(two, "delayed_scales")
    assert first["kept"] == second["kept"]
    assert first["kept"][0][:2] == [1.0, 2.0]  # the second rank's
    first, second = of(two, "fp8_weights")
    assert all(equal(kept, anew) and equal(kept, second[way][0]) for way, (kept, anew) in first.items())


@pytest.mark.parametrize(("model", "norms"), [("rows", 2), ("images", 2)])
def test_sync_batch_norms_train_as_batch_norms_of_one_process_do_on_whole_batches(two, model, norms):
    first, second = (one[model] for one in of(two, "synchronized_norms"))
    assert equal(first["same"], second["same"]) and equal(first["weights"], second["weights"])  # buffers are in both
    assert 0 < distance(first["weights"], first["jointly"]) < 1e-6  # sums of ten steps in another order
    assert first["messages"] == ["all_gather_into_tensor"] * norms + ["all_reduce"] * norms


@pytest.mark.parametrize(("way", "norms"), [("whole", 2), ("split", 2), ("backward in FP32", 4)])
def test_sync_batch_norms_in_16_bits(two, way, norms):
    """In a `typed_op` the backward runs the forward again, and its messages with it."""
    first, second = of(two, "synchronized_in_16_bits")
    assert equal(first[way]["weights"], second[way]["weights"])
    assert first[way]["messages"].count("all_reduce") == 2
    assert first[way]["messages"].count("all_gather_into_tensor") == norms
    assert 0 < distance(first[way]["weights"], first["jointly in FP32"]) < 2.0**-8  # of ten steps at a rate of 0.05
    assert way != "split" or distance(first["whole"]["weights"], first[way]["weights"]) < 2.0**-8


def test_sync_batch_norms_in_gathered_batches_overflows_and_evaluation(two):
    first, second = of(two, "synchronized_otherwise")
    for one in (first, second):
        assert equal(one["gathered"]["same"], first["gathered"]["same"])
        assert distance(one["gathered"]["weights"], one["gathered"]["jointly"]) < 1e-6
        assert one["overflow"]["skipped"] == 1 and equal(one["overflow"]["before"], one["overflow"]["weights"])
        assert equal(one["evaluated"]["same"], first["evaluated"]["same"]) and one["evaluated"]["messages"] == []
    assert "first made by batch_0" in second["overflow"]["report"]  # which the second rank asks for alone


def test_sync_batch_norms_that_would_wait_for_one_another_are_refused(two):
    first, second = of(two, "synchronized_and_refused")
    assert re.search("the ranks differ in the messages of SyncBatchNorm: rank 1 has .*all_gather", first["twice"])
    assert "a step in subgraphs cannot take the statistics of the SyncBatchNorm 'norm'" in first["subgraphs"]
    assert "rank 1 has a SyncBatchNorm over the ranks [0, 1], and rank 0 has it over [0]" in first["groups"]
    assert "stands in a region of autocast in another 16-bit type" in first["region"]
    assert "gets one number of each channel" in first["one row"]
    assert first == second


def test_a_sync_batch_norm_over_some_of_the_ranks(four):
    ranks = of(four, "synchronized_in_halves")
    for rank, one in enumerate(ranks):
        assert equal(one["buffers"], ranks[rank // 2 * 2]["buffers"])
        assert one["messages"] == ["all_gather_into_tensor", "all_reduce"]
        for place, (own, jointly) in enumerate(zip(one["weights"], one["jointly"], strict=True)):
            if place not in (4, 5, 6):  # running statistics, which are those of a half
                assert equal([own], [ranks[0]["weights"][place]]) and distance([own], [jointly]) < 1e-6
    assert not equal(ranks[0]["buffers"], ranks[2]["buffers"])


def check_low_types(ranks, optimizer, low):
    """Of one seed; in FP32 the ranks add what DDP adds, and sums of 16-bit gradients are rounded once or twice more."""
    first, *others = ranks
    assert all(equal(first["same"][low, optimizer], one["same"][low, optimizer]) for one in others)
    theirs, *ours = (first["off"][low, optimizer, way] for way in ("theirs", "whole", "in fp32"))
    print(f"\n{low} {optimizer}: {theirs:.2e} {ours}")
    assert all(0 < one <= 1.5 * theirs for one in ours)


@pytest.mark.parametrize(("optimizer", "low"), LOW_TYPES)
def test_low_types_lead_no_further_from_fp32_than_autocast_in_ddp(two, optimizer, low):
    check_low_types(of(two, "low_types"), optimizer, low)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two", "four"])
def test_over_many_seeds_low_types_lead_no_further_from_fp32_than_autocast_in_ddp(ranks, request):
    """What else a training has (clipping, a GAN …) by medians: Adam takes a whole step where a sign changes."""
    result, *_ = of(request.getfixturevalue(ranks), "low_types_of_seeds")
    medians = []
    for (low, name, way), distances in result.items():
        pairs = zip(distances, result[low, name, "theirs"], strict=True)
        ratios = [ours / theirs for ours, theirs in pairs]
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        print(f"{low} {name:11} {way:7} {statistics.mean(distances):.2e} {statistics.mean(ratios):.3f} {error:.3f}")
        if name not in OTHERS:  # in FP32 the ranks add what DDP adds
            assert statistics.mean(ratios) <= (1 if way == "in fp32" else 1.25) + max(2 * error, 1e-3)
        elif way != "theirs":
            assert statistics.median(ratios) < 1.25, name
            medians += ratios
    assert statistics.median(medians) < 1.05


def test_what_a_rank_has_no_gradient_of_counts_as_zero(two):
    first, second = of(two, "missing_gradients")
    for way in ("whole", "split"):
        one, other = first[way], second[way]
        assert all(equal(a, b) for a, b in zip(one["weights"], other["weights"], strict=True))
        assert one["unused"] and other["unused"] and one["steps"] == other["steps"] and len(one["steps"]) == 8
        assert equal(one["moments"], other["moments"]) and equal(one["moments"], first["whole"]["moments"])
    for whole, split in zip(first["whole"]["weights"], first["split"]["weights"], strict=True):
        assert equal([a.to(b.dtype) for a, b in zip(whole, split, strict=True)], split)  # which are in 16 bits


def test_ddp_around_a_compiled_model_trains_too(two):
    first, second = of(two, "compiled_in_ddp")
    assert equal(first["weights"], second["weights"])


def test_a_mesh_is_its_group(two):
    for one in of(two, "a_mesh"):
        assert equal(one["line"], one["square"])
        assert "has 2 dimensions" in one["told"] and 'mesh["pp"] or mesh["dp"]' in one["told"]


def test_a_step_in_subgraphs_sums_too(two):
    first, second = of(two, "in_subgraphs")
    assert "subgraph" in first["execution"]
    assert equal(first["same"], second["same"])
    assert equal(first["wide"], second["wide"]) and equal(first["wide"], first["alone"])


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_in_containers_and_classes_train_as_tensors_do(two, kind):
    first, second = of(two, "batches_of_other_kinds")
    assert first[kind]["told"] == second[kind]["told"] == ""
    assert "subgraph" not in first[kind]["by"]
    for one in (first, second):
        assert equal(one[kind]["weights"], first[kind]["weights"])
        assert equal(one[kind]["weights"], one["tensors"])


@pytest.mark.parametrize("kind", [kind for kind in BATCHES if kind != "list"])
def test_another_kind_of_batch_on_one_rank_trains_as_tensors_do(two, kind):
    first, second = (one[f"{kind} beside a list"] for one in of(two, "batches_of_other_kinds"))
    assert first["told"] == second["told"] == ""
    assert equal(first["weights"], second["weights"])
    assert equal(first["weights"], of(two, "batches_of_other_kinds")[0]["tensors"])


@pytest.mark.parametrize("kind", BATCHES)
def test_uneven_batches_of_any_kind_are_an_error_on_each(two, kind):
    first, second = (one[f"uneven {kind}"] for one in of(two, "batches_of_other_kinds"))
    for key in ("told", "again"):
        assert "rank 1 has fp32[3, 8], rank 0 has fp32[4, 8]" in first[key]
        assert first[key] == second[key]
    assert equal(first["weights"], second["weights"])


def test_weights_without_masters_are_rounded_alike_on_all_ranks(two):
    first, second = of(two, "low_weights")
    assert equal(first["same"], second["same"])
    assert all(weight.dtype is torch.bfloat16 for weight in first["same"][:2])


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_steps_do_the_same(two):
    first, *others = of(two, "compiled_norms")
    for way, one in first.items():
        assert all(equal(one["same"], other[way]["same"]) for other in others)
    for dtype, bound in (("fp32", 1e-6), ("bf16", 2.0**-8)):
        assert distance(first[f"{dtype} inductor"]["weights"], first[f"{dtype} eager"]["weights"]) < bound


@pytest.mark.parametrize("case", JOINTLY)
def test_four_ranks_train_as_one_process_does_on_whole_batches(four, case):
    first, *others = (one[case] for one in of(four, "in_fp32"))
    assert all(equal(first["together"], one["together"]) for one in others)
    assert 0 < distance(first["together"], first["jointly"]) < 1e-5  # the sums of 50 steps are made in another order


def test_four_ranks_skip_steps_as_one(four):
    first, *others = (one["whole"] for one in of(four, "overflows"))
    assert first["skipped"] == [0, 0, 1, 1, 2, 2]
    assert all(one["skipped"] == first["skipped"] and equal(one["same"], first["same"]) for one in others)


def test_on_four_ranks_low_types_lead_about_as_far_from_fp32_as_autocast_in_ddp(four):
    ranks = of(four, "low_types")
    check_low_types(ranks, "adamw", "fp16")
    # elements in 16 bits, and those of the norm
    assert ranks[0]["sent"]["fp16", "adamw"] == [2 * (4 - 1) / 4 * (2 * 212 + 4 * 32)]


def test_ranks_that_differ_are_told_so_on_each_of_them(two):
    first, second = of(two, "differences")
    expected = {
        "rules": "the ranks differ in rules: rank 1 has .*aten.gelu.*, rank 0 has nothing there",
        "enabled": "the ranks differ in options: rank 1 has enabled=False, rank 0 has enabled=True",
        "dtype": "the ranks differ in options: rank 1 has dtype=fp16, rank 0 has dtype=bf16",
        "shapes": r"the ranks differ in parameters: rank 1 has 0.weight fp32\[17, 8\].*rank 0 has 0.weight fp32\[16",
        "modules": "the ranks differ in modules: rank 1 has 4 Tanh, rank 0 has 4 Sigmoid",
        "optimizers": "the ranks differ in optimizers: rank 1 has AdamW, rank 0 has SGD",
        "torch": "the ranks differ in versions: rank 1 has torch 2.0.1",
        "threads": "the ranks differ in processors: rank 1 has .* 2 threads, rank 0 has .* 1 threads",
    }
    for name, pattern in expected.items():
        assert re.search(pattern, first[name]), first[name]
        assert first[name] == second[name]
    assert "rank 1 failed" in first["fails"] and "nonsense" in first["fails"] and "nonsense" in second["fails"]


def test_ranks_that_differ_at_a_call_are_told_so_and_go_on(two):
    first, second = of(two, "differences_later")
    assert (
        "rank 1 has fp32[3, 8], rank 0 has fp32[4, 8]" in first["first shape"] and "drop_last" in first["first shape"]
    )
    assert "rank 1 has fp32[2, 8], rank 0 has fp32[4, 8]" in first["later shape"]
    assert "rank 1 has SGD group 0 lr=0.5, rank 0 has SGD group 0 lr=0.05" in first["rate"]
    for name in ("first shape", "later shape", "rate"):
        assert first[name] == second[name]
    assert "rank 1 failed" in first["fails"] and second["fails"] and "rank 1" not in second["fails"]
    assert equal(first["same"], second["same"])


def test_what_one_rank_alone_loads_or_writes_later_is_an_error_on_each_until_it_is_fixed(two):
    first, second = of(two, "loaded_later")
    expected = {
        "weights": r"the ranks differ in weights: rank 1 has 0.weight with the checksum .*, rank 0 has 0.weight with",
        "of each its own": r"the ranks differ in weights: rank 1 has 0.weight with the checksum",
        "imaginary part": r"the ranks differ in weights: rank 1 has turns with the checksum",
    }
    for name, pattern in expected.items():
        message = [first[name]] if name == "imaginary part" else first[name]
        assert all(re.search(pattern, one) for one in message), message
        assert first[name] == second[name]
    for name in ("fixed", "for a while"):
        assert first[name][0] == second[name][0] == ""
        assert equal(first[name][1], second[name][1])


def test_weights_that_all_ranks_write_at_every_call_are_compared_ever_more_rarely(two):
    first, second = of(two, "written_at_every_call")
    assert equal(first["same"], second["same"])
    # A comparison takes two exchanges (what runs, values). The first call has one; so have the 2nd, 4th, 8th and 16th,
    # and of the 19 behind a write the 1st, 2nd, 4th, 8th and 16th, of which the first is call 2.
    assert first["told more"] == second["told more"] == 2 + 8 * 2


def test_models_that_are_spread_already_are_named(two):
    for one in of(two, "what_is_refused"):
        expected = {
            "DDP": "the model is in a DistributedDataParallel",
            "DDP inside": "module 'net' is a DistributedDataParallel",
            "DDP in the loss": "module 'teacher' is a DistributedDataParallel",
            "replicate": "the model is replicated over processes",
            "FSDP": "the model is sharded over processes (FSDP)",
            "FSDP inside": "module '0' is sharded over processes (FSDP)",
            "FSDP1": "the model is sharded over processes (FSDP)",
            "FSDP1 compiled": "is sharded over processes (FSDP)",
            "DTensor": "parameter '0.weight' is a DTensor",
            "DTensor buffer": "buffer '0.mask' is a DTensor",
            "DTensor buffer compiled": "buffer '0.mask' is a DTensor",
            "DTensor compiled": "parameter '0.weight' is a DTensor",
        }
        for name, text in expected.items():
            assert text in one[name], name
        for name in ("DDP", "DDP inside", "DDP in the loss", "replicate", "FSDP", "FSDP inside", "FSDP1"):
            assert "process_group=" in one[name] and "fully_shard(amp.compile(model))" in one[name], name


def test_a_rank_that_never_comes_is_waited_for_until_the_timeout(two):
    first, _ = of(two, "a_rank_that_never_comes")
    assert "rank 0 of 2 lost the others" in first["told"] and "timeout" in first["told"]
