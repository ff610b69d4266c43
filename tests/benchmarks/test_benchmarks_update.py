"""The benchmark of the update compares variants of the same arithmetic, by the bytes that they really move."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("bf16", "fp16", "fp32")


def weights_of(made):
    return [weight.detach() for weight in made.weights]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["OURS", "FUSED", "FOREACH"])
def test_every_update_does_the_same_arithmetic(bench, name, kind):
    runs = bench["update_runs"]
    shapes = runs.transformer(5000)
    made = runs.make(getattr(runs, name), shapes, kind, "cpu")
    plain = runs.Tensors(shapes, kind, "cpu")
    exact = [torch.nn.Parameter(weight.double().detach()) for weight in plain.weights]
    optimizer = torch.optim.AdamW(exact, runs.LR, betas=runs.BETAS, eps=runs.EPS, weight_decay=runs.DECAY)
    for _ in range(3):
        made()
        for weight, grad in zip(exact, plain.grads, strict=True):
            weight.grad = grad.double() / (runs.SCALE if kind == "fp16" else 1)
        if kind == "fp16":
            assert torch.nn.utils.clip_grad_norm_(exact, runs.CLIP) > 0
        optimizer.step()
    for got, weight, start in zip(weights_of(made), exact, plain.weights, strict=True):
        moved = (weight - start).abs().max()
        assert moved > runs.LR  # three steps of about lr each
        assert (got - weight).abs().max() < 1e-3 * moved
    for low, got in zip(made.low_weights, weights_of(made), strict=bool(made.low_weights)):
        assert torch.equal(low, got.to(low.dtype))


class ByteCounter(TorchDispatchMode):
    """Bytes that the calls of an optimizer read and write, by their schemas; numbers of one element do not count."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "detach" in str(func):
            return result
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if "_fused_adamw_" in str(func) and given.get("grad_scale") is None:
            written -= {"grads"}  # they are written where the kernel unscales them
        overwritten = {"self"} if "copy_" in str(func) else set()
        read = {id(t): t for name, value in given.items() if name not in overwritten for t in tensors(value)}
        self.bytes += sum(t.nbytes for t in read.values())
        self.bytes += sum(t.nbytes for name in written for t in tensors(given[name]))
        if not written:
            self.bytes += sum(t.nbytes for t in tensors(result))
        return result


def tensors(value):
    leaves = value if isinstance(value, (list, tuple)) else [value]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["FUSED", "FOREACH", "CASTS"])
def test_bytes_are_those_that_the_dispatcher_sees(bench, name, kind):
    runs = bench["update_runs"]
    made = runs.make(getattr(runs, name), [(256, 64), (128, 128)], kind, "cpu")
    made()
    with ByteCounter() as counter:
        made()
    if name == "CASTS" and kind == "fp32":
        assert counter.bytes == 0
        return
    count = 2 * 256 * 64
    assert counter.bytes / count == pytest.approx(runs.bytes_per_parameter(getattr(runs, name), kind), abs=0.01)


def test_ours_moves_thirty_bytes_per_parameter(bench):
    runs = bench["update_runs"]
    made = runs.make(runs.OURS, [(256, 64)], "fp16", "cpu")
    both = [*made.masters, *made.moments[0], *made.moments[1]]  # read and written
    moved = 2 * sum(t.nbytes for t in (*both, *made.grads)) + sum(t.nbytes for t in made.low_weights)
    assert moved / (256 * 64) == 30 == runs.bytes_per_parameter(runs.OURS, "fp16")
    assert runs.formula(runs.OURS, "fp16") == "2 check + 2 gradient + 24 weight and moments + 2 16-bit copy"


def test_mixes_have_about_the_parameters_asked_for(bench):
    for mix in bench["update_runs"].MIXES.values():
        assert sum(torch.Size(shape).numel() for shape in mix(20_000_000)) == pytest.approx(20e6, rel=0.1)
