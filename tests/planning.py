"""Helpers for tests of the planner: a small op table, drafts from graph text, and a plan carried out on its graph."""

from collections.abc import Mapping
from dataclasses import replace

from graph_reading import parse_graph

from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.graph import Node, Operand, Pin, PrecisionGraph, Value
from amp_compiler.ir.plan import RETURN, PlannedCast, PrecisionPlan
from amp_compiler.passes.plan.assign_precision import AssignPrecision
from amp_compiler.passes.plan.make_plan import plan_of
from amp_compiler.passes.plan.place_casts import PlaceCasts
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.rules import Context, Decision, OpInfo, OpTable, Precision, RuleSet

FP16, FP32 = DType.FLOAT16, DType.FLOAT32


def _info(name: str, family: str, **facts: object) -> OpInfo:
    return OpInfo(name, family, **facts)  # type: ignore[arg-type]


OPS = OpTable(
    {
        info.name: info
        for info in (
            _info("aten.linear", "matmul"),
            _info("aten.matmul", "matmul"),
            _info("aten.layer_norm", "normalization", keep=frozenset({"weight", "bias"})),
            _info("aten.softmax", "softmax"),
            _info("aten.gelu", "elementwise"),
            _info("aten.relu", "elementwise", exact=True),
            _info("aten.cat", "join", exact=True, keep=frozenset({"table"})),
            _info("aten.maximum", "elementwise", exact=True),
            _info("aten.view", "view", exact=True, moves="shape"),
            _info("aten.split", "view", exact=True, moves="shape"),
            _info("aten.add", "elementwise", promotes=True),
            _info("aten.mul", "elementwise", promotes=True),
            _info("aten.gt", "compare", any=frozenset({"self", "other"})),
            _info("aten.argmax", "compare", exact=True),
            _info("aten.to", "cast", exact=True, casts=True),
            _info("aten.ones", "creation"),
        )
    },
    {},
)
DEFAULT = {
    "aten.linear": Precision.LOW,
    "aten.matmul": Precision.LOW,
    "aten.layer_norm": Precision.FP32,
    "aten.softmax": Precision.FP32,
    "aten.add": Precision.WIDEST,
    "aten.mul": Precision.WIDEST,
    "aten.gt": Precision.KEEP,
    "aten.to": Precision.KEEP,
}
RULES = RuleSet("test", (), OPS)


def draft_of(
    graph: PrecisionGraph | str, decisions: Mapping[str, str] | None = None, low: DType = FP16, ops: OpTable = OPS
) -> Draft:
    """A draft with the decisions of `DEFAULT` by op (`follow` for others), and over them `decisions` by node."""
    if isinstance(graph, str):
        graph = parse_graph(graph)
    requested = {name: DEFAULT.get(node.op, Precision.FOLLOW) for name, node in graph.nodes.items()}
    requested.update({name: Precision(word) for name, word in (decisions or {}).items()})
    return Draft(
        graph,
        replace(RULES, ops=ops),
        Context(low, graph.device),
        decisions={name: Decision(precision, "test.yaml:1", "by test") for name, precision in requested.items()},
    )


def labels_of(graph: PrecisionGraph | str, decisions: Mapping[str, str] | None = None) -> dict[str, str]:
    """Labels after `assign_precision`."""
    return dict(AssignPrecision()(draft_of(graph, decisions)).subject.labels)


def finish(draft: Draft) -> Draft:
    """The draft after the two passes that follow `classify`."""
    return PlaceCasts()(AssignPrecision()(draft).subject).subject


def plan_text(graph: PrecisionGraph | str, decisions: Mapping[str, str] | None = None) -> PrecisionPlan:
    """The plan of a graph with hand-made decisions."""
    return plan_of(finish(draft_of(graph, decisions)))


def apply_plan(graph: PrecisionGraph, plan: PrecisionPlan) -> PrecisionGraph:
    """The graph with the plan carried out: values in their final types, casts as pinned nodes before their readers."""
    types = {name: dtype_from_short(short) for node in plan.nodes for name, short in node.outputs}
    result = PrecisionGraph(graph.device)
    for value in graph.values.values():
        if graph.producer(value.name) is None:
            result.add_value(value)
    waiting: dict[str, list[tuple[int, PlannedCast]]] = {}
    order = {name: index for index, name in enumerate((*graph.nodes, RETURN))}
    for number, cast in enumerate(plan.casts):
        if not cast.explicit:
            waiting.setdefault(min((user for user, _ in cast.users), key=order.__getitem__), []).append((number, cast))
    reads: dict[tuple[str, int], str] = {}
    for name in (*graph.nodes, RETURN):
        region = graph.nodes[name].region if name != RETURN else ""
        for number, cast in waiting.get(name, ()):
            value = cast.value if cast.src == cast.dst else _add_cast(result, cast, number, region)
            reads.update(((user, index), value) for user, index in cast.users)
        if name == RETURN:
            continue
        node = graph.nodes[name]
        inputs = tuple(
            replace(operand, value=reads.get((name, index), operand.value)) for index, operand in enumerate(node.inputs)
        )
        outputs = [replace(graph.values[out], dtype=types.get(out, graph.values[out].dtype)) for out in node.outputs]
        result.add_node(replace(node, inputs=inputs), outputs)
    result.outputs = [reads.get((RETURN, index), value) for index, value in enumerate(graph.outputs)]
    result.verify()
    return result


def _add_cast(graph: PrecisionGraph, cast: PlannedCast, number: int, region: str) -> str:
    source = graph.values[cast.value]
    name = f"cast_{number}"
    node = Node(
        name, "aten.to", (Operand(cast.value, "self"),), (name,), region=region, pin=Pin("cast", "placed by the plan")
    )
    graph.add_node(node, [Value(name, dtype_from_short(cast.dst), source.shape, source.numel)])
    return name
