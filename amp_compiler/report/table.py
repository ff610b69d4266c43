"""A plan as tables for the terminal."""

from __future__ import annotations

import io
import itertools
from collections import Counter
from pathlib import PurePath

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan
from amp_compiler.report.names import for_people, type_of

WIDE = 140
CAST_HEADS = ("value", "from", "to", "bytes", "for", "by")
PRECISION_STYLES = {"low": "bold green", "fp32": "bold yellow", "keep": "dim"}


def human_bytes(count: float) -> str:
    """A number of bytes for people, in powers of 1024.

    Example:
        >>> human_bytes(532), human_bytes(3 * 1024**2)
        ('532 B', '3.0 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def short_place(place: str) -> str:
    """The `file:line` of a longer path, the folders left out.

    Example:
        >>> short_place("/home/me/project/model.py:12")
        'model.py:12'
    """
    return PurePath(place).name


def summary_line(plan: PrecisionPlan) -> str:
    """The plan in one line: type, rules, device, nodes per precision, casts and their bytes."""
    counts = Counter(node.precision for node in plan.nodes)
    nodes = ", ".join(f"{counts[one]} {type_of(one, plan.dtype)}" for one in PRECISION_STYLES if counts[one])
    own = sum(cast.explicit for cast in plan.casts)
    casts = f"{len(plan.casts)} casts" + (f" ({own} the model's own)" if own else "")
    return (
        f"dtype {plan.dtype} · rules {plan.rules} · device {plan.device} · {len(plan.nodes)} nodes"
        f"{f' ({nodes})' if nodes else ''} · {casts} move {human_bytes(plan.cast_bytes)} a forward"
    )


def cast_cells(cast: PlannedCast) -> tuple[str, ...]:
    """What tables say of a cast, below `CAST_HEADS`."""
    users = ", ".join(f"{name}[{index}]" for name, index in cast.users)
    return (
        cast.value, cast.src, cast.dst, human_bytes(cast.bytes), users, "the model" if cast.explicit else "the plan",
    )  # fmt: skip


def plan_tables(plan: PrecisionPlan, width: int = WIDE) -> RenderableType:
    """The plan as rich renderables: the nodes, the reasons where they have a table of their own, the casts, a summary.

    Args:
        plan: what to show.
        width: characters in a line. From `WIDE` on, each node has its reason beside it; below, the reasons stand in a
            table of their own, one a rule.
    """
    plan = for_people(plan, plan)
    parts: list[RenderableType] = [_node_table(plan, with_reason=width >= WIDE)]
    if width < WIDE:
        parts.append(_reason_table(plan.nodes))
    if plan.casts:
        parts.append(_cast_table(plan.casts))
    parts.append(Text(summary_line(plan), style="bold"))
    return Group(*parts)


def print_plan(plan: PrecisionPlan, console: Console | None = None) -> None:
    """Print the plan's tables.

    Args:
        plan: what to print.
        console: where to; the standard output by default.
    """
    console = console or Console()
    console.print(plan_tables(plan, console.width))


def plan_text(plan: PrecisionPlan, width: int = 200) -> str:
    """The plan's tables as plain text, for a file."""
    text = io.StringIO()
    print_plan(plan, Console(file=text, width=width, color_system=None))
    return text.getvalue()


def _node_table(plan: PrecisionPlan, with_reason: bool) -> Table:
    table = _table("nodes")
    for name in ("node", "op", "precision", "gives", "rule", *(["reason"] if with_reason else []), "source"):
        table.add_column(name, overflow="fold", no_wrap=name in ("gives", "rule"))
    for module, group in itertools.groupby(plan.nodes, key=lambda node: node.module):
        # Text, not str: a name such as `x[0]` must not be read as markup.
        table.add_row(Text(module or "(root)", style="bold cyan"))
        for node in group:
            table.add_row(
                Text(f"  {node.name}"),
                Text(node.op),
                _precision_text(node, plan.dtype),
                Text(", ".join(dtype for _, dtype in node.outputs)),
                Text(short_place(node.rule)),
                *([Text(node.reason)] if with_reason else []),
                Text(short_place(node.source), style="dim"),
            )
    return table


def _reason_table(nodes: tuple[PlannedNode, ...]) -> Table:
    table = _table("reasons")
    for name in ("rule", "nodes", "reason"):
        table.add_column(name, overflow="fold", justify="right" if name == "nodes" else "left")
    # What follows the semicolon is about one node.
    reasons = Counter((short_place(node.rule), node.reason.partition("; ")[0]) for node in nodes)
    for (rule, reason), count in reasons.items():
        table.add_row(Text(rule), str(count), Text(reason))
    return table


def _precision_text(node: PlannedNode, low: str) -> Text:
    text = Text(type_of(node.precision, low), style=PRECISION_STYLES.get(node.precision, ""))
    if node.requested and node.requested != node.precision:
        text.append(f" ({type_of(node.requested, low)})", style="dim")
    return text


def _cast_table(casts: tuple[PlannedCast, ...]) -> Table:
    table = _table("casts")
    for name in CAST_HEADS:
        table.add_column(
            name,
            overflow="fold" if name in ("value", "for") else "ellipsis",
            justify="right" if name == "bytes" else "left",
        )
    for cast in casts:
        table.add_row(*map(Text, cast_cells(cast)))
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
