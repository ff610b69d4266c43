"""The few SVG elements that the pictures of the docs are made of. Text is measured roughly, so boxes leave room.

Every picture is dark where the page is: a style within it turns the colours that it is drawn in.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
INK, FAINT, LINE, GROUND = "#1f2933", "#5f6b76", "#8a96a3", "#ffffff"
DARK = {
    INK: "#e7ebf2", FAINT: "#a9b3c1", LINE: "#748093", GROUND: "#1e2129", "#f4f6f8": "#262b35",
    "#d6c8f2": "#4a3a75", "#f9e7b0": "#5f4a14", "#eceff1": "#363d49",
    "#e3f1e4": "#234029", "#dfeaf8": "#213a5c", "#fbe8d3": "#57391a",
}  # fmt: skip
PLOTTED = {  # the colours of matplotlib
    GROUND: DARK[GROUND], "#000000": DARK[INK], "#b0b0b0": DARK[FAINT],
    "#1f77b4": "#5aa9e6", "#ff7f0e": "#ff9f45", "#2ca02c": "#5fcf5f", "#d62728": "#ff6b6b", "#9467bd": "#b794e6",
    "#8c564b": "#c79287",
}  # fmt: skip
_BY_ATTRIBUTE, _BY_STYLE = '[{name}="{old}"]', '[style*="{name}: {old}"]'


@dataclass(frozen=True)
class Box:
    """A rectangle on the picture.

    Args:
        x: left edge, in pixels.
        y: upper edge.
        width: in pixels.
        height: in pixels.
    """

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """The x of its middle."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height

    @property
    def right(self) -> float:
        """The x of its right edge."""
        return self.x + self.width


@dataclass
class Picture:
    """An SVG picture that is drawn element by element, later ones over earlier ones.

    Args:
        width: in pixels.
        height: in pixels.
        title: what the picture shows, for those who cannot see it.
    """

    width: float
    height: float
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, at: Box, fill: str, stroke: str = LINE, *, radius: float = 6, dashed: bool = False) -> None:
        """A filled rectangle with round corners."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{at.x:g}" y="{at.y:g}" width="{at.width:g}" height="{at.height:g}" rx="{radius:g}"'
            f' fill="{fill}" stroke="{stroke}"{dash}/>'
        )

    def text(
        self, x: float, y: float, words: str, size: float = 12, *, bold: bool = False, colour: str = INK,
        anchor: str = "start", mono: bool = False,
    ) -> None:  # fmt: skip
        """One line of text whose baseline is at `y`."""
        family = " font-family=\"Menlo, Consolas, 'DejaVu Sans Mono', monospace\"" if mono else ""
        weight = ' font-weight="bold"' if bold else ""
        place = f' text-anchor="{anchor}"' if anchor != "start" else ""
        style = f'font-size="{size:g}" fill="{colour}"{weight}{place}{family}'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>')

    def paragraph(self, x: float, y: float, words: str, width: float, size: float = 12, colour: str = FAINT) -> float:
        """Lines of text as wide as fits; the baseline of the line after the last."""
        for line in textwrap.wrap(words, max(8, int(width / (size * 0.57))), break_on_hyphens=False):
            self.text(x, y, line, size, colour=colour)
            y += size * 1.3
        return y

    def arrow(self, points: Iterable[tuple[float, float]], colour: str = FAINT, *, dashed: bool = False) -> None:
        """A line through `points` with a head at its end."""
        path = " L ".join(f"{x:g} {y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<path d="M {path}" fill="none" stroke="{colour}" stroke-width="1.4"{dash} marker-end="url(#head)"/>'
        )

    def finish(self) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}"'
            f' width="{self.width:g}" height="{self.height:g}" font-family="{FONT}" role="img">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_dark(DARK, _BY_ATTRIBUTE)}</style>\n"
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
            f' orient="auto-start-reverse"><path d="M 0 1 L 10 5 L 0 9 z" fill="{FAINT}"/></marker></defs>\n'
            f'<rect width="{self.width:g}" height="{self.height:g}" fill="{GROUND}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def darken(plot: str) -> str:
    """What matplotlib drew, dark where the page is: it writes colours into the `style` of each element.

    Args:
        plot: the text of an SVG file.
    """
    letters = f"@media (prefers-color-scheme: dark) {{ text {{ fill: {DARK[INK]} }} }}"
    return plot.replace("</style>", f"{_dark(PLOTTED, _BY_STYLE)}\n{letters}</style>", 1)


def _dark(colours: dict[str, str], selector: str) -> str:
    """The style that turns each colour into another: `selector` finds what has it as its `name`, `fill` or `stroke`."""
    rules = (
        f"{selector.format(name=name, old=old)} {{ {name}: {new} !important }}"
        for old, new in colours.items()
        for name in ("fill", "stroke")
    )
    return "@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}"
