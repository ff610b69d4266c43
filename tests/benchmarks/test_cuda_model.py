"""The cost model's arithmetic, against small cases that were worked out by hand. Nothing here needs a GPU."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
import torch
from benchmark_modules import BENCHMARKS


@pytest.fixture(scope="module")
def costs():
    """The modules of the cost model."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import cuda_model
        import cuda_model_runs
        import inductor_costs
        import kernel_costs
    finally:
        sys.path.remove(str(BENCHMARKS))
    return {"model": cuda_model, "runs": cuda_model_runs, "inductor": inductor_costs, "kernel": kernel_costs}


def test_a_kernel_takes_the_longer_of_its_bytes_and_its_operations(costs):
    kernel, h200 = costs["kernel"], costs["kernel"].H200
    loops = kernel.Kernel("loops", kernel.FUSED, 3_000_000, 1_800_000)  # 4.8 MB at 4.8 TB/s: 1 µs
    assert loops.seconds(h200) == pytest.approx(1e-6 + 2.5e-6)
    product = kernel.Kernel("mm", kernel.MATMUL, 3_000_000, 1_800_000, flops=989_000_000 * 7)  # 7 µs of arithmetic
    assert product.seconds(h200) == pytest.approx(7e-6 + 2.5e-6)
    wide = kernel.Kernel("mm", kernel.MATMUL, 0, 0, flops=67_000_000, precision="fp32", launches=2, in_graph=False)
    assert wide.seconds(h200) == pytest.approx(1e-6 + 2 * 5e-6)


def test_the_table_has_every_model_but_those_that_a_device_is_asked_about(costs):
    model = costs["model"]
    assert model.parse([]).default and set(model.COUNTED) == set(model.models.CUDA_SIZES) - {"lstm"}
    rows = json.loads((BENCHMARKS / "results" / "cuda_model.json").read_text(encoding="utf-8"))["rows"]
    told = [(row["model"], row["dtype"], row["variant"]) for row in rows]
    assert told == list(itertools.product(model.COUNTED, model.SETTINGS, model.VARIANTS))


def test_costs_are_summed_by_class(costs):
    kernel = costs["kernel"]
    kernels = [
        kernel.Kernel("a", kernel.FUSED, 4_800_000, 0),
        kernel.Kernel("b", kernel.FUSED, 0, 4_800_000),
        kernel.Kernel("c", kernel.UPDATE, 0, 0, launches=3, in_graph=False),
    ]
    total = kernel.Cost.of(kernels, kernel.H200)
    assert (total.launches, total.eager_launches, total.bytes) == (5, 3, 9_600_000)
    assert total.seconds == pytest.approx({kernel.FUSED: 7e-6, kernel.UPDATE: 15e-6})
    assert total.total_seconds == pytest.approx(22e-6)
    assert total.facts()["milliseconds"] == pytest.approx(0.022)


def test_products_are_what_a_step_needs_whoever_writes_its_loops(costs):
    kernel = costs["kernel"]
    kernels = [kernel.Kernel(kind, kind, 4_800_000, 0) for kind in kernel.CLASSES]
    total = kernel.Cost.of(kernels, kernel.H200)
    assert total.product_seconds == pytest.approx(4 * 3.5e-6) and total.total_seconds == pytest.approx(7 * 3.5e-6)


def test_another_depth_adds_what_the_layers_between_two_depths_cost(costs):
    kernel = costs["kernel"]

    def of_layers(count):
        ends = [kernel.Kernel("end", kernel.OTHER, 7, 0)]
        return kernel.Cost.of([*ends, *[kernel.Kernel("layer", kernel.FUSED, 100, 50, 30)] * count], kernel.H200)

    known = {2: of_layers(2), 4: of_layers(4)}
    for depth in (2, 3, 24):
        said, seen = kernel.at_depth(known, depth), of_layers(depth)
        assert (said.launches, said.bytes, said.flops) == (seen.launches, seen.bytes, seen.flops)
        assert said.total_seconds == pytest.approx(seen.total_seconds)


@pytest.mark.parametrize(
    ("sizes", "columns", "launches"),
    [
        ([], 1, 0),
        ([10], 4, 1),
        ([10] * 36, 4, 1),
        ([10] * 37, 4, 2),
        ([65536 * 320], 1, 1),
        ([65536 * 320 + 1], 1, 2),
        ([65536 * 640], 1, 2),
        ([65536 * 300, 65536 * 40], 2, 2),
    ],
)
def test_lists_are_walked_over_in_pieces(costs, sizes, columns, launches):
    assert costs["kernel"].foreach_launches(sizes, columns) == launches


def compiled(costs, function, *inputs):
    torch._dynamo.reset()
    with costs["inductor"].recorded() as kernels:
        results = torch.compile(function)(*inputs)
    return kernels, results


@pytest.mark.compiles
def test_each_element_counts_once_in_a_fused_loop(costs):
    x, row = torch.ones(64, 1024), torch.ones(1024)
    kernels, result = compiled(costs, lambda x, row: (x + row).relu() * row, x, row)
    assert [(one.kind, one.read, one.written) for one in kernels] == [
        (costs["kernel"].FUSED, 4 * (64 * 1024 + 1024), 4 * 64 * 1024)
    ]
    assert result.shape == x.shape


@pytest.mark.compiles
def test_what_only_the_kernel_reads_does_not_count(costs):
    x = torch.ones(64, 1024)
    kernels, _ = compiled(costs, lambda x: torch.softmax(x, -1), x)
    assert sum(one.bytes for one in kernels) == 2 * x.nbytes and len(kernels) == 1


@pytest.mark.compiles
def test_a_lookup_reads_no_more_than_it_looks_up(costs):
    table, places = torch.ones(100_000, 16), torch.arange(8)
    kernels, _ = compiled(costs, lambda table, places: table[places] * 2, table, places)
    assert [(one.read, one.written) for one in kernels] == [(8 * 8 + 8 * 16 * 4, 8 * 16 * 4)]


@pytest.mark.compiles
def test_a_product_counts_its_operands_and_operations(costs):
    a, b = torch.ones(32, 64, dtype=torch.bfloat16), torch.ones(64, 16, dtype=torch.bfloat16)
    kernels, _ = compiled(costs, torch.mm, a, b)
    (product,) = kernels
    assert (product.kind, product.flops, product.precision) == (costs["kernel"].MATMUL, 2 * 32 * 64 * 16, "16 bits")
    assert (product.read, product.written) == (a.nbytes + b.nbytes, 2 * 32 * 16)


@pytest.mark.compiles
def test_a_product_with_an_epilogue_counts_what_it_keeps_and_adds_up(costs):
    from amp_compiler.ops import epilogues

    a, b = torch.ones(32, 64, dtype=torch.bfloat16), torch.ones(64, 128, dtype=torch.bfloat16)
    bias, flops = torch.ones(128, dtype=torch.bfloat16), 2 * 32 * 64 * 128

    def run(a, b, bias):
        made, mask = epilogues.ACTIVATION(a, b, bias, "relu")
        return made, *epilogues.GRADIENT(a, b, mask, "relu", True)

    (forward, backward), _ = compiled(costs, run, a, b, bias)
    for one in (forward, backward):
        assert (one.kind, one.flops, one.precision) == (costs["kernel"].MATMUL, flops, "16 bits")
    out, mask = 2 * 32 * 128, 32 * 128 // 8
    assert (forward.read, forward.written) == (a.nbytes + b.nbytes + bias.nbytes, out + mask)
    assert (backward.read, backward.written) == (a.nbytes + b.nbytes + mask, out + bias.nbytes)


@pytest.mark.compiles
@pytest.mark.parametrize("gradients", [False, True])
def test_a_loss_in_chunks_counts_each_chunk(costs, gradients):
    from amp_compiler.ops import classifier_loss  # noqa: F401  # registers the operators

    x, weight = torch.ones(40, 8), torch.ones(100, 8)
    target, options = torch.zeros(40, dtype=torch.int64), (torch.float32, 1, -100, 0.0, 16)
    operators = torch.ops.amp_compiler

    def run(x, weight, target):
        if gradients:
            return operators.classifier_loss_gradients(x.sum(), x, weight, None, target, *options, [True, True, False])
        return operators.classifier_loss(x, weight, None, target, *options)

    kernels, _ = compiled(costs, run, x, weight, target)
    products = [one for one in kernels if one.kind == costs["kernel"].MATMUL]
    logits = [one.written for one in products if one.name == "logits"]
    assert logits == [4 * 100 * 16, 4 * 100 * 16, 4 * 100 * 8], "three chunks, of 16, 16 and 8 rows"
    assert sum(one.flops for one in products) == (3 if gradients else 1) * 2 * 40 * 8 * 100
    assert len(products) == (9 if gradients else 3)


@pytest.mark.parametrize("operator", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_causal_attention_is_known_by_its_argument(costs, operator, causal):
    graph = torch.fx.Graph()
    q, k, v = (graph.placeholder(name) for name in "qkv")
    target = getattr(torch.ops.aten, f"_scaled_dot_product_{operator}_attention").default
    middle = {"flash": (0.0,), "cudnn": (None, True, 0.0), "efficient": (None, True, 0.0)}[operator]
    assert costs["inductor"]._is_causal(graph.call_function(target, (q, k, v, *middle, causal))) == causal


def test_our_kernels_are_counted_from_their_arguments(costs):
    runs, kernel = costs["runs"], costs["kernel"]
    shapes = [(8192,), (3, 5)]
    count = 8192 + 15
    weights, first, second = ([torch.empty(shape) for shape in shapes] for _ in range(3))
    grads, lows = ([torch.empty(shape, dtype=torch.float16) for shape in shapes] for _ in range(2))
    steps, one = [torch.empty(()) for _ in shapes], torch.empty(())
    check, finish = runs.our_kernels(runs.CHECK, (grads, one))
    assert (check.read, check.written, check.launches) == (2 * count, 3 * 8, 1)  # one pass: 2 bytes a parameter
    assert (finish.read, finish.launches) == (3 * 8, 1)
    hyper = torch.empty(6, dtype=torch.float64)
    arguments = (weights, grads, first, second, [], lows, steps, hyper, one, one, False, False, True)
    prepare, update = runs.our_kernels(runs.OPERATORS["adam"], arguments)
    assert (prepare.launches, update.launches, update.kind) == (1, 1, kernel.UPDATE)
    assert update.bytes == 28 * count
    (commit,) = runs.our_kernels(runs.COMMIT, (one, weights, first))
    assert (commit.read, commit.written) == (4 * count, 4 * count)
    assert runs.our_kernels(torch.ops.aten.add.Tensor, (one, one)) == []


@pytest.mark.parametrize(("scaled", "bytes_each"), [(False, 28), (True, 32)])
def test_torchs_fused_update_is_counted_from_its_arguments(costs, scaled, bytes_each):
    meta = {"device": "meta"}
    lists = [[torch.empty(1000, **meta), torch.empty(24, **meta)] for _ in range(4)]
    steps = [torch.empty((), **meta) for _ in range(2)]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
    options |= {"maximize": False, "grad_scale": torch.empty((), **meta) if scaled else None, "found_inf": None}
    (kernel,) = costs["runs"].eager_kernels(
        torch.ops.aten._fused_adamw_.default, (*lists, [], steps), options, None, device="meta"
    )
    assert kernel.bytes == bytes_each * 1024 + (4 if scaled else 0) + 2 * 4  # and the counts of steps
    assert (kernel.launches, kernel.in_graph) == (1, False)


def test_the_dearest_kernels_stand_first_and_equal_ones_in_one_line(costs):
    kernel = costs["kernel"]
    loops = kernel.Kernel("loops", kernel.FUSED, 3_000_000, 1_800_000)  # 3.5 µs each, launch included
    small = kernel.Kernel("small", kernel.FUSED, 0, 4_800)  # 2.501 µs
    product = kernel.Kernel("mm", kernel.MATMUL, 3_000_000, 1_800_000, flops=989_000_000 * 7)  # 9.5 µs
    table = costs["model"].dearest("a step", [loops, small, product, loops, loops], 2)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["loops", "mm"] and cells[1] == ["3", "1"]
    assert cells[2:6] == [["3.0", "3.0"], ["1.8", "1.8"], ["0", "7"], ["10.5", "9.5"]]
    assert cells[6] == ["46.7%", "42.2%"]
