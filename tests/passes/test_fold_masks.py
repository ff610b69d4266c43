"""Masks of attention that are constants: what they become, what stays, and the same numbers either way."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toys import eager_step

import amp_compiler as amp

ROWS, LOWEST = 12, torch.finfo(torch.float32).min


def below(rows: int = ROWS, keys: int = ROWS) -> Tensor:
    """What a causal attention sees."""
    return torch.arange(keys)[None, :] <= torch.arange(rows)[:, None]


def added(seen: Tensor, hidden: float) -> Tensor:
    """The same as a mask that is added."""
    return torch.where(seen, torch.zeros(1, 1, *seen.shape), hidden)


def packed() -> Tensor:
    """As transformers writes it: for a batch of sequences, none of which begins anew."""
    places = torch.arange(ROWS)[None].expand(2, -1)
    parts = (torch.diff(places, prepend=places[:, :1] - 1) != 1).cumsum(-1)
    same = parts[:, None, :, None] == parts[:, None, None, :]
    return (same & (places[:, None, None, :] <= places[:, None, :, None])).expand(2, -1, ROWS, ROWS)


class Attention(nn.Module):
    """Attention with a mask that `mask(x)` makes."""

    def __init__(self, mask, keys=ROWS):
        super().__init__()
        self.mask, self.keys = mask, keys
        self.inner = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.inner(x).chunk(3, -1))
        mask = self.mask(x)
        return F.scaled_dot_product_attention(q, k[:, :, : self.keys], v[:, :, : self.keys], attn_mask=mask)


def text_of(module: nn.Module) -> str:
    """The graph behind the passes, as it was rewritten, and its numbers held to the model's own."""
    torch.manual_seed(0)
    x = torch.randn(2, ROWS, 16)
    compiled = amp.compile(module, dtype="bf16", backend="eager", rules={"version": 1, "extends": "default"})
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(x)
    torch.testing.assert_close(compiled(x), expected.float(), atol=2e-2, rtol=2e-2)
    return str(compiled.stages["fold_masks"].text)


def written(mask: Tensor, value: float, *place: slice | int) -> Tensor:
    """A mask that is written to in place."""
    mask[place] = value
    return mask


CAUSAL = {
    "bool": lambda x: below(),
    "of any batch": lambda x: below().expand(x.shape[0], 1, -1, -1),
    "packed": lambda x: packed(),
    "minus infinity": lambda x: added(below(), float("-inf")),
    "lowest number": lambda x: added(below(), LOWEST),
    "in 16 bits": lambda x: added(below(), float("-inf")).to(torch.float32),
    "tril": lambda x: torch.ones(ROWS, ROWS, dtype=torch.bool).tril(),
    "of the form of an input": lambda x: torch.ones_like(x @ x.mT).tril().bool()[:, None],
}
SHOWS_ALL = {
    "bool": lambda x: torch.ones(ROWS, ROWS, dtype=torch.bool),
    "added": lambda x: torch.zeros(1, 1, ROWS, ROWS),
    "of positions": lambda x: (torch.arange(ROWS) >= 0).expand(2, 1, ROWS, -1),
}
OTHER = {
    "one below the diagonal": lambda x: below().roll(1, 0),
    "above the diagonal": lambda x: below().mT,
    "of one sequence": lambda x: below()[None, None] | (torch.arange(2) > 0)[:, None, None, None],
    "a bias": lambda x: added(below(), float("-inf")) + 0.5,
    "not low enough": lambda x: added(below(), -1e4),
    "an input": lambda x: (x[:, None, None, :, 0] < 1e9) & below(),
    "written through a view": lambda x: written(torch.zeros(2, ROWS), -3.0, slice(None), 3)[:, None, None],
    "written behind a view": lambda x: written(torch.zeros(ROWS, ROWS), -3.0, 3).view(1, 1, ROWS, ROWS),
    "random": lambda x: (torch.rand(ROWS, ROWS) >= 0) & below(),
}


@pytest.mark.parametrize("case", CAUSAL)
def test_a_causal_mask_becomes_a_flag(case):
    text = text_of(Attention(CAUSAL[case]))
    assert "is_causal=True" in text
    assert "bool[" not in text, "what the mask was made of went with it"


@pytest.mark.parametrize("case", SHOWS_ALL)
def test_a_mask_that_hides_nothing_goes(case):
    text = text_of(Attention(SHOWS_ALL[case]))
    attention = next(line for line in text.splitlines() if "scaled_dot_product_attention" in line)
    assert "mask" not in attention and "is_causal" not in attention and "bool[" not in text
    assert "zeros" not in text


@pytest.mark.parametrize("case", OTHER)
def test_any_other_mask_stays(case):
    text = text_of(Attention(OTHER[case]))
    attention = next(line for line in text.splitlines() if "scaled_dot_product_attention" in line)
    assert "is_causal" not in attention
    arguments = attention.partition("default(")[2].partition(")")[0].split(", ")
    assert (
        len([one for one in arguments if "=" not in one]) + sum(one.startswith("attn_mask") for one in arguments) == 4
    )


def test_a_triangle_of_fewer_keys_than_queries_stays():
    text = text_of(Attention(lambda x: below(ROWS, 5), keys=5))
    assert "is_causal" not in text


def test_a_mask_in_a_buffer_stays():
    class Kept(Attention):
        def __init__(self):
            super().__init__(lambda x: self.seen)
            self.register_buffer("seen", below())

    assert "is_causal" not in text_of(Kept())


def test_a_training_step_learns_the_same():
    def trained(passes):
        torch.manual_seed(1)
        model = nn.Sequential(Attention(CAUSAL["packed"]))
        step = eager_step(model, lambda m, x: m(x).square().mean(), passes=passes)
        x = torch.randn(2, ROWS, 16)
        losses = [step(x) for _ in range(3)]
        return torch.stack(losses), [parameter.detach() for parameter in model.parameters()]

    with_pass, without = trained(None), trained(amp.pipelines.CAPTURE.skip("fold_masks"))
    torch.testing.assert_close(with_pass, without, atol=1e-3, rtol=1e-2)
