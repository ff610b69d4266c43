"""What the page of a plan shows, as plain data: one block of JSON, from which the browser draws."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import LOW_TYPES
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.ir.ranges import RANGES
from amp_compiler.ir.step_graph import StepGraph, StepNode
from amp_compiler.report.names import for_people

PRECISIONS = ("low", "fp32", "keep")
_UNPLANNED = PlannedNode("", "", "", "", "", "", "")


def page_data(
    plans: Sequence[PrecisionPlan], names: Sequence[str], step: StepGraph | None = None, profile: Any = None
) -> dict[str, Any]:
    """The data of a page.

    Args:
        plans: one, or two to compare.
        names: what each is called.
        step: the whole step whose forward the first plan is for.
        profile: what `amp.profile` found.

    Returns:
        What `json.dumps` takes. Nodes and casts have the fields of a plan's, in columns as `_columns` makes them;
        `page/model.js` reads them back.
    """
    shown = [for_people(plan, plan) for plan in plans]
    graphs: list[dict[str, Any]] = [
        {"key": "forward", "sides": [_graph(map(_fields, one.nodes), one) for one in shown]}
    ]
    places = [node.source for plan in plans for node in plan.nodes]
    if step is not None:
        planned, whole = {node.name: node for node in shown[0].nodes}, for_people(step, plans[0])
        nodes = (_of_step(node, planned.get(node.planned, _UNPLANNED), plans[0].dtype) for node in whole.nodes)
        graphs.append({"key": "step", "sides": [{**_graph(nodes, whole), "stored": whole.stored}]})
        places += [node.source for node in step.nodes]
    return {
        "plans": [{"name": name, "type": plan.dtype} for name, plan in zip(names, plans, strict=True)],
        "graphs": graphs,
        "code": {place: line for place in dict.fromkeys(places) if (line := line_of(place))},
        "profile": None if profile is None else _of_profile(profile),
        "ranges": {name: RANGES[name].exponents for name in LOW_TYPES},
    }


def line_of(place: str) -> str:
    """The line of code at `file:line`, without its indent; empty where the file cannot be read here."""
    file, _, number = place.rpartition(":")
    if not file or not number.isdigit():
        return ""
    return linecache.getline(file, int(number)).strip()


def precision_of(types: Sequence[str], low: str) -> str:
    """By what a node makes: `low` where anything is of the low type."""
    return "low" if low in types else "fp32" if "fp32" in types else "keep"


def _graph(nodes: Iterable[Mapping[str, Any]], graph: PrecisionPlan | StepGraph) -> dict[str, Any]:
    casts = _columns(map(_fields, graph.casts))
    return {"nodes": _columns(nodes), "casts": casts, "inputs": graph.inputs, "outputs": graph.outputs}


def _fields(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows by field: the values that occur, each once, and which of them each row has."""
    held = list(rows)
    columns = {}
    for name in held[0] if held else ():
        numbers = {value: number for number, value in enumerate(dict.fromkeys(row[name] for row in held))}
        columns[name] = [list(numbers), [numbers[row[name]] for row in held]]
    return columns


def _of_step(node: StepNode, planned: PlannedNode, low: str) -> dict[str, Any]:
    """A node of the step, with rule and reason of the node of the plan that it was made for."""
    precision = precision_of([dtype for _, dtype in node.outputs], low)
    row = PlannedNode(
        node.name, node.op, "", node.module or planned.module, precision, planned.rule, planned.reason,
        planned.requested, node.source or planned.source, node.outputs, inputs=node.inputs,
    )  # fmt: skip
    return {**_fields(row), "phase": node.phase, "planned": planned.name}


def _of_profile(profile: Any) -> list[dict[str, Any]]:
    """The histograms, with what becomes of the numbers in each type, and of the updates of a weight.

    Raises:
        AmpError: it is none.
    """
    try:
        updates = {row.name: row for row in profile.updates if row.changed}
        return [
            {
                **{name: data[name] for name in ("name", "kind", "op", "module", "planned", "dtype", "stored")},
                "exponents": data["exponents"] if data["exponents"] != data["stored"] else None,
                "fractions": {dtype: list(astuple(row.stored.fractions(dtype))) for dtype in LOW_TYPES},
                "updates": {dtype: updates[row.name].fraction_lost(dtype) for dtype in LOW_TYPES}
                if row.kind == "weight" and row.name in updates
                else None,
            }
            for row, data in zip(profile.rows, profile.to_dict()["rows"], strict=True)
        ]
    except AttributeError as cause:
        raise AmpError(f"profile is a {type(profile).__name__}", hint="pass what amp.profile gave") from cause
