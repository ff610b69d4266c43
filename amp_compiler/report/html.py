"""A plan as one HTML file that needs nothing beside it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.report.drawing import draw_plan
from amp_compiler.report.table import human_bytes, short_place

PRECISIONS = ("low", "fp32", "keep")
TEMPLATE = "plan.html"  # a file beside this one


@dataclass(frozen=True)
class FamilyRow:
    """How many nodes of one op family run in each precision.

    Args:
        name: the family.
        counts: number of nodes by precision.
        total: number of nodes.
    """

    name: str
    counts: dict[str, int]
    total: int


def plan_html(plan: PrecisionPlan) -> str:
    """The plan as the text of a self-contained HTML page; everything that comes from the model is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["bytes"] = human_bytes
    environment.filters["place"] = short_place
    template = resources.files("amp_compiler.report").joinpath(TEMPLATE).read_text(encoding="utf-8")
    counts = Counter(node.precision for node in plan.nodes)
    return environment.from_string(template).render(
        plan=plan,
        drawing=draw_plan(plan),
        precisions=PRECISIONS,
        counts={precision: counts[precision] for precision in PRECISIONS},
        low_share=round(100 * counts["low"] / max(1, len(plan.nodes))),
        families=_families(plan),
        own_casts=sum(cast.explicit for cast in plan.casts),
        largest_cast=max((cast.bytes for cast in plan.casts), default=0) or 1,
    )


def write_plan_html(plan: PrecisionPlan, path: str | Path) -> None:
    """Write `plan_html` to a file, atomically.

    Raises:
        AmpError: where the file cannot be written.
    """
    write_atomically(path, plan_html(plan))


def _families(plan: PrecisionPlan) -> list[FamilyRow]:
    counts: dict[str, Counter[str]] = {}
    for node in plan.nodes:
        counts.setdefault(node.family or "unknown", Counter())[node.precision] += 1
    rows = [FamilyRow(name, {p: count[p] for p in PRECISIONS}, count.total()) for name, count in counts.items()]
    return sorted(rows, key=lambda row: (-row.total, row.name))
