"""`PrecisionGraph`: what it knows, and what it refuses."""

from __future__ import annotations

import pytest

from amp_compiler.errors import GraphError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, PrecisionGraph, Value, ValueKind


def small() -> PrecisionGraph:
    graph = PrecisionGraph("cuda")
    graph.add_value(Value("x", DType.FLOAT32, (2, "s0"), 6, ValueKind.INPUT))
    graph.add_node(Node("y", "aten.relu", (Operand("x", "self"),), ("y",)), [Value("y", DType.FLOAT32, (2, "s0"), 6)])
    twice = Node("z", "aten.add", (Operand("y", "self"), Operand("y", "other")), ("z",))
    graph.add_node(twice, [Value("z", DType.FLOAT16, None, 6)])
    graph.outputs = ["z", "x"]
    return graph


def test_values_know_their_size() -> None:
    graph = small()
    assert graph.values["y"].nbytes() == 24
    assert graph.values["y"].nbytes(DType.BFLOAT16) == 12
    assert (graph.values["x"].rank, graph.values["z"].rank) == (2, None)


def test_producers_users_and_operands() -> None:
    graph = small()
    assert graph.producer("x") is None
    result = graph.producer("z")
    assert result is not None and result.name == "z"
    assert [(node.name, index) for node, index in graph.users("y")] == [("z", 0), ("z", 1)]
    assert [value.name for _, value in graph.operands(result)] == ["y", "y"]
    graph.verify()


@pytest.mark.parametrize(
    ("node", "built", "says"),
    [
        (Node("y", "aten.relu", (), ("w",)), ["w"], "node name 'y' is taken"),
        (Node("w", "aten.relu", (), ("y",)), ["y"], "value name 'y' is taken"),
        (Node("w", "aten.relu", (), ("w",)), ["v"], "makes other values"),
        (Node("w", "aten.relu", (Operand("later", "self"),), ("w",)), ["w"], "reads 'later'"),
    ],
)
def test_nodes_that_do_not_fit_are_refused(node: Node, built: list[str], says: str) -> None:
    with pytest.raises(GraphError, match=says):
        small().add_node(node, [Value(name, DType.FLOAT32) for name in built])


def test_verify_names_what_is_wrong() -> None:
    graph = small()
    graph.outputs = ["nothing"]
    with pytest.raises(GraphError, match="returns 'nothing'"):
        graph.verify()
