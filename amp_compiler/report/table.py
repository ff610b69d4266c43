"""A plan as tables for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from amp_compiler.ir.plan import PlannedCast, PlannedNode, PrecisionPlan, many
from amp_compiler.report.names import for_people, type_of

_WIDE = 140  # characters of a line in which reasons have room
NODE_HEADS = ("node", "op", "module", "precision", "gives", "rule", "source", "reason")
CAST_HEADS = ("value", "from", "to", "bytes", "for", "by")


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


def summary_line(plan: PrecisionPlan) -> str:
    """The plan in one line: type, rules, device, nodes per precision, casts and their bytes."""
    counts = Counter(node.precision for node in plan.nodes)
    nodes = ", ".join(f"{counts[one]} {type_of(one, plan.dtype)}" for one in ("low", "fp32", "keep") if counts[one])
    own = sum(cast.explicit for cast in plan.casts)
    casts = many(plan.cast_count, "cast") + (f" ({own} the model's own)" if own else "")
    return (
        f"dtype {plan.dtype} · rules {plan.rules} · device {plan.device} · {many(len(plan.nodes), 'node')}"
        f"{f' ({nodes})' if nodes else ''} · {casts}, {human_bytes(plan.cast_bytes)} a forward"
    )


def node_cells(node: PlannedNode, low: str) -> tuple[str, ...]:
    """What tables say of a node, below `NODE_HEADS`.

    Args:
        node: of a plan.
        low: the 16-bit type of the plan.
    """
    precision = type_of(node.precision, low)
    if node.requested and node.requested != node.precision:
        precision += f" ({type_of(node.requested, low)})"
    return (
        node.name, node.op, node.module, precision, ", ".join(dtype for _, dtype in node.outputs),
        PurePath(node.rule).name, PurePath(node.source).name, node.reason,
    )  # fmt: skip


def cast_cells(cast: PlannedCast) -> tuple[str, ...]:
    """What tables say of a cast, below `CAST_HEADS`."""
    users = ", ".join(f"{name}[{index}]" for name, index in cast.users)
    return (
        cast.value, cast.src, cast.dst, human_bytes(cast.bytes), users, "the model" if cast.explicit else "the plan",
    )  # fmt: skip


def print_plan(plan: PrecisionPlan, console: Console | None = None) -> None:
    """Print the nodes, the casts and a summary; the reasons of nodes where a line is long enough for them.

    Args:
        plan: what to print.
        console: where to; the standard output by default.
    """
    console = console or Console()
    plan = for_people(plan, plan)
    heads = NODE_HEADS if console.width >= _WIDE else NODE_HEADS[:-1]
    console.print(_table("nodes", heads, (node_cells(node, plan.dtype)[: len(heads)] for node in plan.nodes)))
    if casts := [cast_cells(cast) for cast in plan.casts if cast.src != cast.dst]:
        console.print(_table("casts", CAST_HEADS, casts))
    for rule in plan.unused_rules:
        console.print(Text(f"unused rule {rule}", style="bold"))
    console.print(Text(summary_line(plan), style="bold"))


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=box.SIMPLE_HEAD,
                  padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    for name in heads:
        whole = name in ("op", "rule")
        table.add_column(name, overflow="fold", justify="right" if name == "bytes" else "left", no_wrap=whole)
    for row in rows:
        table.add_row(*map(Text, row))  # Text, not str: a name such as `x[0]` must not be read as markup
    return table
