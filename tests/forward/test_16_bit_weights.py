"""`amp.compile(weights="low")`: 16-bit weights alone, and what a rule keeps in FP32."""

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp

RULES = {"version": 1, "extends": "default", "rules": [{"match": {"module": "last"}, "precision": "fp32"}]}
IDS = torch.arange(12).reshape(3, 4)


class Net(nn.Module):
    """A lookup whose weights are the output layer's too, a norm, a view of a weight and a layer for FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.middle, self.last = nn.Parameter(torch.randn(1, 8, 8)), nn.Linear(8, 8)
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.table.weight
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, ids):
        x = self.norm(self.table(ids)).to(self.middle.dtype) * self.scale  # which is FP32, for which it was written
        return self.out(self.last(x @ self.middle.view(8, 8).t()))


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def rounded(model: nn.Module, names: set[str], low: torch.dtype) -> nn.Module:
    """The model with these parameters rounded to 16 bits, in FP32."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if name in names:
                one.copy_(one.to(low))
    return model


@pytest.mark.parametrize(
    ("low", "backend"),
    [
        ("bf16", "eager"),
        ("fp16", "eager"),
        pytest.param("bf16", "inductor", marks=[pytest.mark.compiles, pytest.mark.slow]),
    ],
)
def test_weights_are_stored_in_16_bits_but_for_what_rules_keep(low, backend):
    dtype = torch.bfloat16 if low == "bf16" else torch.float16
    wanted = {"table.weight", "middle"} | ({"norm.weight", "norm.bias"} if low == "bf16" else set())  # FP32 by a rule
    model = net()
    kept = amp.compile(rounded(model, wanted, dtype), rules=RULES, dtype=low, backend=backend)
    fast = amp.compile(model, rules=RULES, dtype=low, backend=backend, weights="low")
    with torch.no_grad():
        first, again, longer = fast(IDS), fast(IDS), fast(IDS.repeat(2, 1))
        expected = kept(IDS)
        # by the same plan: the same products in 16 bits, and the same arithmetic in FP32 around them
        assert torch.equal(first, again) and torch.equal(longer[:3], first) and torch.equal(first, expected)
    assert fast.plan.nodes == kept.plan.nodes
    types = {name: value.dtype for name, value in fast.state_dict().items()}
    assert {name for name, one in types.items() if one is dtype} == {*wanted, "out.weight"}
    assert types["last.weight"] is types["scale"] is torch.float32 and model.table.weight is model.out.weight
    assert fast.compilations == 2  # the first shape, and any other


def test_training_is_refused_with_the_reason():
    fast = amp.compile(net(), dtype="bf16", backend="eager", weights="low")
    with pytest.raises(amp.AmpError, match=r"16 bits alone.*torch\.no_grad\(\).*without weights"):
        fast(IDS)
    assert fast.original.out.weight.dtype is torch.float32  # nothing was converted
    with pytest.raises(amp.AmpError, match="16 bits alone"):
        amp.training_step(fast, lambda m, x: m(x).mean(), torch.optim.SGD(fast.parameters(), 0.1), backend="eager")
    for one in fast.parameters():
        one.requires_grad_(False)
    assert fast(IDS).requires_grad is False
    with pytest.raises(amp.AmpError, match="weights='16'"):
        amp.compile(net(), weights="16")


def test_a_checkpoint_is_loaded_rounded_and_copies_keep_their_types():
    model = net()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    fast = amp.compile(model, dtype="bf16", backend="eager", weights="low")
    with torch.inference_mode():
        before = fast(IDS)
        fast.load_state_dict({name: -value for name, value in state.items()})
        assert torch.equal(fast.original.middle, -state["middle"].bfloat16())
        fast.load_state_dict(state)
        assert torch.equal(fast(IDS), before) and torch.equal(copy.deepcopy(fast)(IDS), before)


def test_numbers_that_16_bits_do_not_hold_are_refused_by_name():
    model = net()
    model.middle.data[0, 0, 0] = 1e5
    fast = amp.compile(model, dtype="fp16", backend="eager", weights="low")
    with torch.no_grad(), pytest.raises(amp.AmpError, match=r"'middle' are beyond what float16 holds.*bf16"):
        fast(IDS)
