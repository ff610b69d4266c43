"""A plan as one SVG picture: a line for each node and cast in the order in which they run, and who reads whom.

That order is the layout, so the picture is made without a browser, the same bytes on every run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import PurePath

from rich.cells import cell_len, set_cell_size

from amp_compiler.errors import AmpError
from amp_compiler.ir.plan import RETURN, PrecisionPlan, many
from amp_compiler.report.html import part
from amp_compiler.report.names import for_people, type_of
from amp_compiler.report.page_data import precision_of
from amp_compiler.report.table import human_bytes

_ROW, _HEIGHT, _BADGE, _LANE, _MARGIN = 24, 18, 66, 7, 14
_LETTER = 7.3  # width of one of the monospaced font
_LONGEST = 60  # letters of a column that are shown
_COLOURS = [  # those of the page: four for a light ground, four for a dark one
    f".{kind} rect {{ fill: {fill}; stroke: {line}; }}\npath.{kind} {{ stroke: {line}; }}\n"
    for kind, line, fill in re.findall(r"--(low|fp32|keep|cast): (#\w+); --\1-fill: (#\w+);", part("page.css"))
]
_STYLE = f"""
text {{ font: 12px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1b2330; white-space: pre; }}
.type {{ text-anchor: middle; }}
path {{ fill: none; stroke-width: 1.5; }}
.keep rect {{ stroke-dasharray: 4 3; }}
{"".join(_COLOURS[:4])}@media (prefers-color-scheme: dark) {{
svg > rect {{ fill: #171e2a; }} text {{ fill: #e7ebf2; }}
{"".join(_COLOURS[4:])}}}
"""
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Key = tuple[str, int]  # a value: its name and -1, or what a cast makes of it: the name and the number of the cast


@dataclass(frozen=True)
class _Row:
    """A line. Its kind is `low`, `fp32`, `keep` or `cast`; the title is shown when the mouse rests on it."""

    kind: str
    columns: tuple[str, ...]
    title: str
    makes: dict[Key, str]
    reads: tuple[Key, ...] = ()
    node: str = ""


def plan_svg(plan: PrecisionPlan) -> str:
    """The text of the file that `to_svg` writes.

    Raises:
        AmpError: there is nothing to draw.
    """
    if not plan.nodes:
        raise AmpError("the plan has no nodes to draw", hint="plan.to_html(path) shows what there is")
    plan = for_people(plan, plan)
    rows = list(_rows(plan))
    wires, lanes = _wires(rows, plan.dtype)
    widths = [min(_LONGEST, max(map(cell_len, column))) for column in zip(*(row.columns for row in rows), strict=True)]
    left = _MARGIN + _LANE * (lanes + 2)
    width = round(left + _BADGE + _MARGIN * 2 + _LETTER * sum(letters + 2 for letters in widths))
    height = 2 * _MARGIN + len(rows) * _ROW
    lines = [
        '<?xml version="1.0" encoding="UTF-8"?>',
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>Precision plan: {_text(f'{plan.dtype}, rules {plan.rules}')}, {many(len(plan.nodes), 'node')}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<g transform="translate({left} {_MARGIN})">',
        *wires,
        *(_line(row, number * _ROW, widths) for number, row in enumerate(rows)),
        "</g>\n</svg>",
    ]
    return "\n".join(lines) + "\n"


def _rows(plan: PrecisionPlan) -> Iterator[_Row]:
    """Inputs, nodes, casts of what these make right before their first reader, and results."""
    known = {name for name, _ in plan.inputs} | {name for node in plan.nodes for name, _ in node.outputs}
    order = {node.name: place for place, node in enumerate(plan.nodes)}
    reads: dict[tuple[str, int], Key] = {}
    due: dict[str, list[_Row]] = {}
    stored: dict[str, int] = {}
    for number, cast in enumerate(plan.casts):
        users = dict.fromkeys(name for name, _ in cast.users)
        if cast.explicit or not users:
            continue
        if cast.src != cast.dst and cast.value not in known:
            stored.update({user: stored.get(user, 0) + cast.bytes for user in users})
            continue
        result = (cast.value, number if cast.src != cast.dst else -1)
        reads.update(dict.fromkeys(cast.users, result))
        if cast.src != cast.dst:
            words = f"{cast.src} → {cast.dst}, {human_bytes(cast.bytes)}"
            row = _Row("cast", ("cast", cast.value, "", words), str(cast), {result: cast.dst}, ((cast.value, -1),))
            due.setdefault(min(users, key=lambda name: order.get(name, len(order))), []).append(row)
    for name, dtype in plan.inputs:
        yield _Row(precision_of([dtype], plan.dtype), ("input", name, "", ""), "", {(name, -1): dtype})
    for node in plan.nodes:
        yield from due.get(node.name, ())
        weights = f"+ casts of weights, {human_bytes(stored[node.name])}" if node.name in stored else ""
        columns = (node.op.partition(".")[2] or node.op, node.name, node.module, weights)
        title = f"{node.name} = {node.op}\n{node.module}\n"
        title += f"{type_of(node.precision, plan.dtype)} by {PurePath(node.rule).name}: {node.reason}"
        inputs = tuple(reads.get((node.name, place), (value, -1)) for place, value in enumerate(node.inputs))
        makes = {(name, -1): dtype for name, dtype in node.outputs}
        yield _Row(node.precision, columns, title, makes, inputs, node.name)
    yield from due.get(RETURN, ())
    for place, name in enumerate(plan.outputs):
        yield _Row("keep", ("returned", name, "", ""), "", {}, (reads.get((RETURN, place), (name, -1)),))


def _wires(rows: list[_Row], low: str) -> tuple[list[str], int]:
    """From each value's maker to its readers, in the first lane that is free; and the number of lanes."""
    types = {key: (number, dtype) for number, row in enumerate(rows) for key, dtype in row.makes.items()}
    readers: dict[Key, dict[int, None]] = {key: {} for key in types}
    for number, row in enumerate(rows):
        for key in row.reads:
            readers.get(key, {})[number] = None
    wires: list[str] = []
    ends: list[int] = []  # of each lane, the row from which on it is free
    for key, (maker, dtype) in types.items():
        reading = readers[key]
        if not reading:
            continue
        if [*reading] == [maker + 1]:  # to the next line
            path = f"M14 {maker * _ROW + _HEIGHT}v{_ROW - _HEIGHT}m-3 -4l3 4l3 -4"
        else:
            lane = next((lane for lane, end in enumerate(ends) if end <= min(maker, *reading)), len(ends))
            ends[lane : lane + 1] = [max(maker, *reading)]
            x, out, inward = -_LANE * (lane + 2), maker * _ROW + 13, [reader * _ROW + 5 for reader in reading]
            path = f"M0 {out}H{x}M{x} {min(out, *inward)}V{max(out, *inward)}"
            path += "".join(f"M{x} {y}H0m-4 -3l4 3l-4 3" for y in inward)
        title = _text(f"{key[0]}: {dtype}")
        wires.append(f'<path class="{precision_of([dtype], low)}" d="{path}"><title>{title}</title></path>')
    return wires, len(ends)


def _line(row: _Row, y: int, widths: list[int]) -> str:
    words = "  ".join(map(set_cell_size, row.columns, widths)).rstrip()
    return (
        f'<g class="{_text(row.kind)}" data-node="{_text(row.node)}" transform="translate(0 {y})">'
        f'<title>{_text(row.title)}</title><rect width="{_BADGE}" height="{_HEIGHT}" rx="4"/>'
        f'<text class="type" x="{_BADGE // 2}" y="13">{_text(next(iter(row.makes.values()), ""))}</text>'
        f'<text xml:space="preserve" x="{_BADGE + _MARGIN}" y="13">{_text(words)}</text></g>'
    )


def _text(words: str) -> str:
    """Text and nothing else, without letters that XML has not."""
    return escape(_NO_XML.sub("\ufffd", words))
