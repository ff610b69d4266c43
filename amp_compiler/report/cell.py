"""A plan as short tables for the cell of a notebook: of any plan some ten kilobytes, with nothing beside them."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.report.table import CAST_HEADS, cast_cells, short_place, summary_line

MOST_NODES, MOST_CASTS = 40, 20
MOST_LETTERS = 120  # of a text; what comes from a model may be of any length


def plan_cell(plan: PrecisionPlan) -> str:
    """The first nodes, the largest casts and a summary of all, as HTML; what comes from the model is escaped.

    Args:
        plan: any plan.
    """
    casts = sorted(plan.casts, key=lambda cast: -cast.bytes)[:MOST_CASTS]
    parts = [f"<p><b>{_text(summary_line(plan), 3 * MOST_LETTERS)}</b></p>"]
    nodes = [
        (
            node.name, node.op, node.module, node.precision, ", ".join(dtype for _, dtype in node.outputs),
            short_place(node.rule), node.reason,
        )
        for node in plan.nodes[:MOST_NODES]
    ]  # fmt: skip
    parts += _table(
        ("node", "op", "module", "precision", "gives", "rule", "reason"),
        nodes,
        f"the first {MOST_NODES} of {len(plan.nodes):,} nodes" if len(plan.nodes) > MOST_NODES else "nodes",
    )
    parts += _table(
        CAST_HEADS,
        map(cast_cells, casts),
        f"the largest {MOST_CASTS} of {len(plan.casts):,} casts" if len(plan.casts) > MOST_CASTS else "casts",
    )
    parts.append("<p><code>plan.to_html(path)</code> writes all of it, with the graph.</p>")
    return f"<div>{''.join(parts)}</div>"


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]], caption: str) -> list[str]:
    lines = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return []
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return [f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"]


def _text(text: str, most: int = MOST_LETTERS) -> str:
    return escape(text if len(text) <= most else text[: most - 1] + "…")
