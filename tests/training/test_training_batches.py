"""Batches of one training step, whose form, shapes and types may change."""

import collections
import copy
import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import classes, eager_step, small, train_beside_torch

import amp_compiler as amp
from amp_compiler.forward import subgraphs
from amp_compiler.fx.capture import frontend

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(1, 16, 8, generator=GENERATOR)
Y = torch.randint(0, 5, (1, 16), generator=GENERATOR)

# name: batches of one training, of which every one is built otherwise than that before it
FORMS = {
    "a key more": [({"x": X[0], "y": Y[0]},), ({"x": X[0], "y": Y[0], "z": X[0]},), ({"y": Y[0], "x": X[0]},)],
    "an argument more": [({"x": X[0], "y": Y[0]},), ({"x": X[0], "y": Y[0]}, 3)],
    "None": [({"x": X[0], "y": Y[0]},), ({"x": X[0], "y": None},), ({"x": X[0], "y": Y[0]},)],
    "a list of another length": [([X[0], X[0] + 1],), ([X[0]],), ([X[0], X[0] * 2, X[0]],)],
}


def of_any_form(model, batch, *more):
    if isinstance(batch, list):
        return sum(model(x).square().mean() for x in batch)
    result = model(batch["x"])
    return result.square().mean() if batch["y"] is None else F.cross_entropy(result, batch["y"]) * (1 + len(more))


@pytest.mark.parametrize("name", FORMS)
def test_a_batch_of_another_form_is_captured_anew(name):
    train_beside_torch(nn.Linear(8, 5), of_any_form, FORMS[name])


@dataclasses.dataclass(eq=False)
class HashableBatch:
    x: object
    rows: object


# name: what holds a batch, of other numbers and of other rows
HELD = {
    "hashable": HashableBatch,
    "set": lambda x, rows: {"x": x, "rows": {rows}},
    "like a dict": lambda x, rows: collections.UserDict(x=x, rows=rows),
}


def of_held(model, held):
    x, rows = (held.x, held.rows) if isinstance(held, HashableBatch) else (held["x"], held["rows"])
    x = x[: max(rows)] if isinstance(rows, set) else x[:rows]
    return model(x).square().mean()


@pytest.mark.parametrize("name", HELD)
def test_what_holds_a_batch_may_be_looked_into_by_dynamo(name):
    held = [(HELD[name](X[0] * number, rows),) for number, rows in ((1, 16), (2, 16), (2, 7))]
    step, _ = train_beside_torch(nn.Linear(8, 5), of_held, held)
    assert "subgraph" not in step.execution


def test_a_batch_that_the_loss_cannot_take_changes_nothing_and_fixes_nothing():
    model = nn.Linear(8, 5)
    step = eager_step(model, lambda model, *batch: F.cross_entropy(model(batch[0]["x"]), batch[0]["y"]))
    with pytest.raises((amp.AmpError, TypeError)):
        step(X[0], Y[0])
    step({"x": X[0], "y": Y[0]})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises((amp.AmpError, KeyError), match="'y'"):
        step({"x": X[0]})
    assert all(map(torch.equal, before, model.parameters()))
    step({"y": Y[0], "x": X[0]})  # the order of keys is no matter
    assert not torch.equal(before[0], model.weight)


def test_new_shapes_and_types_are_captured_up_to_a_limit(monkeypatch, caplog):
    """Beyond it the step runs in subgraphs, which have a limit of their own, and then under autocast; each is told."""
    assert frontend.MOST_FORMS == 64
    for module in (frontend, subgraphs):
        monkeypatch.setattr(module, "MOST_FORMS", 8)
    model = nn.Linear(8, 5)
    plain = copy.deepcopy(model)
    loss_fn = lambda m, x, y: F.cross_entropy(m(x.float()), y)  # noqa: E731
    step = eager_step(model, loss_fn, dynamic_shapes=None)

    def trains(x, y):
        plain.load_state_dict(model.state_dict())
        assert torch.isclose(step(x, y), loss_fn(plain, x, y), rtol=2e-2)
        assert not torch.equal(model.weight, plain.weight)

    for size in range(16, 9, -1):
        trains(X[0][:size], Y[0][:size])
    trains(X[0].double().float(), Y[0].int().long())  # as before
    assert len(step._choice.programs) == 7
    trains(X[0].double(), Y[0])  # elements of another type
    assert "subgraph" not in step.execution
    for size in range(9, 1, -1):
        trains(X[0][:size], Y[0][:size])
        assert "in 1 subgraph" in step.execution and "compiled for 8 forms of its inputs" in step.execution
    trains(X[0], Y[0])
    trains(X[0][:5], Y[0][:5])
    assert "under torch.autocast" in step.execution and "8 forms of its inputs" in step.execution
    message = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("the training step runs forward and backward in 1 subgraph" in one for one in message) == 1
    assert sum("runs under torch.autocast, which knows no rules" in one for one in message) == 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_program_serves_every_batch_size_where_shapes_are_dynamic(backend):
    size = torch.export.Dim("size", min=2, max=64)
    batches = [(torch.randn(count, 8), torch.randint(0, 4, (count,))) for count in (9, 5, 33)]
    options = {"backend": backend, "dynamic_shapes": ({0: size}, {0: size})}
    step, _ = train_beside_torch(small(), classes, batches, **options)
    assert len(step._choice.programs) == 1


@pytest.mark.parametrize("shapes", [True, "dynamic", torch.ones(2)])
def test_dynamic_shapes_that_are_none_are_refused_by_themselves(shapes):
    with pytest.raises(amp.AmpError, match=rf"dynamic_shapes={re.escape(repr(shapes))} is not known.*'auto'"):
        eager_step(small(), classes, dynamic_shapes=shapes)
    with pytest.raises(amp.AmpError, match=r"is not known.*'auto'"):
        amp.compile(small(), backend="eager", dynamic_shapes=shapes)


def test_dynamic_shapes_of_a_step_that_do_not_hold_say_why(caplog):
    step = eager_step(small(), classes, dynamic_shapes={"x": {0: torch.export.Dim("size")}})
    step(torch.randn(1, 8), torch.tensor([2]))
    assert "no size of the training step is dynamic, whatever dynamic_shapes= says" in caplog.text


def test_a_size_that_a_backward_reads_as_a_number_is_captured_anew():
    """The backward of masked_select does, whose graph is right for one size alone."""

    def loss_fn(model, x, mask):
        return torch.masked_select(model(x)[:, :1], mask).float().square().mean()

    batches = [(torch.randn(count, 8), torch.rand(count, 6) > 0.1) for count in (2, 3, 5, 3, 4)]
    step, _ = train_beside_torch(small(), loss_fn, batches)
    assert step.execution.startswith("as one graph")
