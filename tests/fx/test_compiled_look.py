"""What is compared by compiled code is seen to change as Python would see it, and objects stay alive meanwhile."""

from __future__ import annotations

import gc
import logging
import sys
from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from amp_compiler.forward.same_objects import SameObjects
from amp_compiler.fx import compiled_look
from amp_compiler.fx.compiled_look import Look, address_test
from amp_compiler.ops.cpu import build


class Owner:
    def __init__(self) -> None:
        self.mode, self.table = True, {"a": object(), "b": object()}


@pytest.fixture(params=["compiled", "python"])
def way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(compiled_look, "_compiled", lambda: None)
    elif not compiled_look.available():
        pytest.skip("no C++ compiler on this machine")
    return request.param


def other_mode(owner):
    owner.mode = False


def other_value(owner):
    owner.table["b"] = object()


def one_more(owner):
    owner.table["c"] = object()


def one_less(owner):
    del owner.table["b"]


def other_order(owner):
    owner.table["a"] = owner.table.pop("a")


def other_name(owner):
    owner.table = {"a": owner.table["a"], "c": owner.table["b"]}


def other_attributes(owner):
    owner.__dict__ = {**vars(owner), "mode": False}


def an_attribute_gone(owner):
    del owner.mode


CHANGES = [
    other_mode, other_value, one_more, one_less, other_order, other_name, other_attributes, an_attribute_gone
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_tables_of_an_object_is_seen(way, change):
    for changed in range(3):
        owners, same = [Owner() for _ in range(3)], SameObjects(compiled=True)
        for one in owners:
            same.tables_of(one, ["table"], ["mode"])
        test = same.test()
        assert test()
        change(owners[changed])
        assert not test()


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda items: defaultdict(list, items)])
@pytest.mark.parametrize("change", [other_value, one_more, one_less, other_order])
def test_what_changes_in_a_table_is_seen(way, kind, change):
    owner = Owner()
    owner.table = kind(owner.table)
    for single in (True, False):
        same = SameObjects(compiled=True)
        if single:
            same.table(owner.table)
        else:
            same.values_of([{}, owner.table, {"x": 1}])
        test = same.test()
        assert test()
        before = dict(owner.table)
        change(owner)
        assert not test() or (change is other_order and not single)
        owner.table.clear()
        owner.table.update(before)


def test_an_ordered_table_whose_order_alone_changes_is_seen(way):
    table = OrderedDict(a=1, b=2)
    same = SameObjects(compiled=True)
    same.table(table)
    test = same.test()
    assert test()
    table.move_to_end("a")
    assert not test()


@pytest.mark.parametrize(
    "change",
    [lambda all_: all_.append(1), lambda all_: all_.pop(), lambda all_: all_.reverse(), lambda all_: all_.clear()],
)
def test_what_changes_in_a_list_is_seen(way, change):
    first, changed, last = [1, 2], [object(), object(), object()], []
    same = SameObjects(compiled=True)
    for values in (first, changed, last):
        same.items(values)
    test = same.test()
    assert test()
    change(changed)
    assert not test()


def test_what_lies_elsewhere_is_seen(way):
    tensors = [torch.zeros(3), nn.Parameter(torch.zeros(2, 2)), torch.zeros(0), torch.zeros(())]
    for tensor in (tensors[0], tensors[1], tensors[3]):
        test = address_test(tensors)
        assert test()
        tensor.data = torch.ones_like(tensor)
        assert not test()
    view = torch.zeros(4)[1:]
    test = address_test([view])
    view.set_(view.untyped_storage(), 2, (2,))
    assert not test()


def test_a_tensor_that_lies_nowhere_is_no_crash(way):
    tensor = torch.zeros(3)
    test = address_test([tensor])
    tensor.untyped_storage().resize_(0)
    assert not test()


def test_what_is_compared_lives_as_long_as_the_test_and_no_longer(way):
    table = {"key": object(), "tensor": torch.zeros(1)}
    counts = [sys.getrefcount(value) for value in table.values()]
    look = SameObjects(compiled=True)
    look.table(table)
    test = look.test()
    assert [sys.getrefcount(value) > count for value, count in zip(table.values(), counts, strict=True)] == [True, True]
    for _ in range(1000):
        assert test()
    held = [sys.getrefcount(value) for value in table.values()]
    test()
    assert held == [sys.getrefcount(value) for value in table.values()]
    del look, test
    gc.collect()  # the function stands in its own globals
    assert counts == [sys.getrefcount(value) for value in table.values()]


def test_the_code_is_there_wherever_there_is_a_compiler():
    if build.shutil.which("g++") is None:
        pytest.skip("no C++ compiler on this machine")
    assert compiled_look.available()


def test_without_a_compiler_python_looks_and_says_so_quietly(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
    with caplog.at_level(logging.INFO):
        assert compiled_look._compiled.__wrapped__() is None
    assert "looks at its tensors in Python" in caplog.text and {r.levelname for r in caplog.records} == {"INFO"}
    monkeypatch.setattr(compiled_look, "_compiled", lambda: None)
    with pytest.raises(RuntimeError, match="no compiled look"):
        Look().test()
