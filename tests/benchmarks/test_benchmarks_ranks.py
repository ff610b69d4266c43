"""The benchmarks of many ranks: what is summed, and when messages hide behind products; by hand and by NumPy."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from benchmark_modules import BENCHMARKS
from torch import nn

GRADIENTS = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_in_a_ring_and_in_a_tree_are_numpys(bench, dtype):
    given = GRADIENTS.to(dtype)
    array = given.numpy()
    total = array[0]
    for one in array[1:]:
        total = total + one
    assert total.dtype == array.dtype and np.array_equal(bench["reduction"].ring(given).numpy(), total)
    while len(array) > 1:
        array = array[0::2] + array[1::2]
    assert np.array_equal(bench["reduction"].tree(given).numpy(), array[0])


def test_the_errors_are_those_of_the_types(bench):
    found = bench["reduction"].errors(GRADIENTS)
    assert found["fp32 tree"] < 1e-6 < found["fp16 tree"] < 2.0**-11 < found["bf16 tree"] < 2.0**-8
    assert found["fp16 tree"] < found["fp16 ring"] < found["bf16 ring"]
    spread = GRADIENTS.double().std(0, correction=0).norm() / 8 / GRADIENTS.double().mean(0).norm()
    assert found["noise"] == pytest.approx(float(spread))


def test_fp16_sums_have_room_whatever_the_gradients(bench):
    for size in (1e-6, 1.0, 1e4):
        made = GRADIENTS * size
        mean = bench["reduction"].reduced(made, torch.float16, bench["reduction"].ring)
        assert float((mean - made.mean(0)).norm() / made.mean(0).norm()) < 2e-3


def test_gradients_of_each_rank_are_autograds(bench):
    reduction = bench["reduction"]
    model, (x, y) = reduction.classifier(0), reduction.images()
    made = reduction.gradients(model, x[:3], y[:3])
    for one, image, label in zip(made, x, y, strict=False):
        loss = nn.functional.cross_entropy(model(image[None]), label[None])
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(one, wanted)


def test_messages_hide_behind_what_is_computed_meanwhile(bench):
    overlap = bench["overlap"]
    size = overlap.INSIDE[
        1
    ]  # a message of this many bytes to one other rank takes half of a second, twice as an all-reduce
    takes = overlap.seconds_of("all_gather", size, 2)
    assert takes == pytest.approx(0.5 + overlap.INSIDE[0])
    assert overlap.seconds_of("all_reduce", size, 2) == 2 * takes
    send = [overlap.Send("all_gather", size, name) for name in "ab"]
    found = overlap.predict([*send, overlap.Compute(0.75), overlap.Wait("b"), overlap.Compute(1.0)], 2)
    assert found.seconds == pytest.approx(2 * takes + 1) and found.computing == 1.75
    assert (found.messages, found.sent) == (2, size)
    hidden = overlap.predict([*send, overlap.Compute(3.0), overlap.Wait("a"), overlap.Wait("b")], 2)
    assert hidden.seconds == 3.0
    left = overlap.predict([overlap.Compute(1.0), send[0]], 2)  # a step ends when all has arrived
    assert left.seconds == pytest.approx(1 + takes)


def test_bytes_of_torchs_ways(bench):
    overlap = bench["overlap"]
    units = [overlap.Unit(100, 1.0), overlap.Unit(300, 2.0)]
    share = 3 / 4
    for width in (2, 4):
        found = overlap.predict(overlap.data_parallel(units, 4, width), 4)
        assert found.sent == pytest.approx(2 * share * width * 400)
        assert found.computing == pytest.approx(9.0)
    zero = overlap.predict(overlap.data_parallel(units, 4, zero=True), 4)
    assert zero.sent == pytest.approx(share * 400 * (8 + 4))
    sharded = overlap.predict(overlap.fully_sharded(units, 4), 4)
    assert sharded.sent == pytest.approx(share * 400 * (2 + 2 + 2)) and sharded.messages == 6


def test_layers_share_the_products_of_the_forward(bench):
    model = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False))
    units = bench["overlap"].units_of(model, 42.0)
    assert [(unit.elements, unit.seconds) for unit in units] == [(200, 0.0), (24, 24.0), (18, 18.0)]


def test_the_events_of_a_graph_are_its_products_messages_and_updates(bench):
    overlap = bench["overlap"]
    graph = torch.fx.Graph()

    def placeholder(name, *shape, dtype=torch.float32):
        node = graph.placeholder(name)
        node.meta["val"] = torch.empty(*shape, dtype=dtype, device="meta")
        return node

    x, w = placeholder("x", 8, 16), placeholder("w", 16, 4, dtype=torch.bfloat16)
    made = graph.call_function(torch.ops.aten.mm.default, (x, w))
    made.meta["val"] = torch.empty(8, 4, dtype=torch.bfloat16, device="meta")
    sent = graph.call_function(torch.ops._c10d_functional.reduce_scatter_tensor.default, (made, "sum", 2, "0"))
    graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (sent,))
    whole = graph.call_function(torch.ops._c10d_functional.all_gather_into_tensor.default, (made, 2, "0"))
    product, message, wait, gather = overlap.events_of(graph, 2)
    assert product == overlap.Compute(2 * 8 * 16 * 4 / overlap.FLOPS)
    assert message == overlap.Send("reduce_scatter", 64, sent) and wait == overlap.Wait(sent)
    assert gather == overlap.Send("all_gather", 128, whole)


@pytest.mark.slow
@pytest.mark.compiles
def test_the_ways_of_several_ranks_from_the_command_line(tmp_path):
    """Bytes on the wire are those that the types say, and a little for headers."""
    ways = ("amp.training_step", "amp.training_step, shard: update", "DDP")
    options = ("--models", "tiny-mlp", "--steps", "4", "--ways", *ways, "--json", str(tmp_path / "r.json"))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "ranks.py"), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [row["variant"] for row in found["rows"]] == list(ways)
    assert all(0 < row["step_ms_10"] <= row["step_ms"] <= row["step_ms_90"] for row in found["rows"])
    assert all(0 < row["state_bytes"] <= row["peak_bytes"] and row["variant"] in done.stdout for row in found["rows"])
    assert all(row["computing_ms"] > 0 for row in found["rows"])
    assert found["rows"][0]["sent_bytes"] < found["rows"][2]["sent_bytes"]
