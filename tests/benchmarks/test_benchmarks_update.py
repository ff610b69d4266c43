"""The benchmark of the update compares variants of the same arithmetic, by the bytes that they really move."""

import pytest
import torch

KINDS = ("bf16", "fp16", "fp32")


def weights_of(built):
    return [weight.detach() for weight in built.weights]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["OURS", "FUSED", "FOREACH"])
def test_every_update_does_the_same_arithmetic(bench, name, kind):
    runs = bench["update_runs"]
    shapes = runs.transformer(5000)
    result = runs.make(getattr(runs, name), shapes, kind, "cpu")
    plain = runs.Tensors(shapes, kind, "cpu")
    exact = [torch.nn.Parameter(weight.double().detach()) for weight in plain.weights]
    optimizer = torch.optim.AdamW(exact, runs.LR, betas=runs.BETAS, eps=runs.EPS, weight_decay=runs.DECAY)
    for _ in range(3):
        result()
        for weight, grad in zip(exact, plain.grads, strict=True):
            weight.grad = grad.double() / (runs.SCALE if kind == "fp16" else 1)
        if kind == "fp16":
            assert torch.nn.utils.clip_grad_norm_(exact, runs.CLIP) > 0
        optimizer.step()
    for got, weight, start in zip(weights_of(result), exact, plain.weights, strict=True):
        moved = (weight - start).abs().max()
        assert moved > runs.LR  # three steps of about lr each
        assert (got - weight).abs().max() < 1e-3 * moved
    for low, got in zip(result.low_weights, weights_of(result), strict=bool(result.low_weights)):
        assert torch.equal(low, got.to(low.dtype))


def test_ours_moves_thirty_bytes_per_parameter(bench):
    runs = bench["update_runs"]
    result = runs.make(runs.OURS, [(256, 64)], "fp16", "cpu")
    both = [*result.masters, *result.moments[0], *result.moments[1]]  # read and written
    moved = 2 * sum(t.nbytes for t in (*both, *result.grads)) + sum(t.nbytes for t in result.low_weights)
    assert moved / (256 * 64) == 30 == runs.bytes_per_parameter(runs.OURS, "fp16")
    assert runs.formula(runs.OURS, "fp16") == "2 check + 2 gradient + 24 weight and moments + 2 16-bit copy"


def test_mixes_have_about_the_parameters_asked_for(bench):
    for mix in bench["update_runs"].MIXES.values():
        assert sum(torch.Size(shape).numel() for shape in mix(20_000_000)) == pytest.approx(20e6, rel=0.1)
