"""`assign_precision` and `place_casts`: what the golden files do not say; the optimum is tested beside this file."""

from dataclasses import replace

import pytest
from planning import draft_of, finish, labels_of

from amp_compiler.errors import PassError
from amp_compiler.passes.plan.assign_precision import AssignPrecision
from amp_compiler.passes.plan.place_casts import PlaceCasts
from amp_compiler.planner.typing import Role


def test_roles_of_operands() -> None:
    graph = """graph cpu
input x: fp32[8]
input i: i64[8]
input s: fp32[]
n = aten.layer_norm(input=x, weight=x, bias=i) -> fp32[8]
c = aten.gt(self=x, other=s) -> bool[8]
m = aten.mul(self=i, other=s) -> fp32[8]
k = aten.cat(tensors.0=x, table.1=x) -> fp32[8]
o = aten.cat(tensors.0=x:fp32|bf16) -> fp32[8]
return
"""
    typing = draft_of(graph).typing
    roles = {name: typing[name].roles for name in "ncmko"}
    assert roles == {
        "n": (Role.DATA, Role.FIXED, Role.OTHER),
        "c": (Role.ANY, Role.ANY),
        "m": (Role.OTHER, Role.DATA),  # no float operand of a rank: the scalar decides
        "k": (Role.DATA, Role.FIXED),
        "o": (Role.FIXED,),
    }


def test_a_deep_graph_needs_no_recursion() -> None:
    ops, text = ["linear", *["gelu", "view"] * 3000, "softmax"], "graph cpu\ninput n0: fp32[4, 8]\n"
    text += "".join(f"n{place} = aten.{op}(self=n{place - 1}) -> fp32[4, 8]\n" for place, op in enumerate(ops, 1))
    labels = labels_of(f"{text}return n{len(ops)}")
    assert list(labels.values()).count("low") == 6001


GRAPH = """graph cpu
input x: fp32[2, 8]
param w: fp32[8, 8]
a = aten.linear(input=x, weight=w) -> fp32[2, 8]
v = aten.view(self=a) -> fp32[2, 8]
n = aten.layer_norm(input=v) -> fp32[2, 8]
f = aten.to(self=n) -> fp16[2, 8]  pin=cast "half()"
return n, f, n
"""


def test_running_again_changes_nothing() -> None:
    draft = finish(draft_of(GRAPH))
    assert not AssignPrecision()(draft).modified
    again = PlaceCasts()(draft)
    assert not again.modified
    assert again.subject is draft


def test_new_labels_drop_old_casts() -> None:
    draft = finish(draft_of(GRAPH))
    other = replace(draft, decisions=draft_of(GRAPH, {"a": "fp32"}).decisions)
    assert AssignPrecision()(other).subject.casts is None


def test_labels_are_required() -> None:
    with pytest.raises(PassError, match="before pass 'place_casts': node 'a' has no label"):
        PlaceCasts()(draft_of(GRAPH))
    with pytest.raises(PassError, match="before pass 'assign_precision': node 'a' has no decision"):
        AssignPrecision()(replace(draft_of(GRAPH), decisions={}))


def test_a_missing_cast_is_noticed() -> None:
    draft = finish(draft_of(GRAPH))
    assert draft.casts is not None
    wrong = PlaceCasts().ensures(replace(draft, casts=draft.casts[1:]), None)
    assert wrong == "node 'a' (low) reads operand 0 in fp32, not in fp16"
    lost = PlaceCasts().ensures(replace(draft, labels={**draft.labels, "n": "low"}, casts=draft.casts[:2]), None)
    assert lost == "output 0 is returned in fp16, not in fp32"


def test_a_down_up_pair_is_noticed() -> None:
    graph = (
        "graph cpu\ninput x: fp32[4]\nv = aten.view(self=x) -> fp32[4]\ns = aten.softmax(self=v) -> fp32[4]\nreturn s\n"
    )
    draft = AssignPrecision()(draft_of(graph)).subject
    assert draft.labels["v"] == "fp32"
    with pytest.raises(PassError, match="'v' is rounded to fp16 and read in a wider type"):
        PlaceCasts()(replace(draft, labels={**draft.labels, "v": "low"}))
