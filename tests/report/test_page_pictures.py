"""What pages look like, beside small pictures: what is missing, has moved or has another colour shows in them.

A picture has one cell for some hundred pixels, so that letters of another font are the same grey. A cell may be like
any of those around it, so that a box may be a little wider or elsewhere by that.
`AMP_REGENERATE=1` writes the pictures; look at them.
"""

import io
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from page_plans import transformer
from PIL import Image

PICTURES = Path(__file__).parent / "pictures"
REGENERATE = bool(os.environ.get("AMP_REGENERATE"))
CELLS = {1400: (70, 45), 390: (26, 56)}  # of 20 pixels, and of 15
NEAR = 24  # of 255: a cell that differs less in each colour is the same
REACH = 2  # cells aside in which one is looked for
MOST = 0.007  # of the cells; a font that is a tenth narrower makes 0.005 at most, a panel that is gone 0.009 at least
FONTS = 'system-ui, "Segoe UI", "Noto Sans", sans-serif'

pytestmark = pytest.mark.browser


@dataclass(frozen=True)
class Look:
    """A page in a window: of one plan or of two, so wide, light or dark."""

    page: str
    width: int
    scheme: str

    @property
    def file(self) -> Path:
        return PICTURES / f"{self.page}_{self.width}_{self.scheme}.png"


LOOKS = [Look(page, width, scheme) for page in ("one", "two") for width in CELLS for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    result = {name: folder / f"{name}.html" for name in ("one", "two")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "0")
        transformer(39).to_html(result["one"])
        transformer(39).to_html(result["two"], other=transformer(39, wide=("softmax", "add")), names=("mine", "theirs"))
    return result


def shown(browser, page: Path, look: Look, act: str = "") -> np.ndarray:
    """The cells of what is to be seen with a node chosen, behind some act of a script."""
    browser.open(page, "#node=linear_14", width=look.width, height=900 if look.width > 700 else 844, scheme=look.scheme)
    browser.run(act)
    picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
    return np.asarray(picture.resize(CELLS[look.width], Image.Resampling.BOX), dtype=int)


def unlike(one: np.ndarray, other: np.ndarray) -> float:
    """The share of cells that are like no cell of the other picture beside their place."""
    high, wide = one.shape[:2]
    padded = np.pad(other, ((REACH, REACH), (REACH, REACH), (0, 0)), mode="edge")
    around = range(2 * REACH + 1)
    beside = [padded[down : down + high, right : right + wide] for down in around for right in around]
    nearest = np.min([np.abs(one - cells).max(axis=-1) for cells in beside], axis=0)
    return float((nearest > NEAR).mean())


def difference(cells: np.ndarray, look: Look) -> float:
    golden = np.asarray(Image.open(look.file).convert("RGB"), dtype=int)
    return max(unlike(cells, golden), unlike(golden, cells))


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.file.stem)
def test_a_page_looks_as_it_did(browser, pages, look):
    cells = shown(browser, pages[look.page], look)
    if REGENERATE:
        PICTURES.mkdir(exist_ok=True)
        Image.fromarray(cells.astype(np.uint8)).save(look.file, optimize=True)
    assert difference(cells, look) <= MOST


@pytest.mark.parametrize("look", LOOKS[:8:3], ids=lambda look: look.file.stem)
def test_another_font_makes_no_difference(browser, pages, look, tmp_path):
    text = pages[look.page].read_text(encoding="utf-8")
    (tmp_path / "page.html").write_text(text.replace(FONTS, '"DejaVu Sans Condensed"'), encoding="utf-8")
    assert difference(shown(browser, tmp_path / "page.html", look), look) <= MOST


STYLE = "document.head.append(Object.assign(document.createElement('style'), {textContent: %r}))"
BROKEN = {
    "no drawing": "document.getElementById('drawing').replaceChildren()",
    "no details": "document.getElementById('details').hidden = true",
    "no filters": STYLE % "#tools { display: none !important }",
    "folded": "document.getElementById('fold').click()",
    "large letters": STYLE % "body { font-size: 22px } dl, .facts, h1 { font-size: 150% }",
}


@pytest.mark.parametrize("act", BROKEN.values(), ids=BROKEN)
def test_what_breaks_a_page_makes_one(browser, pages, act):
    look = Look("one", 1400, "light")
    assert difference(shown(browser, pages["one"], look, act), look) > MOST
