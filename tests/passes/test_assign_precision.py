"""`assign_precision`: labels of decisions, and the reasons given; the optimum is tested beside this file."""

from __future__ import annotations

import pytest
from planning import draft_of, labels_of

from amp_compiler.passes.plan.assign_precision import AssignPrecision
from amp_compiler.planner.fixed_labels import resolve
from amp_compiler.planner.typing import Role


def chain(*ops: str) -> str:
    """Ops one after the other on x."""
    lines = ["graph cpu", "input x: fp32[4, 8]"]
    for index, op in enumerate(ops):
        lines.append(f"n{index} = aten.{op}(self={f'n{index - 1}' if index else 'x'}) -> fp32[4, 8]")
    return "\n".join([*lines, f"return n{len(ops) - 1}"])


def test_an_exact_op_without_a_float_result_reads_every_bit() -> None:
    graph = (
        "graph cpu\ninput x: fp32[8]\nn = aten.softmax(self=x) -> fp32[8]\ni = aten.argmax(self=n) -> i64[]\nreturn i\n"
    )
    assert labels_of(graph)["i"] == "fp32"


def test_a_low_source_is_semantically_low() -> None:
    graph = "graph cpu\ninput x: fp16[8]\ninput y: fp32[8]\na = aten.add(self=x, other=x) -> fp16[8]\n"
    graph += "b = aten.add(self=x, other=y) -> fp32[8]\nreturn a, b\n"
    assert labels_of(graph) == {"a": "low", "b": "fp32"}


def test_explicit_casts_stay_and_tell_the_type() -> None:
    graph = """graph cpu
input x: fp32[8]
h = aten.linear(input=x) -> fp32[8]
f = aten.to(self=h) -> fp32[8]  pin=cast "float()"
a = aten.add(self=f, other=h) -> fp32[8]
return a
"""
    draft = AssignPrecision()(draft_of(graph)).subject
    assert dict(draft.labels) == {"h": "low", "f": "keep", "a": "fp32"}
    assert draft.notes["a"] == "'f' is fp32"


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


@pytest.mark.parametrize(
    ("maker", "asked", "expected"),
    [("linear", {}, ["low", "low"]), ("softmax", {}, ["fp32", "keep"]), ("linear", {"b": "fp32"}, ["keep", "fp32"])],
)
def test_memory_changed_in_place_has_one_type(maker: str, asked: dict[str, str], expected: list[str]) -> None:
    graph = f"""graph cpu
input x: fp32[8]
a = aten.{maker}(input=x) -> fp32[8] volatile
b = aten.relu(self=a) -> fp32[8] volatile
return b
"""
    assert list(labels_of(graph, asked).values()) == expected


def test_followers_of_volatile_values_are_not_free() -> None:
    graph = """graph cpu
input x: fp32[8] volatile
r = aten.relu(self=x) -> fp32[8]
y = aten.linear(input=r) -> fp32[8]
return y
"""
    draft = draft_of(graph)
    assert resolve(draft, draft.typing).free == []
    assert labels_of(graph)["r"] == "keep"


def test_a_deep_graph_needs_no_recursion() -> None:
    labels = labels_of(chain("linear", *["gelu", "view"] * 3000, "softmax"))
    assert list(labels.values()).count("low") == 6001
