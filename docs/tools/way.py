"""Draws the way of a small model from its modules to one compiled step, from its recorded stages: pictures/way.svg.

There it is drawn for a wide page; `way_narrow.svg` is the same for a phone.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipelines import Line, nodes, stages
from svg import FAINT, GROUND, INK, LINE, Box, Picture

MODEL = "mlp"
LOW, FULL, OTHER = "#d6c8f2", "#f9e7b0", "#eceff1"
LEGEND = (
    (LOW, "gives 16 bits", False),
    (FULL, "gives FP32", False),
    (GROUND, "a cast that was put in", True),
    (OTHER, "check and update, for all parameters of a group at once", False),
)
VIEWS = {"t", "view", "expand", "getitem", "permute", "detach"}  # nothing is computed in these
PILL, STEP, HEAD = 17, 21, 94  # heights of a node, of a row and of what stands over a column
RUNNERS = ("Inductor", "native loops", "CUDA graph", "eager")


@dataclass(frozen=True)
class Stages:
    """What the picture shows, as it was recorded.

    Args:
        captured: the graph of the model and its loss.
        planned: name and label of each node.
        casts: how many there are in the plan.
        rewritten: the graph with its casts.
        forward: what is computed before the loss, in the graph of the whole step.
        backward: what is computed behind it.
        update: the operators of the check and the update.
    """

    captured: list[Line]
    planned: list[tuple[str, str]]
    casts: int
    rewritten: list[Line]
    forward: list[Line]
    backward: list[Line]
    update: list[Line]

    @property
    def tallest(self) -> int:
        """Rows of the longest column, which is that of backward and update."""
        return max(len(self.rewritten), len(self.backward) + 1 + len(self.update))


def recorded() -> Stages:
    """The stages of the model."""
    texts = stages(MODEL)
    whole = nodes(texts["fuse_update"])
    forward, backward = (
        [one for one in whole if one.phase == phase and one.op not in VIEWS] for phase in ("forward", "backward")
    )
    return Stages(
        captured=nodes(texts["capture"]),
        planned=labels(texts["assign_precision"]),
        casts=sum(line.startswith("cast ") for line in texts["place_casts"]),
        rewritten=nodes(texts["apply_plan"]),
        forward=forward,
        backward=backward,
        update=[one for one in whole if one.namespace == "amp_compiler"],
    )


def draw() -> str:
    """The picture as SVG, its parts beside one another."""
    shown, top = recorded(), 34 + HEAD
    bottom = top + shown.tallest * STEP
    picture = Picture(1000, bottom + 64, "From a model to one compiled training step")
    graph_part(picture, shown, 20, 34, 130)
    plan_part(picture, shown, 210, 34, 140)
    casts_part(picture, shown, 415, 34, 130)
    step_part(picture, shown, (605, 745), 34, 125)
    heading(picture, 905, 34, "5  it runs", "As one graph.", 80)
    for row, name in enumerate(RUNNERS):
        pill(picture, 905, top + row * STEP, 80, name, GROUND)
    for left, right in ((150, 210), (350, 415), (545, 605), (870, 905)):
        picture.arrow([(left + 10, top + 8.5), (right - 10, top + 8.5)])
    x = 20.0
    for colour, words, dashed in LEGEND:
        legend(picture, x, bottom + 38, colour, words, dashed=dashed)
        x += 60 + len(words) * 5.3
    return picture.finish()


def draw_narrow() -> str:
    """The same for a phone: two columns, and parts below one another."""
    shown, left, right, wide = recorded(), 10, 190, 160
    second = 30 + HEAD + max(len(shown.captured), len(shown.planned)) * STEP + 96
    third = second + HEAD + len(shown.rewritten) * STEP + 40
    fourth = third + HEAD + shown.tallest * STEP + 40
    picture = Picture(360, fourth + 2 * STEP + 24, "From a model to one compiled training step")
    graph_part(picture, shown, left, 30, wide)
    plan_part(picture, shown, right, 30, wide)
    picture.arrow([(left + wide + 2, 38.5 + HEAD), (right - 2, 38.5 + HEAD)])
    casts_part(picture, shown, left, second, wide)
    for row, (colour, words, dashed) in enumerate(LEGEND):
        legend(picture, right, second + HEAD + row * 40, colour, words, dashed=dashed)
    step_part(picture, shown, (left, right), third, wide)
    heading(picture, left, fourth, "5  it runs", "", wide)
    for place, name in enumerate(RUNNERS):
        pill(picture, (left, right)[place % 2], fourth + 14 + place // 2 * STEP, wide, name, GROUND)
    return picture.finish()


def graph_part(picture: Picture, shown: Stages, x: float, y: float, width: float) -> None:
    """The graph as it was captured."""
    heading(picture, x, y, "1  a graph", "The model and its loss are captured; nothing is cast yet.", width + 20)
    column(picture, x, y + HEAD, width, shown.captured)
    below = y + HEAD + len(shown.captured) * STEP + 16
    picture.paragraph(x, below, "Linear, GELU, LayerNorm, Linear, and the squared error, for BF16", width + 10, 10.5)


def plan_part(picture: Picture, shown: Stages, x: float, y: float, width: float) -> None:
    """The plan: the type of each node."""
    heading(picture, x, y, "2  a plan", "Rules in YAML decide by node, a minimum cut over bytes the rest.", width + 25)
    for row, (name, label) in enumerate(shown.planned):
        at = y + HEAD + row * STEP
        pill(picture, x, at, width, name, LOW if label == "low" else FULL, note=label.replace("low", "bf16"))
    below = y + HEAD + len(shown.planned) * STEP + 16
    picture.text(x, below, f"{shown.casts} casts, each with its bytes", 10.5, colour=FAINT)
    picture.text(x, below + 15, "print it, diff it, save it", 10.5, colour=FAINT)


def casts_part(picture: Picture, shown: Stages, x: float, y: float, width: float) -> None:
    """The graph with its casts."""
    heading(picture, x, y, "3  casts", "The graph is rewritten before autograd sees it.", width + 20)
    column(picture, x, y + HEAD, width, shown.rewritten)


def step_part(picture: Picture, shown: Stages, xs: tuple[float, float], y: float, width: float) -> None:
    """The whole step, in two columns."""
    words = "Forward, backward and update in one graph. The 16-bit weights are state: no cast of theirs is left."
    heading(picture, xs[0], y, "4  one step", words, 265)
    top = y + HEAD
    for x, name, lines in zip(xs, ("forward", "backward"), (shown.forward, shown.backward), strict=True):
        picture.text(x, top - 8, name, 10.5, colour=FAINT)
        column(picture, x, top, width, lines)
    after = top + (len(shown.backward) + 1) * STEP
    picture.text(xs[1], after - 6, "update", 10.5, colour=FAINT)
    for row, one in enumerate(shown.update):
        pill(picture, xs[1], after + row * STEP, width, one.op, OTHER)
    down, start, corner = top + len(shown.forward) * STEP - 2, xs[0] + width / 2, xs[1] - 8
    picture.arrow([(start, down), (start, down + 16), (corner, down + 16), (corner, top + 8.5), (xs[1] - 1, top + 8.5)])


def labels(stage: list[str]) -> list[tuple[str, str]]:
    """Node and label of each line of the stage behind `assign_precision`."""
    pairs = (line.split()[:2] for line in stage)
    return [(name, label) for label, name in pairs]


def heading(picture: Picture, x: float, y: float, title: str, words: str, width: float) -> None:
    """What stands over a column."""
    picture.text(x, y, title, 16, bold=True)
    picture.paragraph(x, y + 22, words, width, 11.5)


def column(picture: Picture, x: float, y: float, width: float, lines: list[Line]) -> None:
    """The nodes of a graph from top to bottom, coloured by the type of what they give."""
    for row, one in enumerate(lines):
        colour = {"bf16": LOW, "fp16": LOW, "fp32": FULL}.get(one.dtype, OTHER)
        words = f"cast to {one.dtype}" if one.cast else one.op.removeprefix("native_")
        pill(picture, x, y + row * STEP, width, words, colour, inset=24 if one.cast else 0)


def pill(
    picture: Picture, x: float, y: float, width: float, words: str, colour: str, *, note: str = "", inset: float = 0
) -> None:
    """One node."""
    at = Box(x + inset, y, width - inset, PILL)
    picture.box(at, colour, LINE, radius=8, dashed=bool(inset))
    picture.text(at.x + 9, at.y + 12.5, words, 10 if picture.width > 500 else 10.5, colour=FAINT if inset else INK)
    if note:
        picture.text(at.right - 9, at.y + 12.5, note, 10.5, bold=True, anchor="end")


def legend(picture: Picture, x: float, y: float, colour: str, words: str, *, dashed: bool) -> None:
    """What a colour means."""
    picture.box(Box(x, y, 22, 13), colour, radius=6, dashed=dashed)
    picture.paragraph(x + 28, y + 11, words, 130 if picture.width < 500 else 400, 11)
