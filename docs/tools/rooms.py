"""Draws the rooms of the code and who imports whom, from the imports themselves: docs/pictures/rooms.svg.

Where a box stands is said here (`PLACES`); what is in it and its arrows are measured. Arrows that follow from others
are left out: training imports forward, forward imports passes, so no arrow leads from training to passes.
"""

from __future__ import annotations

import ast
import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import networkx
from svg import FAINT, GROUND, Box, Picture

ROOT = Path(__file__).parents[2]
COLOURS = {"none": "#e3f1e4", "torch": "#dfeaf8", "onnx": "#fbe8d3"}
MEANINGS = {"none": "imports neither torch nor ONNX itself", "torch": "imports torch", "onnx": "imports torch and ONNX"}
ONNX = {"onnx", "onnx_ir", "onnxruntime", "onnxscript"}
HIDDEN = {"__main__", "rules"}  # a way in, and data
EVERYBODY = "errors"  # imported by every room, so without arrows
TITLES = {"": "amp_compiler", "errors": "errors.py"}
ABOUT = {
    "": "The public API: `import amp_compiler as amp`.",
    "errors": "Every error is an `AmpError`: what, where, and the hint. Every room imports it.",
    "passes": "Every rewrite of a graph is a pass, and stands in one of these lists; each folder is one stage.",
}

# room: row, left and right edge in pixels
LEFT, MIDDLE, RIGHT = 150, 560, 960
PLACES = {
    "": (0, LEFT, 380),
    "cli": (0, 410, 580),
    "integrations": (0, 610, RIGHT),
    "diagnose": (1, LEFT, MIDDLE - 15),
    "training": (1, MIDDLE + 15, RIGHT),
    "forward": (2, LEFT, MIDDLE - 15),
    "ranks": (2, MIDDLE + 15, RIGHT),
    "backends": (3, LEFT, MIDDLE - 15),
    "onnx": (3, MIDDLE + 15, RIGHT),
    "passes": (4, LEFT, RIGHT),
    "planner": (5, LEFT, MIDDLE - 15),
    "fx": (5, MIDDLE + 15, RIGHT),
    "policy": (6, LEFT, MIDDLE - 15),
    "ops": (6, MIDDLE + 15, RIGHT),
    "ir": (7, LEFT, MIDDLE - 15),
    "report": (7, MIDDLE + 15, RIGHT),
    "errors": (8, LEFT, RIGHT),
}
BANDS = ("what you call", "what you call", "what you call", "what runs, and ONNX in and out", "what rewrites",
         "what decides, and what graphs are made of", "", "what all speak of", "")  # fmt: skip
TOP, GAP = 78, 26
HEIGHTS = (76, 62, 62, 62, 160, 62, 62, 62, 46)
ORDER = ("capture", "onnx_plan", "plan", "precision", "step", "device", "onnx_export", "diagnose")  # the way of a graph


@dataclass(frozen=True)
class Room:
    """One room as it was found.

    Args:
        kind: `none`, `torch` or `onnx`: which library it imports.
        about: the first sentence of its docstring.
        folders: what of it stands in folders of its own, by name, as rooms too.
    """

    kind: str
    about: str
    folders: dict[str, Room]


def measure() -> tuple[dict[str, Room], networkx.DiGraph]:
    """The rooms, and who imports whom without what follows from other arrows."""
    table = runpy.run_path(str(ROOT / "tests" / "test_imports.py"))
    graph: networkx.DiGraph = networkx.DiGraph()
    files: dict[str, list[tuple[str, Path]]] = {}
    for name, path in table["ALL"]:
        here = table["room"](name)
        files.setdefault(here, []).append((name, path))
        # what the package offers it imports when it is asked for, and names for type checkers alone
        for imported in table["imports"](path) if name else every_import(path):
            other = table["own"](imported)
            if other is not None and table["room"](other) != here:
                graph.add_edge(here, table["room"](other))
    graph.remove_nodes_from([name for name in (*HIDDEN, EVERYBODY) if name in graph])
    rooms = {name: room_of(name, members, table["imports"]) for name, members in files.items() if name not in HIDDEN}
    missing = sorted(rooms.keys() - PLACES.keys())
    if missing:
        raise SystemExit(f"no place for {', '.join(missing)}: say in PLACES of {Path(__file__).name} where to draw it")
    return rooms, networkx.transitive_reduction(graph)


def every_import(path: Path) -> list[str]:
    """What a file imports from modules, those for type checking included."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]


def room_of(name: str, files: list[tuple[str, Path]], imports: Callable[[Path], set[str]]) -> Room:
    """What the files of a room, or of a folder in it, say of themselves."""
    libraries = {one.partition(".")[0] for _, path in files for one in imports(path)}
    own = next((path for module, path in files if module == name), None)
    inner: dict[str, list[tuple[str, Path]]] = {}
    for module, path in files:
        rest = module.removeprefix(name).removeprefix(".")
        if "." in rest or (rest and path.name == "__init__.py"):
            inner.setdefault(rest.partition(".")[0], []).append((module, path))
    folders = {one: room_of(f"{name}.{one}", members, imports) for one, members in inner.items()}
    return Room(kind_of(libraries), ABOUT.get(name) or (first_sentence(own) if own else ""), folders)


def first_sentence(path: Path) -> str:
    """What a module's docstring says in its first line."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def kind_of(libraries: set[str]) -> str:
    """Which of the libraries that have their place a room imports."""
    return "onnx" if libraries & ONNX else "torch" if "torch" in libraries else "none"


def box_of(name: str) -> Box:
    """Where a room is drawn."""
    row, left, right = PLACES[name]
    return Box(left, TOP + sum(HEIGHTS[:row]) + GAP * row, right - left, HEIGHTS[row])


def route(source: str, target: str) -> list[tuple[float, float]]:
    """The points of the arrow from one room to another: straight where it can be, else through a gap between boxes."""
    a, b = box_of(source), box_of(target)
    rows = PLACES[target][0] - PLACES[source][0]
    if rows == 0:
        ends = (a.x, b.right) if a.x > b.x else (a.right, b.x)
        return [(ends[0], a.y + a.height / 2), (ends[1], b.y + b.height / 2)]
    left, right = max(a.x, b.x), min(a.right, b.right)
    if rows == 1 and left < right:
        return [((left + right) / 2, a.bottom), ((left + right) / 2, b.y)]
    if rows == 1:
        start, between, end = a.middle + (40 if b.x > a.x else -40), a.bottom + GAP / 2, b.middle
        return [(start, a.bottom), (start, between), (end, between), (end, b.y)]
    if PLACES[source][0] == 0 and a.x != b.x:  # over the top, and down beside all boxes
        corners = [(a.middle, TOP - 9), (RIGHT + 16, TOP - 9), (RIGHT + 16, b.y + b.height / 2)]
        return [(a.middle, a.y), *corners, (b.right, b.y + b.height / 2)]
    across = MIDDLE if a.x != b.x else RIGHT + 16
    first, last = (a.x, b.right) if a.x > b.x else (a.right, b.right) if a.x == b.x else (a.right, b.x)
    height = b.y + b.height * (0.5 if a.x == b.x else 0.3)
    return [(first, a.y + a.height / 2), (across, a.y + a.height / 2), (across, height), (last, height)]


def draw() -> str:
    """The picture as SVG."""
    rooms, arrows = measure()
    last = box_of(EVERYBODY)
    picture = Picture(RIGHT + 30, last.bottom + 22, "The rooms of amp_compiler and who imports whom")
    picture.text(20, 32, "The rooms, and who imports whom", 18, bold=True)
    picture.text(20, 52, "An arrow leads from the importer down to the imported. No arrow leads up.", colour=FAINT)
    x = RIGHT - 225
    for number, (kind, meaning) in enumerate(MEANINGS.items()):
        picture.box(Box(x, 14 + 18 * number, 14, 12), COLOURS[kind], radius=2)
        picture.text(x + 20, 24 + 18 * number, meaning, 11, colour=FAINT)
    said = ""
    for row, words in enumerate(BANDS):
        if words and words != said:
            picture.paragraph(20, TOP + sum(HEIGHTS[:row]) + GAP * row + 22, words, 120, 12)
        said = words
    for name in PLACES:
        if name in rooms:
            draw_room(picture, name, rooms[name])
    policy = box_of("policy")
    data = Box(20, policy.y + 8, 100, policy.height - 16)
    picture.box(data, GROUND, dashed=True)
    picture.text(data.x + 10, data.y + 19, "rules/", 14, bold=True)
    picture.text(data.x + 10, data.y + 36, "YAML files", 10, colour=FAINT)
    picture.arrow([(policy.x, data.y + data.height / 2), (data.right, data.y + data.height / 2)], dashed=True)
    for source, target in sorted(arrows.edges):
        picture.arrow(route(source, target))
    return picture.finish()


def draw_room(picture: Picture, name: str, room: Room) -> None:
    """One box: what it is called, what it is for, and its folders; those of `passes/` are boxes."""
    at = box_of(name)
    picture.box(at, COLOURS[room.kind] if name != "passes" else "#f4f6f8")
    picture.text(at.x + 12, at.y + 20, TITLES.get(name, f"{name}/"), 14, bold=True)
    picture.paragraph(at.x + 12, at.y + 37, room.about.replace("`", ""), at.width - 24, 11.5)
    if name == "passes":
        draw_passes(picture, at, room.folders)
    elif room.folders:
        picture.text(
            at.right - 10, at.y + 19, "  ".join(f"{one}/" for one in room.folders), 11, mono=True, anchor="end"
        )


def draw_passes(picture: Picture, at: Box, folders: dict[str, Room]) -> None:
    """The folders of `passes/`, in the order in which a graph goes through them."""
    order = sorted(folders, key=lambda one: (ORDER.index(one) if one in ORDER else len(ORDER), one))
    width = (at.width - 24 - 8 * (len(order) - 1)) / len(order)
    for number, name in enumerate(order):
        box = Box(at.x + 12 + number * (width + 8), at.y + 46, width, at.height - 58)
        picture.box(box, COLOURS[folders[name].kind], radius=4)
        picture.text(box.x + 7, box.y + 17, f"{name}/", 11, bold=True)
        picture.paragraph(box.x + 7, box.y + 33, folders[name].about.replace("`", ""), width - 17, 10)
