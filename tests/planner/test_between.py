"""`between`: low between low nodes, as TensorFlow's automatic mixed precision treats its inferred ops."""

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import amp_compiler as amp
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, PrecisionGraph, Value, ValueKind
from amp_compiler.planner.between import settle_between
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.rules import Context, Decision, OpTable, Precision, RuleSet

WORDS = {
    "allow": Precision.LOW,
    "deny": Precision.FP32,
    "infer": Precision.BETWEEN,
    "clear": Precision.FOLLOW,
    "none": Precision.KEEP,
}


def draft_of(kinds: list[str], edges: list[tuple[int, int]]) -> tuple[Draft, dict[str, Decision]]:
    """A graph of nodes that read each other, and what is asked of them."""
    graph = PrecisionGraph()
    graph.add_value(Value("x", DType.FLOAT32, kind=ValueKind.INPUT))
    for place, kind in enumerate(kinds):
        reads = [f"{kinds[source]}{source}" for source, reader in edges if reader == place] or ["x"]
        operands = tuple(Operand(name, f"in.{index}") for index, name in enumerate(reads))
        name = f"{kind}{place}"
        graph.add_node(Node(name, "aten.op", operands, (name,)), [Value(name, DType.FLOAT32)])
    rules = RuleSet("test", (), OpTable({}, {}))
    requested = {f"{kind}{place}": Decision(WORDS[kind], reason="asked") for place, kind in enumerate(kinds)}
    return Draft(graph, rules, Context(DType.FLOAT16)), requested


def low_in(kinds: list[str], edges: list[tuple[int, int]]) -> set[str]:
    return {name for name, why in settle_between(*draft_of(kinds, edges)).items() if not why}


def chain(text: str) -> set[str]:
    kinds = text.split()
    return low_in(kinds, [(place, place + 1) for place in range(len(kinds) - 1)])


@pytest.mark.parametrize(
    ("kinds", "low"),
    [
        ("allow infer allow", {"infer1"}),
        ("allow clear infer clear infer allow", {"infer2", "infer4"}),
        ("infer allow infer", set()),
        ("deny infer clear infer clear allow infer", set()),  # the example of TensorFlow's own comment
        ("deny clear allow infer allow", {"infer3"}),
        ("allow none infer allow", set()),
        ("none infer allow", set()),
        ("allow infer deny", set()),
    ],
)
def test_chains(kinds, low):
    assert chain(kinds) == low


def as_tensorflow_does(kinds: list[str], edges: list[tuple[int, int]]) -> set[str]:
    """Passes 1 to 3 of auto_mixed_precision.cc, by reachability."""
    whole = nx.DiGraph(edges)
    whole.add_nodes_from(range(len(kinds)))
    of = {word: {place for place, kind in enumerate(kinds) if kind == word} for word in WORDS}

    def reached(starts, inside, graph):
        """What paths from `starts` reach, all of whose further nodes are `inside`."""
        kept = graph.subgraph(inside | starts)
        result = set()
        for start in starts:
            walk = nx.DiGraph((one, other) for one, other in kept.edges if other in inside)
            result |= nx.descendants(walk, start) if start in walk else set()
        return result

    back = whole.reverse()
    wary = of["deny"] | of["infer"] | reached(of["deny"] | of["infer"], of["clear"], back)
    denied = of["deny"] | reached(of["deny"], wary, whole)
    inside = (of["clear"] | of["infer"]) - denied
    below = reached(of["allow"], inside, whole)
    return {f"infer{place}" for place in reached(of["allow"], below, back) & of["infer"]}


@st.composite
def graphs(draw):
    kinds = draw(st.lists(st.sampled_from(sorted(WORDS)), min_size=1, max_size=14))
    pairs = [(one, other) for other in range(len(kinds)) for one in range(other)]
    return kinds, draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []


@settings(max_examples=120, deadline=None, derandomize=True)
@given(graphs())
def test_any_graph_comes_out_as_by_the_algorithm_of_tensorflow(graph):
    assert low_in(*graph) == as_tensorflow_does(*graph)


class Gates(torch.nn.Module):
    """Two layers with a gate between them, whose last activation has no layer below it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.first(x)
        return torch.nn.functional.leaky_relu(
            self.second((1 - y) * torch.nn.functional.silu(torch.dropout(y, 0.0, False)))
        )


def test_a_gate_between_layers_runs_low_and_the_last_activation_does_not():
    plan = amp.explain(Gates(), (torch.randn(2, 8),), rules="tensorflow", dtype="fp16")
    result = {node.op: node.precision for node in plan.nodes}
    assert result.pop("aten.leaky_relu") == "fp32"
    assert set(result.values()) == {"low"}, result
    assert "between nodes that run low" in next(node.reason for node in plan.nodes if node.op == "aten.silu")
    assert "nothing below it runs low" in next(node.reason for node in plan.nodes if node.op == "aten.leaky_relu")
