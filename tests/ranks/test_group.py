"""A step under torch.distributed: refused where its ranks would part without a word."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import amp_compiler as amp

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed")


@pytest.fixture
def ranks():
    """The third of four ranks, of a group that sends nothing."""
    dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def make(**options):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return amp.training_step(
        model, lambda model, x: model(x).square().mean(), optimizer, dtype="bf16", backend="eager", **options
    )


def test_ranks_that_would_part_are_refused_with_what_to_pass(ranks):
    with pytest.raises(amp.AmpError, match=r"default process group has 4 ranks.*dist\.group\.WORLD.*new_group"):
        make()


def test_a_group_that_is_there_only_at_the_first_call_is_seen_too():
    step = make()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(amp.AmpError, match="2 ranks"):
            step(torch.ones(3, 4))
    finally:
        dist.destroy_process_group()


def test_a_rank_trains_by_itself_where_that_is_said(ranks):
    step = make(process_group=dist.new_group([2], use_local_synchronization=True))
    assert float(step(torch.ones(3, 4))) > float(step(torch.ones(3, 4)))


def test_groups_of_others_and_no_groups_are_refused(ranks):
    with pytest.raises(amp.AmpError, match="not in process_group"):
        make(process_group=dist.new_group([0]))
    for wrong, said in (
        ({"process_group": "world"}, "process_group is a str"),
        ({"process_group": dist.group.WORLD, "mesh": object()}, "two names of one thing"),
        ({"mesh": [0, 1]}, "mesh is a list"),
    ):
        with pytest.raises(amp.AmpError, match=said):
            make(**wrong)


def test_a_group_needs_torch_distributed():
    for name in ("process_group", "mesh"):
        with pytest.raises(amp.AmpError, match=f"{name}= .*init_process_group first"):
            make(**{name: object()})


def test_a_default_group_of_one_rank_is_one_process():
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        assert torch.isfinite(make()(torch.ones(3, 4)))
    finally:
        dist.destroy_process_group()
