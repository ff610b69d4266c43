"""A plan as one SVG picture, for a page of documentation: made without a browser, the same bytes on every run."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.report.drawing import Box, Bracket, Drawing, Wire, draw_plan

# As in page/page.css: blue, orange and grey, which the colour-blind tell apart, with a pattern each for grey print.
COLOURS = {
    "low": ("#0b63a8", "#d8e9f7"),
    "fp32": ("#9a5200", "#fde6c4"),
    "keep": ("#6a7382", "#eceff3"),
    "cast": ("#a3126f", "#fbe3f2"),
}
_STYLE = """
text { font: 12px Helvetica, Arial, "Liberation Sans", sans-serif; fill: #1b2330; text-anchor: middle; }
.bracket text, .words { text-anchor: start; fill: #5b6678; }
.bracket rect { fill: #dbe1ea; }
path { fill: none; stroke-width: 1.5; }
.keep rect { stroke-dasharray: 4 3; }
.far rect { stroke-dasharray: 2 3; }
.stored text { font-size: 10px; fill: #ffffff; }
.stored circle { fill: #a3126f; }
"""
_HEIGHT, _STRIP, _WORDS = 26, 7, 28  # of a box, of the strip in it, and of the line of words below the drawing
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def plan_svg(plan: PrecisionPlan) -> str:
    """The plan as the text of an SVG file.

    Args:
        plan: any plan that says which node reads which. Of a large one the largest casts are drawn, and the picture
            says so.

    Raises:
        AmpError: there is nothing to draw.
    """
    drawing = draw_plan(plan)
    if not drawing.boxes:
        raise AmpError(drawing.words or "the plan has no nodes to draw", mend="plan.to_html(path) shows what there is")
    height = drawing.height + (_WORDS if drawing.words else 0)
    svg = ET.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "width": str(drawing.width),
            "height": str(height),
            "viewBox": f"0 0 {drawing.width} {height}",
            "role": "img",
        },
    )
    _add(svg, "title", text=f"Precision plan: {plan.dtype}, rules {plan.rules}, {len(plan.nodes):,} nodes")
    _add(svg, "style", text=_STYLE + "".join(map(_rule, COLOURS)))
    _hatch(svg)
    _add(svg, "rect", width=drawing.width, height=height, fill="#ffffff")
    _draw(svg, drawing)
    if drawing.words:
        _add(svg, "text", {"class": "words"}, drawing.words, x=16, y=drawing.height + 12)
    ET.indent(svg, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(svg, encoding="unicode") + "\n"


def write_plan_svg(plan: PrecisionPlan, path: str | Path) -> None:
    """Write `plan_svg` to a file, atomically.

    Raises:
        AmpError: there is nothing to draw, or the file cannot be written.
    """
    write_atomically(path, plan_svg(plan))


def _rule(kind: str) -> str:
    line, fill = COLOURS[kind]
    return f".{kind} > rect {{ fill: {fill}; stroke: {line}; }}\npath.{kind} {{ stroke: {line}; }}\n"


def _hatch(svg: ET.Element) -> None:
    line, fill = COLOURS["fp32"]
    pattern = _add(
        _add(svg, "defs"), "pattern", id="hatch", width=5, height=5, patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )  # fmt: skip
    _add(pattern, "rect", width=5, height=5, fill=fill)
    _add(pattern, "rect", width=2.4, height=5, fill=line)


def _draw(svg: ET.Element, drawing: Drawing) -> None:
    for bracket in drawing.brackets:
        _bracket(svg, bracket)
    for wire in drawing.wires:
        _wire(svg, wire)
    for box in drawing.boxes:
        _box(svg, box)


def _bracket(svg: ET.Element, bracket: Bracket) -> None:
    group = _add(svg, "g", {"class": "bracket"})
    _add(group, "title", text=bracket.name)
    _add(group, "rect", x=16, y=bracket.y, width=3, height=bracket.height, rx=1.5)
    _add(group, "text", text=bracket.label, x=26, y=bracket.y + 17)


def _wire(svg: ET.Element, wire: Wire) -> None:
    _add(_add(svg, "path", {"class": wire.precision}, d=wire.path), "title", text=wire.title)


def _box(svg: ET.Element, box: Box) -> None:
    kind = "cast" if box.kind == "cast" else box.precision
    marks = {"data-name": box.name} if box.kind == "node" else {}
    classes = f"{box.kind} {kind}" if box.kind != kind else kind
    group = _add(svg, "g", {"class": classes, **marks}, transform=f"translate({box.x} {box.y})")
    _add(group, "title", text=box.title)
    _add(group, "rect", width=box.width, height=_HEIGHT, rx=6 if box.kind == "node" else 13)
    left = 0
    if box.kind == "node" and kind != "keep":
        left = _STRIP
        fill = COLOURS["low"][0] if kind == "low" else "url(#hatch)"
        edge = f"M6 0h{left - 3}v{_HEIGHT}h-{left - 3}a6 6 0 0 1 -6 -6v-{_HEIGHT - 12}a6 6 0 0 1 6 -6z"
        _add(group, "path", d=edge, style=f"fill: {fill}; stroke: none")
    room = box.width - left - (22 if box.stored else 0)
    _add(group, "text", text=box.label, x=left + room / 2, y=17)
    if box.stored:
        stored = _add(group, "g", {"class": "stored"})
        _add(stored, "title", text=box.stored)
        _add(stored, "circle", cx=box.width - 15, cy=13, r=8)
        _add(stored, "text", text=str(box.stored_count), x=box.width - 15, y=16.5)


def _add(
    parent: ET.Element, tag: str, given: dict[str, str] | None = None, text: str = "", **attributes: object
) -> ET.Element:
    """A child with attributes and a text, which holds no letter that XML has not."""
    all_of_them = {name: str(value) for name, value in attributes.items()} | (given or {})
    child = ET.SubElement(parent, tag, {name: _NO_XML.sub("\ufffd", value) for name, value in all_of_them.items()})
    child.text = _NO_XML.sub("\ufffd", text) or None
    return child
