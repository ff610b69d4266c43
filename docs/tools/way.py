"""Draws the way of a small model from its modules to one compiled step, from its recorded stages: pictures/way.svg."""

from __future__ import annotations

from pipelines import Line, nodes, stages
from svg import FAINT, INK, LINE, Box, Picture

MODEL = "mlp"
LOW, FULL, OTHER = "#d6c8f2", "#f9e7b0", "#eceff1"
VIEWS = {"t", "view", "expand", "getitem", "permute", "detach"}  # nothing is computed in these
PILL, STEP, TOP = 17, 21, 128
WIDTH = 1000


def draw() -> str:
    """The picture as SVG."""
    texts = stages(MODEL)
    captured, planned = nodes(texts["capture"]), labels(texts["assign_precision"])
    rewritten, whole = nodes(texts["apply_plan"]), nodes(texts["fuse_update"])
    phases = {
        phase: [one for one in whole if one.phase == phase and one.op not in VIEWS] for phase in ("forward", "backward")
    }
    update = [one for one in whole if one.namespace == "amp_compiler"]
    tallest = max(len(rewritten), len(phases["backward"]) + 1 + len(update))
    bottom = TOP + tallest * STEP
    picture = Picture(WIDTH, bottom + 64, "From a model to one compiled training step")
    heading(picture, 20, "1  a graph", "The model and its loss are captured; nothing is cast yet.", 150)
    column(picture, 20, 130, captured)
    heading(picture, 210, "2  a plan", "Rules in YAML decide by node, a minimum cut over bytes the rest.", 165)
    for row, (name, label) in enumerate(planned):
        pill(picture, 210, row, 140, name, LOW if label == "low" else FULL, note=label.replace("low", "bf16"))
    reads = [line for line in texts["place_casts"] if line.startswith("cast ")]
    picture.text(210, TOP + len(planned) * STEP + 16, f"{len(reads)} casts, each with its bytes", 10.5, colour=FAINT)
    picture.text(210, TOP + len(planned) * STEP + 31, "print it, diff it, save it", 10.5, colour=FAINT)
    for row, words in enumerate(("Linear, GELU, LayerNorm,", "Linear, and the squared", "error, for BF16")):
        picture.text(20, TOP + len(captured) * STEP + 16 + 15 * row, words, 10.5, colour=FAINT)
    heading(picture, 415, "3  casts", "The graph is rewritten before autograd sees it.", 150)
    column(picture, 415, 130, rewritten)
    heading(picture, 605, "4  one step", "Forward, backward and update in one graph. The 16-bit weights are"
            " state: no cast of theirs is left.", 265)  # fmt: skip
    picture.text(605, TOP - 8, "forward", 10.5, colour=FAINT)
    picture.text(745, TOP - 8, "backward", 10.5, colour=FAINT)
    column(picture, 605, 125, phases["forward"])
    column(picture, 745, 125, phases["backward"])
    after = len(phases["backward"]) + 1
    picture.text(745, TOP + after * STEP - 6, "update", 10.5, colour=FAINT)
    for row, one in enumerate(update):
        pill(picture, 745, after + row, 125, one.op, OTHER)
    heading(picture, 905, "5  it runs", "As one graph.", 80)
    for row, name in enumerate(("Inductor", "native loops", "CUDA graph", "eager")):
        pill(picture, 905, row, 80, name, "#ffffff")
    for left, right in ((150, 210), (350, 415), (545, 605), (870, 905)):
        picture.arrow([(left + 10, TOP + 8.5), (right - 10, TOP + 8.5)])
    down = TOP + len(phases["forward"]) * STEP + 6
    picture.arrow([(667, down - 8), (667, down + 8), (737, down + 8), (737, TOP + 8.5), (744, TOP + 8.5)])
    legend(picture, bottom + 38)
    return picture.finish()


def labels(stage: list[str]) -> list[tuple[str, str]]:
    """Node and label of each line of the stage behind `assign_precision`."""
    pairs = (line.split()[:2] for line in stage)
    return [(name, label) for label, name in pairs]


def heading(picture: Picture, x: float, title: str, words: str, width: float) -> None:
    """What stands over a column."""
    picture.text(x, 34, title, 16, bold=True)
    picture.paragraph(x, 56, words, width, 11.5)


def column(picture: Picture, x: float, width: float, lines: list[Line]) -> None:
    """The nodes of a graph from top to bottom, coloured by the type of what they give."""
    for row, one in enumerate(lines):
        colour = {"bf16": LOW, "fp16": LOW, "fp32": FULL}.get(one.dtype, OTHER)
        if one.cast:
            pill(picture, x, row, width, f"cast to {one.dtype}", colour, inset=24)
        else:
            pill(picture, x, row, width, one.op.removeprefix("native_"), colour)


def pill(
    picture: Picture, x: float, row: int, width: float, words: str, colour: str, *, note: str = "", inset: float = 0
) -> None:
    """One node."""
    at = Box(x + inset, TOP + row * STEP, width - inset, PILL)
    picture.box(at, colour, LINE, radius=8, dashed=bool(inset))
    picture.text(at.x + 9, at.y + 12.5, words, 10, colour=FAINT if inset else INK)
    if note:
        picture.text(at.right - 9, at.y + 12.5, note, 10.5, bold=True, anchor="end")


def legend(picture: Picture, y: float) -> None:
    """What the colours mean."""
    x = 20.0
    for colour, words, dashed in (
        (LOW, "gives 16 bits", False),
        (FULL, "gives FP32", False),
        ("#ffffff", "a cast that was put in", True),
        (OTHER, "check and update, for all parameters of a group at once", False),
    ):
        picture.box(Box(x, y, 22, 13), colour, radius=6, dashed=dashed)
        picture.text(x + 28, y + 11, words, 11, colour=FAINT)
        x += 60 + len(words) * 5.3
