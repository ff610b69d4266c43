"""What is written to weights counts from the next call of a compiled module on, known to autograd or not."""

import gc
import logging
import weakref

import pytest
import torch
from torch import nn
from toys import eager_step, small
from weight_writes import WRITES, reset

import amp_compiler as amp
from amp_compiler.forward.kept_weights import KeptWeights
from amp_compiler.ops.stale_copies import CopyWatch

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
ERROR = 0.02  # of the largest output: four roundings to eight bits


def close(matches, wanted):
    matches, wanted = matches.detach(), wanted.detach()
    return float((matches - wanted).abs().max()) <= ERROR * float(wanted.abs().max())


@pytest.mark.parametrize(
    ("dtype", "training", "backend"),
    [
        ("bf16", False, "eager"),
        ("fp16", True, "eager"),
        pytest.param("fp16", False, "inductor", marks=pytest.mark.slow),
    ],
)
def test_the_next_call_reads_what_was_written(dtype, training, backend, loops):
    model = small()
    fast = amp.compile(model, dtype=dtype, backend=backend).train(training)
    for name, write in WRITES.items():
        with torch.set_grad_enabled(training):
            reset(model)
            fast(X), fast(X)
            before = model(X).detach()  # torch swaps no weights of a graph
            with torch.enable_grad():
                write(model)
            plain = model(X).detach()
            assert not close(before, plain), name
            assert close(fast(X), plain), name


def test_kept_copies_are_new_tensors_where_results_may_hold_the_old_ones():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return x @ self.weight.t(), self.weight.bfloat16()

    model = Given()
    fast = amp.compile(model, dtype="bf16", backend="eager").eval()
    with torch.no_grad():
        fast(X)
        held = fast(X)[1]
        kept = held.clone()
        model.weight.data.add_(1)
        assert torch.equal(fast(X)[1], model.weight.bfloat16()) and torch.equal(held, kept)


def test_those_of_fused_optimizers_and_of_inference_tensors_are_followed():
    model = small()
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    for _ in range(3):
        with torch.no_grad():
            assert close(compiled(X), model(X))
        optimizer.zero_grad()
        model(X).square().sum().backward()
        optimizer.step()
    with torch.inference_mode():
        model = small().eval()
        compiled = amp.compile(model, dtype="bf16", backend="eager")
        compiled(X)
        model[0].weight.mul_(3)
        assert close(compiled(X), model(X))


def test_the_first_such_weight_is_named_once(caplog):
    model = small()
    fast = amp.compile(model, dtype="bf16", backend="eager").eval()
    with caplog.at_level(logging.WARNING, "amp_compiler"), torch.no_grad():
        for value in (0.0, 1.0):
            model[0].weight.sub_(0.5)  # which its counter tells, and the next is another tensor
            model[0].bias = nn.Parameter(model[0].bias + 1)
            fast(X), fast(X)
            assert len(caplog.records) == value
            model[2].weight.data.fill_(value)
            fast(X)
    assert [record.getMessage().partition("'")[2].partition("'")[0] for record in caplog.records] == ["2.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((3,), False),
        ((1024,), False),
        ((1025,), False),
        ((100, 77), False),
        ((16, 8, 3, 3), True),
        ((64, 65, 3, 3), True),
    ],
)
def test_every_element_is_looked_at_in_turn(dtype, shape, turned, loops):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    flat = weight.view(-1)
    flat[:3] = torch.tensor([float("nan"), float("inf"), 1e30])
    layout = torch.channels_last if turned else torch.preserve_format
    low = torch.empty_like(weight, dtype=dtype, memory_format=layout).copy_(weight)
    watch = CopyWatch(
        [(weight, low), (weight.t() if weight.dim() == 2 else weight, low.t() if low.dim() == 2 else low)]
    )
    turns = 1 if weight.numel() <= 1024 else 2 * -(-weight.numel() // 1024)
    for place in (0, 2, weight.numel() // 2, weight.numel() - 1):
        assert not any(watch.look(turn) for turn in range(turns))
        old = float(flat[place])
        flat[place] = 7.0
        assert {one for turn in range(turns) for one in watch.look(turn)} == {0, 1}
        flat[place] = old


def test_a_pair_of_other_types_is_compared_too():
    weight = torch.arange(6.0).bfloat16()
    watch = CopyWatch([(weight, weight.float()), (weight.double(), weight.float())])
    assert watch.look() == []
    weight.data[2] = 9
    assert watch.look() == [0]


def test_of_weights_and_copies_that_were_nothing_is_kept():
    weights = [torch.randn(4, 4) for _ in range(3)]
    kept = KeptWeights([(place, f"w{place}", torch.bfloat16) for place in range(3)])
    kept.current(weights)
    kept.current(weights)  # which compares
    copies = [weakref.ref(one) for one in kept.current(weights)]
    for weight in weights:
        weight.add_(1.0)
    kept.current(weights)
    assert all(one() is None for one in copies)
    kept.current(weights)
    copies = [weakref.ref(one) for one in kept.current(weights)]
    kept.drop()
    assert all(one() is None for one in copies)


@pytest.mark.parametrize("kind", ["training", "inference", "step", "step in subgraphs"])
def test_parameters_are_swapped_where_torch_is_told_to(kind, monkeypatch):
    # It refuses where a weak reference is.
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, other, x = nn.Linear(8, 4), nn.Linear(8, 4), torch.rand(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    call = amp.compile(model, dtype="bf16", backend="eager")
    if "step" in kind:
        branches = "subgraphs" in kind  # on a number, which no graph holds
        call = eager_step(model, lambda m, x: m(x).square().mean() * (2 if branches and x.sum() < 0 else 1), optimizer)
    with torch.set_grad_enabled(kind == "training"):
        before = call(x)
        gc.collect()  # which Dynamo does behind each capture if nobody turns it off
        model.load_state_dict(other.state_dict())
        y = call(x)
        expected = model(x).square().mean() if "step" in kind else model(x)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(y, before) and torch.equal(model.weight, other.weight)


USES = {
    "explain": lambda model, x, path: amp.explain(model, x, dtype="bf16"),
    "find_nonfinite": lambda model, x, path: amp.find_nonfinite(model, x, dtype="bf16"),
    "profile": lambda model, x, path: amp.profile(model, [x], dtype="bf16"),
    "export": lambda model, x, path: amp.export(model, (x,), dtype="bf16"),
    "export_onnx": lambda model, x, path: amp.export_onnx(model, (x,), path, dtype="fp16"),
}


@pytest.mark.usefixtures("few_objects")
def test_parameters_can_be_swapped_right_behind(tmp_path):
    """Torch swaps no tensor that something refers to weakly; nothing waits for the garbage collector."""
    gc.disable()
    try:
        for name, use in USES.items():
            model, other = nn.Linear(8, 4), nn.Linear(8, 4)
            wanted = other.weight.detach().clone()
            use(model, torch.ones(2, 8), tmp_path / "model.onnx")
            torch.utils.swap_tensors(model.weight, other.weight)
            assert torch.equal(model.weight, wanted), name
    finally:
        gc.enable()
