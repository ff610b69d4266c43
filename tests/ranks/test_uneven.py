"""Batches of other numbers of samples on each rank train as all their samples do as one batch."""

import pytest
from rank_harness import distance, equal, of
from uneven_scenarios import FLUSHED, UNEVEN

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("case", UNEVEN)
def test_uneven_batches_are_weighed_by_their_samples(two, case):
    first, second = (one[case] for one in of(two, "uneven_batches"))
    assert case == "split" or equal(first["same"], second["same"])
    assert equal(first["weights"], second["weights"]) and first["norms"] == second["norms"]
    assert ("one graph, because" in first["by"]) is (case == "subgraphs")
    off, means = distance(first["weights"], first["jointly"]), distance(first["means"], first["jointly"])
    in_fp32 = UNEVEN[case][3].get("enabled") is False
    assert off < (1e-6 if in_fp32 else means / 8) and means > 1e-3  # FP32 sums in another order; three bits of eight
    for ours, wanted in first["norms"]:
        assert ours == pytest.approx(wanted, rel=1e-5 if in_fp32 else 2.0**-7)


def test_what_has_no_number_of_samples_is_refused_on_each_and_all_go_on(two):
    first, second = of(two, "uneven_batches_refused")
    expected = {
        "rows": "the number of samples is not known of a batch that has tensors of 3 and 4 rows",
        "none": "a batch has no sample; give each rank one sample or more",
        "shape": "the ranks differ in the batch: rank 1 has fp32[:, 1], rank 0 has fp32[:, 4]",
        "options": "rank 1 has uneven=weight, rank 0 has uneven=refuse",
        "word": "uneven='mean'; pass one of 'refuse', 'weight'",
    }
    for name, text in expected.items():
        assert text in first["told"][name] and text in second["told"][name], name
    assert first["told"]["fine"] == second["told"]["fine"] == ""
    assert equal(first["same"], second["same"])


@pytest.mark.parametrize("case", FLUSHED)
def test_a_flush_updates_by_what_the_ranks_have_gathered(two, case):
    first, second = (one[case] for one in of(two, "flushed"))
    for key in ("weights", "own"):
        assert equal(first["flush"][key], second["flush"][key])
        assert equal(first["flush"][key], first["two"][key])
    assert first["flush"]["norm"] == second["flush"]["norm"] == first["two"]["norm"]


def test_a_flush_of_ranks_that_train_other_weights_have_other_batches_or_do_not_come(two):
    first, second = of(two, "flushed_otherwise")
    assert equal(first["flush"], second["flush"]) and equal(first["flush"], first["whole"])
    assert equal(first["uneven"], second["uneven"]) and distance(first["uneven"], first["jointly"]) < 1e-6
    for odd, texts in enumerate(zip(first["told"], second["told"], strict=True)):
        wanted = (
            f"rank {odd} asks for step.flush(), and rank {1 - odd} goes on to train; call step.flush() on all ranks"
        )
        assert all(wanted in text for text in texts), texts
    assert equal(first["same"], second["same"])
