"""`assign_precision`: labels of decisions, and the reasons given; the optimum is tested beside this file."""

from __future__ import annotations

from planning import draft_of, labels_of

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
