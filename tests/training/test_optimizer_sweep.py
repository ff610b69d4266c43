"""Every optimizer of torch's own list trains as in a torch loop, or is refused; see `optimizer_sweep`.

`AMP_REGENERATE=1 pytest -m slow tests/training/test_optimizer_sweep.py` writes its section of `docs/refusals.md` anew.
"""

import functools

import pytest
import torch
from optimizer_sweep import FORMS, Dense, Result, _as_near, _equal, judged, sweep, totals, variants
from refusals_page import check_section, table_of_reasons, table_of_totals
from torch.testing._internal.common_optimizers import optim_db

pytestmark = pytest.mark.long

KNOWN = {info.optim_cls.__name__: info for info in optim_db}
LISTED = ("RMSprop", "RAdam", "NAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "Rprop", "Adafactor", "Muon")
SHORT = (
    *((name, "default", "FP32") for name in LISTED),
    ("SGD", "weight_decay w/ momentum, fused", "FP32"),
    ("Adam", "amsgrad, foreach", "BF16"),
    ("Adagrad", "default", "sparse"),
    ("SGD", "momentum", "sparse"),
    ("SGD", "nesterov", "complex"),
    ("AdamW", "amsgrad", "complex"),
    ("RMSprop", "maximize, centered, weight_decay, w/ momentum", "complex"),
)


@pytest.mark.sweep(9)
@pytest.mark.parametrize(("name", "message", "form"), SHORT)
def test_an_optimizer_trains_as_in_a_torch_loop(name: str, message: str, form: str) -> None:
    assert judged(KNOWN[name], dict(variants(KNOWN[name]))[message], form) == ("right", "")


@pytest.mark.parametrize(("name", "form"), [("LBFGS", "FP32"), ("SparseAdam", "sparse")])
def test_what_no_graph_can_do_is_refused(name: str, form: str) -> None:
    outcome, note = judged(KNOWN[name], {}, form)
    assert outcome == "refused" and name in note and ("use " in note or "in your own loop" in note)


def test_a_wrong_weight_or_state_is_seen() -> None:
    models = [Dense(vectors=True) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
    ours, theirs = zip(models, optimizers, strict=True)
    assert _equal(ours, theirs) == ("right", "")
    with torch.no_grad():
        models[0].gain.mul_(1 + 1e-5)
    assert _equal(ours, theirs)[0] == "wrong"
    models[0].load_state_dict(models[1].state_dict())
    optimizers[0].state[models[0].gain]["momentum_buffer"] = torch.zeros(())
    assert _equal(ours, theirs)[0] == "wrong"
    start, off = Dense(vectors=True), Dense(vectors=True)
    assert _as_near(start, theirs[0], theirs[0], off)[0] == "right"
    assert _as_near(start, off, theirs[0], theirs[0])[0] == "wrong"


@functools.cache
def swept(form: str) -> tuple[Result, ...]:
    return tuple(sweep(form))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_whole_list(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = swept(form)
    with capsys.disabled():
        print(f"\noptimizers, {form}: {totals(list(result))}")
    assert result and not [one for one in result if one.outcome in ("raw", "wrong")]


INTRODUCTION = """\
Every optimizer of torch's own list (`optim_db`) trains through `amp.training_step`, with all sets of options that torch
lists for it, each with torch's loop, `foreach` and `fused`. In FP32, with sparse gradients and with complex weights,
weights and states are those of a plain torch loop, within 2e-6. In BF16 the weights are at most twice as far off FP32
as those of torch.autocast. `not run` is what torch itself refuses; its `differentiable` takes no leaves, so no torch
loop trains with it.

`AMP_REGENERATE=1 pytest -m slow tests/training/test_optimizer_sweep.py` writes this section anew.
"""


@pytest.mark.slow
def test_the_page_of_refusals_is_current() -> None:
    result = {form: swept(form) for form in FORMS}
    refused = [
        (one.note, one.optimizer, form) for form, some in result.items() for one in some if one.outcome == "refused"
    ]
    counts = {form: totals(list(some)) for form, some in result.items()}
    lines = [*INTRODUCTION.splitlines(), "", *table_of_totals(counts), "", *table_of_reasons(refused, "optimizers")]
    check_section("optimizers", "\n".join(lines))
