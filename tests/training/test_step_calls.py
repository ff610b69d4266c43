"""What a training step is made of, called with and asked for by mistake: each is told by its own hint."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import classes, small

import amp_compiler as amp

BATCH = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])


def prepared(model=None, loss_fn=classes, **options):
    model = small() if model is None else model
    optimizer = torch.optim.SGD(
        nn.Linear(1, 1).parameters() if not isinstance(model, nn.Module) else model.parameters()
    )
    return amp.training_step(model, loss_fn, optimizer, **{"dtype": "bf16", "backend": "eager", **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"enabled": "no"}, "enabled='no'; pass True or False"),
        ({"enabled": None}, "enabled=None; pass True or False"),
        ({"loss_fn": None}, r"loss_fn is a NoneType.*loss_fn\(model, \*batch\)"),
        ({"model": lambda x: x}, "model is a function; pass an nn.Module"),
    ],
)
def test_what_no_step_is_made_of_is_refused_at_once(options, said):
    with pytest.raises(amp.AmpError, match=said):
        prepared(**options)


def test_a_batch_by_name_is_refused():
    with pytest.raises(amp.AmpError, match=r"was given 'x', 'y' by name; give them as one dict"):
        prepared()(x=BATCH[0], y=BATCH[1])


def test_a_loss_function_without_the_model_is_told_how_it_is_called():
    with pytest.raises(amp.AmpError, match=r"loss_fn is called as loss_fn\(model, \*batch\)"):
        prepared(loss_fn=F.cross_entropy)(*BATCH)


def test_inference_mode_around_a_step_is_refused_and_changes_nothing():
    step = prepared()
    before = copy.deepcopy(step.model.state_dict())
    with torch.inference_mode(), pytest.raises(amp.AmpError, match="inference_mode"):
        step(*BATCH)
    assert all(torch.equal(before[name], value) for name, value in step.model.state_dict().items())
    with torch.no_grad():
        step(*BATCH)
    assert not all(torch.equal(before[name], value) for name, value in step.model.state_dict().items())


@pytest.mark.parametrize("taken", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_step_is_neither_copied_nor_pickled(taken):
    with pytest.raises(amp.AmpError, match=r"copy\.deepcopy\(\(model, optimizer\)\)"):
        taken(prepared())


@pytest.mark.parametrize("state", [None, [], "scale"])
def test_a_state_that_is_no_dict_is_refused(state):
    with pytest.raises(amp.AmpError, match=r"the saved state of a step is a .*step\.state_dict"):
        prepared().load_state_dict(state)
