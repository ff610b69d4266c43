"""Classifiers whose cross-entropy goes over its rows in chunks: what is taken, what is left, and equal numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.passes.step.chunk_logits import ChunkLogits

F = nn.functional
WORDS, WIDE, ROWS = 37, 8, 10
WHOLE = amp.pipelines.STEP.skip("chunk_logits")
CHUNKED = WHOLE.insert_before("differentiate", ChunkLogits(devices=("cpu",), least=0, rows=4))
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 2e-3}


class Words(nn.Module):
    """An embedding, a layer and a classifier; tied ones share the table."""

    def __init__(self, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WIDE)
        self.head = nn.Linear(WIDE, WORDS, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def hidden(self, x: Tensor) -> Tensor:
        return self.inner(self.table(x)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))


def batch(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, WORDS, (2, rows), generator=generator) for _ in range(2))  # type: ignore[return-value]


def flat(model, x, y, **options):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), **options)


def shifted(model, x, y):
    logits = model(x).float()
    return F.cross_entropy(logits[:, :-1, :].contiguous().view(-1, WORDS), y[:, 1:].contiguous().view(-1))


def classes_second(model, x, y):
    return F.cross_entropy(model(x).transpose(1, 2), y)


def by_likelihood(model, x, y):
    return F.nll_loss(F.log_softmax(model(x), -1).view(-1, WORDS), y.view(-1))


def by_product(model, x, y):
    return F.cross_entropy((model.hidden(x) @ model.table.weight.t()).view(-1, WORDS), y.view(-1))


def some_ignored(model, x, y):
    return flat(model, x, torch.where(y < 20, y, -100))


TAKEN = {
    "flat": flat,
    "shifted": shifted,
    "classes second": classes_second,
    "likelihood": by_likelihood,
    "product": by_product,
    "sum": lambda model, x, y: flat(model, x, y, reduction="sum") / 7,
    "smoothed": lambda model, x, y: flat(model, x, y, label_smoothing=0.1),
    "ignored": some_ignored,
    "another number ignored": lambda model, x, y: flat(model, x, y, ignore_index=3),
    "one of two": lambda model, x, y: flat(model, x, y) + model.hidden(x).square().mean(),
    "of an input": lambda model, x, y: flat(model, x, y) * (x.float().mean() / 30),
}
LEFT = {
    "returned": (lambda model, x, y: (lambda logits: (F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits))(
        model(x)), "read-by-"),
    "read": (lambda model, x, y: (lambda logits: F.cross_entropy(logits.flatten(0, 1), y.flatten())
                                  + 1e-4 * logits.float().logsumexp(-1).square().mean())(model(x)), "read-by-"),
    "weights": (lambda model, x, y: flat(model, x, y, weight=torch.ones(WORDS)), "class-weights"),
    "probabilities": (lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), F.one_hot(y.flatten(), WORDS) * 1.0),
                      "probabilities"),
    "not reduced": (lambda model, x, y: flat(model, x, y, reduction="none").mean(), "not-reduced"),
    "some classes": (lambda model, x, y: F.cross_entropy(model(x)[..., :20].flatten(0, 1), y.flatten() % 20),
                     "behind-"),
}  # fmt: skip


def trained(loss, passes, dtype="bf16", steps=3, backend="eager", model=None, rows=(ROWS,) * 9, **options):
    torch.manual_seed(0)
    model = Words() if model is None else copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if dtype == "fp32":
        options |= {"enabled": False}
    else:
        options |= {"dtype": dtype}
    step = amp.training_step(model, loss, optimizer, passes=passes, backend=backend, **options)
    losses = [step(*batch(number, rows[number])) for number in range(steps)]
    return step, losses, model


def assert_same(first, second, dtype):
    """Losses of all steps, and weights behind them; AdamW makes of a rounding error a part of its rate."""
    losses = [torch.stack([one[0] if isinstance(one, tuple) else one for one in run[1]]) for run in (first, second)]
    torch.testing.assert_close(*losses, rtol=TOLERANCE[dtype], atol=0)
    for one, other in zip(first[2].parameters(), second[2].parameters(), strict=True):
        assert (one - other).norm() <= 5 * TOLERANCE[dtype] * other.norm()


def all_logits(step, rows=2 * ROWS) -> list[str]:
    """Names of the nodes that hold as many elements as all logits."""
    graph = step.graph_module.graph
    sizes = {node.name: node.meta.get("val") for node in graph.nodes if node.op == "call_function"}
    return [
        name
        for name, one in sizes.items()
        if isinstance(one, Tensor) and WORDS in one.shape and one.numel() >= (rows - 2) * WORDS
    ]


def text(step) -> str:
    return step.stages["join_chunks"].text


IN_EVERY_TYPE = ("flat",)  # of the others, which are found in another way, one type is the quick one


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        pytest.param(case, dtype, marks=[pytest.mark.slow] * (dtype != "bf16" and case not in IN_EVERY_TYPE))
        for case in TAKEN
        for dtype in TOLERANCE
    ],
)
def test_the_same_is_learnt_and_no_logits_are_stored(case, dtype):
    options = {"loss_scale": 1024.0} if dtype == "fp16" else {}
    with_chunks = trained(TAKEN[case], CHUNKED, dtype, **options)
    without = trained(TAKEN[case], WHOLE, dtype, **options)
    assert_same(with_chunks, without, dtype)
    assert all_logits(without[0]) and not all_logits(with_chunks[0])
    assert "classifier_loss_gradients" in text(with_chunks[0])
    assert "classifier_loss.default" not in text(with_chunks[0]), "loss and gradients come of one operator"


@pytest.mark.parametrize("case", LEFT)
def test_what_cannot_be_taken_is_left_and_says_why(case):
    loss, reason = LEFT[case]
    step, *rest = trained(loss, CHUNKED)
    assert_same((step, *rest), trained(loss, WHOLE), "bf16")
    lines = [line for line in step.stages["chunk_logits"].text.splitlines() if "logits=" in line]
    assert len(lines) == 1 and f"logits={reason}" in lines[0]
    assert "classifier_loss" not in text(step)


def test_a_loss_whose_gradient_depends_on_it_multiplies_twice():
    def loss(model, x, y):
        return flat(model, x, y).exp()

    step, *rest = trained(loss, CHUNKED)
    assert_same((step, *rest), trained(loss, WHOLE), "bf16")
    assert not all_logits(step)
    assert "amp_compiler.classifier_loss.default" in text(step) and "classifier_loss_gradients" in text(step)


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("tied", "bias")),
        "tied and bias",
        "frozen",
        "only the head",
    ],
)
def test_weights_of_every_kind_get_their_gradients(kind, dtype):
    torch.manual_seed(1)
    model = Words(tied="tied" in kind, bias="bias" in kind)
    if kind == "frozen":
        model.head.requires_grad_(False)
    if kind == "only the head":
        model.table.requires_grad_(False)
        model.inner.requires_grad_(False)
    found, expected = trained(flat, CHUNKED, dtype, model=model), trained(flat, WHOLE, dtype, model=model)
    assert_same(found, expected, dtype)
    mine, theirs = found[0].gradients(), expected[0].gradients()
    assert set(mine) == set(theirs)
    for name, one in mine.items():
        assert (one.float() - theirs[name].float()).norm() <= 4 * TOLERANCE[dtype] * theirs[name].float().norm()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"accumulate": 2}, marks=pytest.mark.slow),
        pytest.param({"clip_norm": 0.1}, marks=pytest.mark.slow),
        {"accumulate": 2, "clip_norm": 0.1},
    ],
)
def test_accumulated_and_clipped(options):
    found, expected = (trained(flat, one, "fp16", 4, loss_scale="dynamic", **options) for one in (CHUNKED, WHOLE))
    assert_same(found, expected, "fp16")


def test_like_autocast():
    torch.manual_seed(2)
    model = Words(tied=True)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = flat(reference, *batch())
    loss.backward()
    step, losses, _ = trained(flat, CHUNKED, steps=1, model=model)
    torch.testing.assert_close(losses[0], loss.detach(), rtol=1e-4, atol=0)
    gradients = step.gradients()
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    assert {id(parameters[name]) for name in gradients} == {id(one) for one in reference.parameters()}
    for name, gradient in gradients.items():
        found, parameter = gradient.float(), parameters[name]
        assert (found - parameter.grad).norm() <= 2e-2 * parameter.grad.norm()


def test_no_row_counts():
    def loss(model, x, y):
        return flat(model, x, torch.full_like(y, -100))

    (step, found, _), (_, expected, _) = (trained(loss, one, steps=1) for one in (CHUNKED, WHOLE))
    assert found[0].isnan() and expected[0].isnan()
    assert all(not gradient.any() for gradient in step.gradients().values())


def test_a_batch_of_another_size():
    rows = (10, 7, 12, 3)
    found, expected = (trained(flat, one, steps=4, rows=rows) for one in (CHUNKED, WHOLE))
    assert_same(found, expected, "bf16")
    assert "classifier_loss_gradients" in found[0].stages["join_chunks"].text


@pytest.mark.compiles
@pytest.mark.parametrize("rows", [(10, 10), pytest.param((10, 10, 7, 12), marks=pytest.mark.slow)])
def test_compiled(rows):
    torch.manual_seed(3)
    model = Words(tied=True)
    found, expected = (
        trained(flat, one, steps=len(rows), rows=rows, backend=backend, model=model)
        for one, backend in ((CHUNKED, "inductor"), (WHOLE, "eager"))
    )
    assert_same(found, expected, "bf16")


def test_small_logits_and_cpus_are_left_alone_unasked():
    step, *_ = trained(flat, None, steps=1)
    assert not step.stages.changed("chunk_logits")
    large = WHOLE.insert_before("differentiate", ChunkLogits(devices=("cpu",)))
    step, *_ = trained(flat, large, steps=1)
    assert not step.stages.changed("chunk_logits"), "64 MiB is the least"
    step, *_ = trained(flat, WHOLE.insert_before("differentiate", ChunkLogits(least=0)), steps=1)
    assert not step.stages.changed("chunk_logits"), "on a GPU alone, unless it is asked for"


@pytest.mark.parametrize(
    ("options", "mend"),
    [
        ({"devices": "cpu"}, r"write devices=\('cpu',\)"),
        ({"rows": -1}, "a whole number"),
        ({"least": 0.5}, "a whole number"),
    ],
)
def test_wrong_options_are_errors(options, mend):
    with pytest.raises(amp.AmpError, match=mend):
        ChunkLogits(**options)
