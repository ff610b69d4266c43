"""A plan as short tables for the cell of a notebook: of any plan some ten kilobytes, with nothing beside them."""

from __future__ import annotations

from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.report.html import render
from amp_compiler.report.names import for_people
from amp_compiler.report.table import CAST_HEADS, NODE_HEADS, cast_cells, node_cells, summary_line

MOST_NODES, MOST_CASTS = 40, 20


def plan_cell(plan: PrecisionPlan) -> str:
    """The first nodes, the largest casts and a summary of all, as HTML; what comes from the model is escaped."""
    plan = for_people(plan, plan)
    nodes = [node_cells(node, plan.dtype) for node in plan.nodes]
    casts = [cast_cells(cast) for cast in sorted(plan.casts, key=lambda cast: -cast.bytes)]
    return render(
        "cell.html", summary=summary_line(plan), nodes=nodes, casts=casts, most_nodes=MOST_NODES,
        most_casts=MOST_CASTS, node_heads=NODE_HEADS, cast_heads=CAST_HEADS,
    )  # fmt: skip
