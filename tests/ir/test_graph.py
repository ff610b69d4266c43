"""`PrecisionGraph`: what it knows, and what it refuses."""

from dataclasses import replace

import pytest

from amp_compiler.errors import GraphError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, Pin, PrecisionGraph, Value, ValueKind


def small() -> PrecisionGraph:
    graph = PrecisionGraph("cuda")
    graph.add_value(Value("x", DType.FLOAT32, (2, "s0"), 6, ValueKind.INPUT))
    graph.add_node(Node("y", "aten.relu", (Operand("x", "self"),), ("y",)), [Value("y", DType.FLOAT32, (2, "s0"), 6)])
    twice = Node("z", "aten.add", (Operand("y", "self"), Operand("y", "other")), ("z",))
    graph.add_node(twice, [Value("z", DType.FLOAT16, None, 6)])
    graph.outputs = ["z", "x"]
    return graph


def test_ranks_producers_users_and_operands() -> None:
    graph = small()
    assert (graph.values["x"].rank, graph.values["z"].rank) == (2, None)
    assert graph.producer("x") is None
    result = graph.producer("z")
    assert result is not None and result.name == "z"
    assert [(node.name, index) for node, index in graph.users("y")] == [("z", 0), ("z", 1)]
    assert [value.name for _, value in graph.operands(result)] == ["y", "y"]
    graph.verify()


def chain(order: str, **reads: str) -> PrecisionGraph:
    """Nodes named by letters, each of which reads what `reads` says (`x`, the input, by default), in that order."""
    graph = PrecisionGraph()
    graph.add_value(Value("x", DType.FLOAT32, (), 1, ValueKind.INPUT))
    for name in sorted(order):
        graph.add_node(Node(name, "aten.relu", (), (name,)), [Value(name, DType.FLOAT32)])
    for name in order:
        inputs = tuple(Operand(value, "self") for value in reads.get(name, "x"))
        graph.nodes[name] = replace(graph.nodes.pop(name), inputs=inputs)
    return graph


@pytest.mark.parametrize(
    ("names", "reads", "says"),
    [
        ("adbc", {"d": "c", "c": "b", "b": "a"}, "node 'd' reads 'c'"),
        ("abcde", {"b": "ad", "c": "b", "d": "c", "e": "d"}, "node 'b' reads 'd'"),
        ("a", {"a": "a"}, "node 'a' reads 'a'"),
        ("ab", {"a": "q"}, "node 'a' reads 'q'"),
    ],
    ids=["a wrong order", "a circle", "itself", "nothing makes it"],
)
def test_verify_names_a_node_that_cannot_run_where_it_stands(names: str, reads: dict[str, str], says: str) -> None:
    chain("abcd", d="c", c="b", b="a").verify()
    with pytest.raises(GraphError, match=f"{says}, which nothing before it makes"):
        chain(names, **reads).verify()


def test_verify_names_what_was_made_by_a_node_that_is_gone() -> None:
    graph = chain("ab", b="a")
    del graph.nodes["a"]
    with pytest.raises(GraphError, match=r"node 'b' reads 'a', which nothing before it makes"):
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
    graph = small()
    graph.values["x"] = Value("x", DType.FLOAT32)
    with pytest.raises(GraphError, match="'x' is a result but lacks a producer"):
        graph.verify()
    graph = small()
    graph.values["y"] = Value("y", DType.FLOAT32, numel=-1)
    with pytest.raises(GraphError, match="-1 elements"):
        graph.verify()
    graph = small()
    graph.add_node(Node("p", "aten.relu", (), (), pin=Pin("fp23", "typo")), [])
    with pytest.raises(GraphError, match="unknown pin 'fp23'"):
        graph.verify()
