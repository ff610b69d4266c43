"""A plan as HTML that needs nothing beside it: a page, and short tables for the cell of a notebook."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from typing import Any

import jinja2

from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import LOW_TYPES
from amp_compiler.ir.plan import PrecisionPlan, many
from amp_compiler.ir.step_graph import StepGraph
from amp_compiler.report.names import for_people
from amp_compiler.report.page_data import PRECISIONS, page_data
from amp_compiler.report.table import CAST_HEADS, NODE_HEADS, cast_cells, human_bytes, node_cells, summary_line

PARTS = "page"  # the folder beside this file that the page is put together from
LIBRARIES = "libraries.min.js"
SCRIPTS = (
    "model.js", "text.js", "tree.js", "layout.js", "drawing.js", "histogram.js", "filters.js", "details.js",
    "tables.js", "page.js",
)  # fmt: skip
MOST_NODES, MOST_CASTS = 40, 20  # of a cell, which has some ten kilobytes whatever the plan
_UNSAFE = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}  # JSON may write any letter so


def plan_html(
    plan: PrecisionPlan,
    *,
    other: PrecisionPlan | None = None,
    names: tuple[str, str] = ("this", "other"),
    step: StepGraph | None = None,
    profile: Any = None,
) -> str:
    """The page that `to_html` writes, of the same arguments, as text; everything that comes from the model is escaped.

    Raises:
        AmpError: `other`, `step` or `profile` is none, or `names` are not two.
    """
    for name, value, kind in (("other", other, PrecisionPlan), ("step", step, StepGraph)):
        if value is not None and not isinstance(value, kind):
            raise AmpError(f"{name} is a {type(value).__name__}", hint=f"pass a {kind.__name__}")
    if not isinstance(names, (tuple, list)) or len(names) != 2 or not all(isinstance(one, str) for one in names):
        raise AmpError(f"names is {names!r}", hint='pass what the two plans are called: names=("before", "after")')
    plans = (plan,) if other is None else (plan, other)
    data = json.dumps(page_data(plans, names[: len(plans)], step, profile), ensure_ascii=False, separators=(",", ":"))
    return render(
        "page.html",
        totals=[(name, one, _shares(one)) for name, one in zip(names, plans, strict=False)],
        created=_created(),
        compared=other is not None,
        step=step,
        profile=profile,
        advice={dtype: profile.loss_scale(dtype) for dtype in LOW_TYPES} if profile is not None else {},
        precisions=PRECISIONS,
        style=part("page.css"),
        libraries=part(LIBRARIES),
        script="".join(map(part, SCRIPTS)),
        data=data.translate(_UNSAFE),
    )


def plan_cell(plan: PrecisionPlan) -> str:
    """The first nodes, the largest casts and a summary of all, as HTML; what comes from the model is escaped.

    Args:
        plan: any plan.
    """
    plan = for_people(plan, plan)
    nodes = [node_cells(node, plan.dtype) for node in plan.nodes]
    casts = [cast_cells(cast) for cast in sorted(plan.casts, key=lambda cast: -cast.bytes) if cast.src != cast.dst]
    return render(
        "cell.html", summary=summary_line(plan), nodes=nodes, casts=casts, most_nodes=MOST_NODES,
        most_casts=MOST_CASTS, node_heads=NODE_HEADS, cast_heads=CAST_HEADS,
    )  # fmt: skip


def _shares(plan: PrecisionPlan) -> dict[str, Counter[str]]:
    """By precision, the bytes that nodes make and their arithmetic, as far as all is known; else how many they are."""
    sums = {}
    products = ["fp8" if node.math.startswith("fp8") else node.precision for node in plan.nodes]
    for name, kinds in (("flops", products), ("bytes", [node.precision for node in plan.nodes])):
        counted = [(kind, getattr(node, name)) for kind, node in zip(kinds, plan.nodes, strict=True)]
        if all(number is not None for _, number in counted) and any(number for _, number in counted):
            sums[name] = Counter[str]()
            for precision, number in counted:
                sums[name][precision] += number
    return sums or {"nodes": Counter(node.precision for node in plan.nodes)}


def _created() -> str:
    """The day and the versions; the day of `SOURCE_DATE_EPOCH` where that is set, for two pages to be the same file."""
    seconds = os.environ.get("SOURCE_DATE_EPOCH") or str(int(time.time()))
    if not seconds.isdigit():
        raise AmpError(f"SOURCE_DATE_EPOCH is {seconds!r}", hint="set it to seconds since 1970, or not at all")
    day = datetime.fromtimestamp(int(seconds), UTC).date()
    return f"{day} · amp_compiler {version('amp_compiler')} · torch {version('torch')}"


def render(name: str, **values: Any) -> str:
    """A template of the folder with its values, which are escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(bytes=human_bytes, short=_short, share=_share, many=many)
    return environment.from_string(part(name)).render(**values)


def _short(text: str, most: int = 120) -> str:
    """Of a text from a model, which may be of any length."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _share(part: int, whole: int) -> str:
    """In percent; what is not all never reads as all, nor what is not nothing as nothing."""
    percent = 100 * part / max(whole, 1)
    if part in (0, whole) or 1 <= percent <= 99:
        return f"{percent:.0f} %"
    return f"{min(max(percent, 0.1), 99.9):.1f} %"


def part(name: str) -> str:
    """The text of a file that the page is put together from."""
    return resources.files("amp_compiler.report").joinpath(PARTS, name).read_text(encoding="utf-8")
