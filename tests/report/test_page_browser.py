"""The page of a plan in a real browser: folds, searches, sorts, filters, compares, fits a phone and paper."""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from itertools import combinations
from pathlib import Path

import pytest
import torch
from page_plans import LAYER, MIXED, random_plan, transformer
from planning import plan_text
from test_page import hostile_plan, small_step
from torch import nn
from toys import sgd_step

import amp_compiler as amp
from amp_compiler.ir.plan import PlannedCast, PlannedModel, PlannedNode, PrecisionPlan
from amp_compiler.report.table import summary_line

LAYERS = 3
ALL = LAYERS * len(LAYER)
PAGES = ("one", "two", "step", "large", "hostile", "flat", "cnn", "more", "fp8")

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    """Pages that several tests open."""
    folder = tmp_path_factory.mktemp("pages")
    result = {name: folder / f"{name}.html" for name in PAGES}
    plan = transformer(ALL)
    plan.to_html(result["one"])
    plan.to_html(result["two"], other=transformer(ALL, wide=("softmax", "add")), names=("before.json", "after.json"))
    transformer(5000).to_html(result["large"])
    transformer(300, flat=True).to_html(result["flat"])
    hostile_plan().to_html(result["hostile"], other=hostile_plan())
    step = small_step()
    batch = torch.randn(4, 8), torch.randint(2, (4,))
    step.to_html(result["step"], profile=amp.profile(step, [batch, batch]))
    cnn = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    amp.explain(cnn, (torch.randn(2, 3, 8, 8),), dtype="fp16").to_html(result["cnn"])
    plan.to_html(result["more"], other=with_one_more(plan))
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    amp.explain(net, (torch.randn(32, 64),), dtype="bf16", rules="fp8").to_html(result["fp8"])
    return result


def with_one_more(plan: PrecisionPlan) -> PrecisionPlan:
    """The plan with a last node whose box needs little room, where another plan has none."""
    last = plan.nodes[-1]
    more = replace(last, name="more", op="aten.t", inputs=(last.name,), outputs=(("more", "bf16"),))
    return replace(plan, nodes=(*plan.nodes, more), outputs=("more",))


def count(browser, selector: str) -> int:
    return int(browser.run("return document.querySelectorAll(arguments[0]).length", selector))


def text(browser, selector: str) -> str:
    return str(browser.run("return document.querySelector(arguments[0]).textContent", selector))


def click(browser, selector: str) -> None:
    """A click on the first that there is, wherever it stands."""
    browser.run(
        "document.querySelector(arguments[0]).dispatchEvent(new MouseEvent('click', {bubbles: true}))", selector
    )


def fold(browser) -> None:
    """Show the layers of `transformer`, and no node of them."""
    click(browser, "#fold")
    click(browser, '[data-module="model.layers"]')


def type_in(browser, selector: str, words: str) -> None:
    browser.run(
        "const [field, words] = [document.querySelector(arguments[0]), arguments[1]]; field.value = words;"
        "for (const name of ['input', 'change']) field.dispatchEvent(new Event(name, {bubbles: true}))",
        selector,
        words,
    )


def press_enter(browser) -> None:
    """In the field for a search, which goes to the next match."""
    browser.run(
        "document.getElementById('search').dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))"
    )


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for it: on a busy machine the browser may have its events later."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def column(browser, key: int) -> list[str]:
    return browser.run(
        "const rows = [...document.querySelectorAll('#list-nodes tbody tr')];"
        "return rows.map((row) => row.cells[arguments[0]].textContent)",
        key,
    )


def names(browser) -> list[str]:
    return column(browser, 1)


@pytest.mark.parametrize("nodes", [ALL, 40 * len(LAYER)])
def test_at_first_some_thirty_boxes_are_open(browser, tmp_path, nodes):
    transformer(nodes).to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert browser.run("return document.documentElement.dataset.ready") == "yes"
    assert 20 <= count(browser, ".box, .module.folded") <= 40
    assert browser.run("return document.querySelector('.box, .module').getBoundingClientRect().height") > 30


def test_a_box_says_its_op_once_and_its_type(browser, pages):
    browser.open(pages["one"], "#node=linear_14")
    shown = (
        "const texts = [...document.querySelector(arguments[0]).querySelectorAll('text')];"
        "return texts.map((text) => text.firstChild.data)"
    )
    assert browser.run(shown, '[data-node="linear_14"]') == ["linear_14", "bf16", "query", "+ 12.0 KiB"]
    assert text(browser, "#details .badge") == text(browser, '#precisions [value="low"]') == "bf16"
    browser.open(pages["two"], "#node=layer_norm_13")
    assert text(browser, "#details .changedto") == "fp32 → bf16"


def test_modules_unfold_and_fold(browser, pages):
    browser.open(pages["one"])
    fold(browser)
    assert count(browser, ".module.folded") == LAYERS
    assert count(browser, ".box") == 0
    click(browser, '[data-module="model.layers.1"]')
    assert count(browser, ".module.folded") == LAYERS - 1 + 2  # with its attention and its mlp
    assert count(browser, '[data-node="layer_norm_13"]') == 1
    assert count(browser, ".castlabel") > 0
    assert "6.0 KiB" in text(browser, ".castlabel")
    click(browser, '[data-module="model.layers.1"]')
    assert (count(browser, ".module.folded"), count(browser, ".box")) == (LAYERS, 0)


def test_the_keyboard_unfolds(browser, pages):
    browser.open(pages["one"])
    fold(browser)
    browser.run(
        "const module = document.querySelector('[data-module=\"model.layers.0\"]'); module.focus();"
        "module.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', bubbles: true}))"
    )
    assert count(browser, '[data-node="layer_norm_0"]') == 1
    assert browser.run("return document.activeElement.dataset.module") == "model.layers.0"


def test_a_product_in_fp8_says_so_and_is_found(browser, pages):
    browser.open(pages["fp8"], "#q=fp8")
    assert names(browser) == ["linear", "linear_1"]
    types = "return [...document.querySelectorAll('.box .type')].map((text) => text.textContent)"
    assert browser.run(types) == ["bf16 (fp8)", "bf16", "bf16 (fp8)"]
    shares = "return [...document.querySelectorAll('.share')].map((share) => share.textContent)"
    low, eights, result = browser.run(shares)
    assert low == "of the arithmetic in bf160.4 %"  # a GELU beside two products
    assert eights == "of the arithmetic in fp899.6 %" and result == "of the bytes made in bf16100 %"


def test_search_finds_counts_and_goes_from_match_to_match(browser, pages):
    browser.open(pages["one"])
    fold(browser)
    type_in(browser, "#search", "softmax sums")
    assert text(browser, "#found") == f"{LAYERS} of {ALL} nodes"
    assert names(browser) == ["softmax_4", "softmax_17", "softmax_30"]
    assert count(browser, ".module.folded:not(.out)") == LAYERS
    for name in ("softmax_4", "softmax_17", "softmax_30", "softmax_4"):
        press_enter(browser)
        assert text(browser, "#details h3") == name
        assert count(browser, f'.box.chosen[data-node="{name}"]') == 1
    assert browser.run("return location.hash") == "#node=softmax_4&q=softmax+sums"
    assert count(browser, '.box.out[data-node="matmul_3"]') == 1
    click(browser, "#clear")
    assert text(browser, "#found") == f"{ALL} nodes"
    assert count(browser, ".out") == 0


def test_filters_by_precision_op_module_and_rule(browser, pages):
    browser.open(pages["one"])
    click(browser, '#precisions [value="low"]')
    assert text(browser, "#found") == f"{5 * LAYERS} of {ALL} nodes"
    type_in(browser, "#by-op", "aten.add")
    assert len(names(browser)) == 2 * LAYERS
    type_in(browser, "#by-module", "model.layers.1")
    assert names(browser) == ["add_20", "add_25"]
    click(browser, '#precisions [value="low"]')
    type_in(browser, "#by-op", "")
    type_in(browser, "#by-rule", "mine.yaml:3")
    assert names(browser) == ["layer_norm_13", "layer_norm_21"]
    assert browser.run("return location.hash") == "#module=model.layers.1&rule=mine.yaml%3A3"


def test_columns_sort_both_ways(browser, pages):
    browser.open(pages["one"])
    click(browser, '#list-nodes th[data-key="name"] button')
    assert names(browser)[:3] == ["add_7", "add_12", "add_20"]  # numbers by their size
    assert browser.run("return document.querySelector('#list-nodes th[data-key=\"name\"]').ariaSort") == "ascending"
    click(browser, '#list-nodes th[data-key="name"] button')
    assert names(browser)[0] == "transpose_28"
    click(browser, '#list-nodes th[data-key="#"] button')
    assert names(browser)[0] == f"add_{ALL - 1}"
    sizes = browser.run(
        "const rows = [...document.querySelectorAll('#list-casts tbody tr')];"
        "return rows.map((row) => parseFloat(row.cells[3].textContent))"
    )
    assert sizes == sorted(sizes, reverse=True)  # the largest first
    assert len(set(sizes)) == 2


def test_a_link_to_a_node_shows_it(browser, pages):
    browser.open(pages["one"], "#node=linear_22")
    assert count(browser, '.box.chosen[data-node="linear_22"]') == 1
    shown = text(browser, "#details")
    for part in (
        "model.layers.1.mlp.up",
        "default.yaml:64",
        "tensor cores run it",
        "model.py:19",
        "6.0 KiB",
        "gelu_23",
    ):
        assert part in shown
    frame = (
        "const {x, y, right, bottom} = document.querySelector(arguments[0]).getBoundingClientRect();"
        "return [x, y, right, bottom]"
    )
    spot, pane = browser.run(frame, '[data-node="linear_22"]'), browser.run(frame, ".pane")
    assert pane[0] < spot[0] < spot[2] < pane[2]
    assert pane[1] < spot[1] < spot[3] < pane[3]
    click(browser, "#details .link")
    assert browser.run("return location.hash") == "#node=layer_norm_21"
    browser.run("location.hash = '#node=no_such'; return new Promise((done) => setTimeout(done, 50))")
    assert text(browser, "#missing") == "There is no node 'no_such' in this graph."
    click(browser, '[data-node="linear_22"]')
    assert browser.run("return document.getElementById('missing').hidden")
    browser.run("location.hash = '#q=softmax'; return new Promise((done) => setTimeout(done, 50))")
    assert count(browser, ".chosen") == 0
    type_in(browser, "#search", "gelu")
    assert browser.run("return location.hash") == "#q=gelu"


def reads_of(browser, page: Path, node: str) -> list[str]:
    browser.open(page, f"#node={node}")
    return browser.run(
        "const terms = [...document.querySelectorAll('#details dt')];"
        "const reads = terms.find((term) => term.textContent === 'reads').nextSibling;"
        "return [...reads.querySelectorAll('li')].map((item) => item.textContent)"
    )


def test_reads_are_shown_with_the_casts_on_their_way(browser, tmp_path):
    plan_text(MIXED).to_html(tmp_path / "page.html")
    assert reads_of(browser, tmp_path / "page.html", "y")[1].startswith("w stored fp32cast fp32 → fp16")
    assert reads_of(browser, tmp_path / "page.html", "s") == ["y fp16cast fp16 → fp32, 3.0 KiB"]
    assert reads_of(browser, tmp_path / "page.html", "z") == ["s fp32cast fp32 → fp16, 3.0 KiB", "y fp16"]


def test_a_read_past_an_upcast_is_one_of_the_value_itself_and_the_models_cast_is_no_edge(browser, tmp_path):
    nodes = (
        PlannedNode("y", "aten.relu", "", "", "low", "", "", outputs=(("y", "bf16"),), inputs=("x",)),
        PlannedNode("up", "aten.to", "", "", "keep", "", "", outputs=(("up", "fp32"),), inputs=("y",)),
        PlannedNode("z", "aten.relu", "", "", "low", "", "", outputs=(("z", "bf16"),), inputs=("up",)),
    )
    casts = (PlannedCast("y", "bf16", "bf16", 0, (("z", 0),)), PlannedCast("y", "bf16", "fp32", 48, explicit=True))
    plan = PrecisionPlan("bf16", "default", "cpu", nodes, casts, (("x", "bf16"),), ("z",))
    plan.to_html(tmp_path / "page.html")
    assert reads_of(browser, tmp_path / "page.html", "z") == ["y bf16"]
    rows = (
        "const rows = [...document.querySelectorAll('#list-casts tbody tr')];"
        "return rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    assert [(row[0], row[1], row[2], row[-1]) for row in browser.run(rows)] == [("y", "bf16", "fp32", "the model")]
    cards = browser.run("return [...document.querySelectorAll('.cards div')].map((card) => card.textContent)")
    assert "casts, 1 the model's own1" in cards and plan.cast_count == 1 and "· 1 cast (" in summary_line(plan)


def test_two_plans_stand_side_by_side(browser, pages):
    browser.open(pages["two"], "#node=layer_norm_13")
    assert count(browser, ".pane") == 2
    assert count(browser, '.box.changed.fp32[data-node="layer_norm_13"]') == 1
    assert count(browser, '.box.changed.low[data-node="layer_norm_13"]') == 1
    assert "before.json" in text(browser, "#details")
    assert browser.run(
        "const boxes = [...document.querySelectorAll('[data-node=\"layer_norm_13\"]')];"
        "const [one, other] = boxes.map((box) => box.getAttribute('transform')); return one === other"
    )
    click(browser, "#unfold")
    assert (
        browser.run(
            "return new Set([...document.querySelectorAll('.layer')].map((one) => one.getAttribute('transform'))).size"
        )
        == 1
    )
    type_in(browser, "#by-change", "any")
    assert set(column(browser, 2)) == {"aten.layer_norm"}
    assert text(browser, "#found") == f"{2 * LAYERS} of {ALL} nodes"


def test_a_rule_elsewhere_is_no_difference_and_precisions_and_types_are_counted_apart(browser, tmp_path):
    plan = transformer(26)
    nodes = [replace(node, rule="other.yaml:1", reason="as before") for node in plan.nodes]
    nodes[1] = replace(nodes[1], precision="fp32", outputs=((nodes[1].name, "fp32"),))
    nodes[2] = replace(nodes[2], outputs=((nodes[2].name, "fp16"),))
    nodes[3], nodes[4] = replace(nodes[3], math="fp8(hybrid, tensorwise)"), replace(nodes[4], math="fp32")
    plan.to_html(tmp_path / "page.html", other=replace(plan, nodes=tuple(nodes)))
    browser.open(tmp_path / "page.html", "#change=any")
    click(browser, "#unfold")
    marked = "return [...document.querySelectorAll('.box.changed')].map((box) => box.dataset.node)"
    assert browser.run(marked) == [node.name for node in nodes[1:4]] * 2
    assert names(browser) == [node.name for node in nodes[1:4]]
    message = "2 nodes in another precision, 1 node of another type alone, 0 nodes in one plan alone"
    assert text(browser, "#differing") == message
    type_in(browser, "#by-change", "rule")
    assert len(names(browser)) == 23 and column(browser, 0)[:2] == ["1", "5"]


def test_a_search_lists_links_that_unfold(browser, pages):
    browser.open(pages["large"])
    type_in(browser, "#search", "softmax")
    until(lambda: count(browser, "#hits li") == 61)
    assert text(browser, "#hits li:last-child") == "and 325 more, in the table"
    assert browser.run("const hits = document.getElementById('hits'); return hits.scrollWidth <= hits.clientWidth")
    link = "[...document.querySelectorAll('#hits .link')].find((one) => one.textContent === 'softmax_602')"
    assert browser.run(f"{link}.click(); return location.hash") == "#node=softmax_602&q=softmax"
    assert count(browser, '.box.chosen[data-node="softmax_602"]') == 1
    type_in(browser, "#search", "")
    assert browser.run("return document.getElementById('hits').hidden")


def test_tensors_of_zeros_alone_stand_first_and_red(browser, tmp_path):
    model, x = nn.Linear(4, 2), torch.zeros(3, 4)
    step = sgd_step(model, lambda model, x: model(x).sum())
    step.to_html(tmp_path / "page.html", profile=amp.profile(step, [(x,), (x,)]))
    browser.open(tmp_path / "page.html")
    ranges = browser.run(
        "return [...document.querySelectorAll('#ranges tbody td[data-label=range]')].map((cell) =>"
        "  [cell.textContent, cell.querySelector('.bad') !== null])"
    )
    dead = [one for one in ranges if one[0] == "only zeros"]
    assert 0 < len(dead) < len(ranges)
    assert ranges == [["only zeros", True]] * len(dead) + [[range, False] for range, _ in ranges[len(dead) :]]
    script = (resources.files("amp_compiler.report") / "page" / "text.js").read_text(encoding="utf-8")
    shares = browser.run(f"{script}\nreturn [0, 1e-5, 0.05, 0.993, 0.9961, 0.99999, 1].map(percent)")
    assert shares == [f"{one} %" for one in ("0", "< 0.01", "5.0", "99.3", "99.6", "99.99", "100")]


def test_what_differs_is_shown_beside_the_step(browser, tmp_path):
    step = small_step()
    step(torch.randn(4, 8), torch.randint(2, (4,)))
    step.to_html(tmp_path / "page.html", other=transformer(13), names=("mine", "theirs"))
    browser.open(tmp_path / "page.html", "#change=any")
    assert names(browser)
    assert text(browser, ".heads").count("in the whole step") == 1
    assert "theirs" in text(browser, ".heads .totals:last-child")


def test_a_node_that_only_one_plan_has_is_shown_as_that(browser, tmp_path):
    plan = transformer(13)
    plan.to_html(tmp_path / "page.html", other=with_one_more(plan))
    browser.open(tmp_path / "page.html", "#node=more")
    assert count(browser, '.box.absent[data-node="more"]') == 1
    assert text(browser, "#details .changedto") == "only in the second"


def test_the_whole_step_and_its_histograms(browser, pages):
    browser.open(pages["step"], "#node=linear")
    assert count(browser, ".histogram") >= 2
    shown = browser.run(
        "const data = JSON.parse(document.getElementById('data').textContent);"
        "const row = data.profile.find((row) => row.planned === 'linear');"
        "const drawn = document.querySelector('.histogram').querySelectorAll('.column').length;"
        "return [Object.keys(row.stored).filter((name) => /\\d/.test(name)).length, drawn]"
    )
    assert shown[0] == shown[1] > 0
    assert count(browser, ".histogram:first-of-type .range.subnormal") >= 1
    click(browser, '#graphs [value="step"]')
    # What arrows and fills refer to is there once, and not within what is hidden, which would leave it undrawn.
    assert browser.run(
        "const ends = [...document.querySelectorAll('.panes:not([hidden]) [marker-end]')];"
        "const ids = new Set(ends.map((one) => one.getAttribute('marker-end').slice(5, -1)).concat('hatch'));"
        "const held = [...ids].map((id) => [...document.querySelectorAll(`[id='${id}']`)]);"
        "return ids.size > 1 && held.every((found) => found.length === 1 && !found[0].closest('[hidden]'))"
    )
    assert {"forward", "backward", "update"} <= set(
        browser.run("return [...document.querySelectorAll('.module')].map((one) => one.dataset.module)")
    )
    type_in(browser, "#search", "native_layer_norm_backward")
    press_enter(browser)
    assert "backward" in text(browser, "#details")
    assert browser.run("return location.hash").startswith("#graph=step&node=native_layer_norm_backward")
    browser.run(
        "[...document.querySelectorAll('#details .link')].find((one) => one.textContent === 'layer_norm').click()"
    )
    assert text(browser, "#details h3") == "layer_norm"
    assert browser.run("return document.querySelector('#graphs [value=forward]').ariaSelected") == "true"
    click(browser, '#lists [value="ranges"]')
    assert count(browser, "#list-ranges tbody tr") > 10 and "static loss scale" in text(browser, "#advice")
    click(browser, "#list-ranges tbody tr")
    assert count(browser, ".histogram") >= 1


def test_all_of_5000_nodes_can_be_reached(browser, pages):
    browser.open(pages["large"])
    assert count(browser, ".box, .module") <= 40  # folded
    browser.run("const rest = document.querySelector('#list-nodes .rest'); while (!rest.hidden) rest.click()")
    assert len(set(names(browser))) == 5000
    type_in(browser, "#search", "add_4991")
    press_enter(browser)
    assert count(browser, '.box.chosen[data-node="add_4991"]') == 1
    click(browser, "#unfold")
    shown = "new Set([...document.querySelectorAll('.box')].map((box) => box.dataset.node))"
    assert browser.run(f"return {shown}.size") == 5000


def test_many_nodes_of_one_module_are_put_together_by_runs(browser, pages):
    browser.open(pages["flat"])
    assert 2 <= count(browser, ".module.folded") <= 60
    click(browser, "#unfold")
    assert count(browser, ".box") == 300


@pytest.mark.parametrize("name", ["two", "step", "hostile"])
def test_a_phone_needs_no_scrolling_sideways(browser, pages, name):
    browser.open(pages[name], "#node=linear", width=360, height=740)
    for tab in ("casts", "rules", "nodes"):
        click(browser, f'#lists [value="{tab}"]')
        assert browser.run("return document.documentElement.scrollWidth") <= 360
    assert browser.run("return document.querySelector('.pane').clientHeight") >= 200


@pytest.mark.parametrize("name", ["two", "step"])
def test_on_a_phone_the_graph_is_within_the_first_screen(browser, pages, name):
    browser.open(pages[name], width=390, height=844)
    assert browser.run("return document.querySelector('.pane').getBoundingClientRect().top") < 844 * 0.6
    assert not browser.run("return document.getElementById('by-op').getClientRects().length")
    click(browser, "#more")
    type_in(browser, "#by-op", browser.run("return document.getElementById('by-op').options[1].value"))
    assert " of " in text(browser, "#found")
    click(browser, "#more")
    assert not browser.run("return document.getElementById('by-op').getClientRects().length")
    style = "const style = getComputedStyle(document.querySelector('th button')); return style.borderTopStyle"
    assert browser.run(style) == "solid"
    browser.open(pages[name])
    assert browser.run("return document.getElementById('by-op').getClientRects().length")
    assert not browser.run("return document.getElementById('more').getClientRects().length")


@pytest.mark.parametrize("width", [390, 1400])
def test_names_of_any_length_have_room(browser, width, tmp_path):
    word = "Averylongnamewithoutanybreakingpoint" * 5
    plan = transformer(13)
    nodes = tuple(replace(node, module=f"{word}.{node.module}", rule=f"/{word}/{word}.yaml:3") for node in plan.nodes)
    about = PlannedModel(word, 12, (f"fp32[{word}]",))
    one, other = replace(plan, nodes=nodes, rules=word, model=about), replace(plan, nodes=nodes[:-1])
    one.to_html(tmp_path / "page.html", other=other, names=(f"/home/{word}.json", word))
    browser.open(tmp_path / "page.html", "#node=linear_1", width=width)
    assert browser.run("return document.documentElement.scrollWidth") == width
    beyond = (
        "return [...document.querySelectorAll('header *, figcaption, #details *')].filter((one) => one.clientWidth"
        "  && one.scrollWidth > one.clientWidth + 1 && !one.matches('dl.cards')).map((one) => one.outerHTML)"
    )
    assert browser.run(beyond) == []
    frames = "return [...document.querySelectorAll('figcaption')].map((one) => one.getBoundingClientRect().right)"
    panes = "return [...document.querySelectorAll('figure')].map((one) => one.getBoundingClientRect().right)"
    assert all(one <= pane for one, pane in zip(browser.run(frames), browser.run(panes), strict=True))


MISPLACED = """
const found = [], frame = (shape) => shape.getBoundingClientRect();
for (const box of document.querySelectorAll(arguments[0])) {
  const texts = [...box.querySelectorAll(':scope > text')].filter((text) => text.textContent);
  const around = frame(box.querySelector(':scope > rect'));
  texts.forEach((text, at) => {
    const one = frame(text);
    if (one.left < around.left - 0.5 || one.right > around.right + 0.5
      || one.top < around.top - 0.5 || one.bottom > around.bottom + 0.5) found.push(`${text.textContent}: outside`);
    for (const other of texts.slice(at + 1).map(frame))
      if (one.left < other.right && other.left < one.right && one.top < other.bottom - 2 && other.top < one.bottom - 2)
        found.push(`${text.textContent}: on another`);
  });
}
return found;
"""
# What JavaScript makes of an object, or of nothing, where a text is needed.
NO_TEXT = """
const told = [];
for (const element of document.querySelectorAll('head title, body *:not(script)')) {
  for (const node of element.childNodes) if (node.nodeType === Node.TEXT_NODE) told.push(node.data);
  for (const { value } of element.attributes) told.push(value);
}
return told.filter((text) => /\\[object |undefined|NaN/.test(text));
"""
SHOWN = ".panes:not([hidden]) :is(.box, .module, .pill, .castlabel)"


def drawings(browser) -> list[str]:
    """The tabs of the graphs that the page has; one without a name where it has no tabs."""
    return browser.run("return [...document.querySelectorAll('#graphs button')].map((tab) => tab.value)") or [""]


@pytest.mark.parametrize("name", ["two", "step", "hostile", "flat", "cnn", "fp8"])
def test_texts_stand_in_their_boxes(browser, pages, name):
    browser.open(pages[name])
    for graph in drawings(browser):
        if graph:
            click(browser, f'#graphs [value="{graph}"]')
        type_in(browser, "#search", "e")  # folded modules say how many of their nodes match
        assert browser.run(MISPLACED, SHOWN) == []
        click(browser, "#unfold")
        assert count(browser, ".panes:not([hidden]) .box .type") > 0
        assert browser.run(MISPLACED, SHOWN) == []
        click(browser, "#fold")


@pytest.mark.parametrize("name", ["two", "step", "hostile"])
def test_every_panel_is_made_of_texts(browser, pages, name):
    browser.open(pages[name])
    shown = "document.querySelectorAll(arguments[0])[arguments[1]]"
    for graph in drawings(browser):
        if graph:
            click(browser, f'#graphs [value="{graph}"]')
        for tab in browser.run("return [...document.querySelectorAll('#lists button')].map((tab) => tab.value)"):
            click(browser, f'#lists [value="{tab}"]')
        assert browser.run(NO_TEXT) == []
        click(browser, "#unfold")
        for at in range(count(browser, SHOWN)):  # a module that is clicked on folds, and its nodes are gone
            browser.run(f"{shown}?.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))", SHOWN, at)
            assert browser.run(NO_TEXT) == []


def test_texts_of_a_picture_stand_in_their_boxes(browser, tmp_path):
    transformer(13).to_svg(tmp_path / "plan.svg")
    browser.driver.get((tmp_path / "plan.svg").as_uri())
    assert count(browser, "g[data-node]:not([data-node='']) > text") == 2 * 13
    outside = (
        "const frame = (shape) => shape.getBoundingClientRect(), all = frame(document.documentElement);"
        "return [...document.querySelectorAll('g > text')].filter((text) => {"
        "  const one = frame(text), badge = frame(text.parentNode.querySelector('rect'));"
        "  const [left, right] = text.matches('.type') ? [badge.left, badge.right] : [badge.right, all.right];"
        "  return one.width && (one.left < left || one.right > right || one.bottom > badge.bottom + 1);"
        "}).map((text) => text.textContent)"
    )
    assert browser.run(outside) == []


def paper(browser) -> None:
    """What printing does to the page: a sheet of A4 across, and the browser's word that it begins."""
    browser.resize(1030, 730)
    browser.media("print")
    browser.run("for (const name of ['beforeprint', 'resize']) dispatchEvent(new Event(name))")


CUT = """
const seen = (element) => element.getClientRects().length && !element.closest("svg");
const cut = ({scrollWidth, clientWidth}) => clientWidth && scrollWidth > clientWidth + 1;
return [...document.querySelectorAll("body *")].filter((element) => seen(element) && cut(element))
  .map((element) => element.outerHTML.slice(0, 90));
"""


@pytest.mark.parametrize(("name", "fragment"), [("two", ""), ("step", "#node=linear"), ("hostile", "")])
def test_on_paper_all_is_there(browser, pages, name, fragment):
    browser.open(pages[name], fragment, scheme="dark")
    paper(browser)
    lists = browser.run(
        "return [...document.querySelectorAll('.list')].map((list) => [list.getClientRects().length > 0,"
        "  list.querySelectorAll('tbody tr').length, getComputedStyle(list, '::before').content])"
    )
    for shown, rows, title in lists:
        assert shown and title.replace(",", "").strip('"').split(" ")[-1] == str(rows)
    if name == "two":  # the 6 norms and the casts around them, and no other
        assert column(browser, 2) == ["aten.layer_norm"] * 2 * LAYERS
        assert [title.split(":")[0] for _, _, title in lists[:2]] == ['"nodes that differ', '"casts that differ']
    assert browser.run(CUT) == []
    assert browser.run("return [...document.querySelectorAll('.list .badge')].every((one) => one.offsetHeight < 24)")
    outside = (
        "const [pane, layer] = ['.pane', '.layer'].map((one) => document.querySelector(one).getBoundingClientRect());"
        "return layer.left < pane.left || layer.right > pane.right || layer.top < pane.top"
        "  || layer.bottom > pane.bottom + 1"
    )
    assert not browser.run(outside)
    if name == "step":
        shown = (
            "return [...document.querySelectorAll('#advice, .measured')].every((one) => one.getClientRects().length)"
        )
        assert browser.run(shown) and "static loss scale" in text(browser, "#advice")
    assert browser.run("return getComputedStyle(document.body).color") == "rgb(27, 35, 48)"
    browser.media("")
    until(lambda: not browser.run("return document.querySelector('.pane').hasAttribute('viewBox')"))


def test_a_long_line_of_code_is_read_whole(browser, tmp_path):
    file = tmp_path / "model.py"
    line = "y = relu(" + " + ".join(f"weights[{number}]" for number in range(40)) + ")"
    file.write_text(line + "\n", encoding="utf-8")
    plan = transformer(13)
    nodes = tuple(replace(node, source=f"{file}:1") for node in plan.nodes)
    replace(plan, nodes=nodes).to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html", "#node=linear_1")
    assert text(browser, "#details pre") == line
    assert browser.run(
        "const {scrollWidth, clientWidth} = document.querySelector('#details pre'); return scrollWidth <= clientWidth"
    )


def test_names_run_nothing(browser, pages):
    browser.open(pages["hostile"])
    assert browser.run("return document.scripts.length") == 3
    click(browser, "#list-nodes tbody tr")
    assert text(browser, "#details h3") == hostile_plan().nodes[0].name
    assert browser.run("return document.documentElement.dataset.ready") == "yes"


@pytest.mark.parametrize("seed", range(3))
def test_any_two_plans_can_be_drawn(browser, tmp_path, seed):
    rng = random.Random(seed)
    one, other = (random_plan(rng, rng.randint(1, 150)) for _ in range(2))
    one.to_html(tmp_path / "page.html", other=other)
    browser.open(tmp_path / "page.html")
    click(browser, "#unfold")
    both = {node.name for plan in (one, other) for node in plan.nodes}
    for side, plan in enumerate((one, other)):
        boxes = browser.run(
            "const boxes = document.querySelectorAll('.pane')[arguments[0]].querySelectorAll('.box');"
            "return [...boxes].map((box) => [box.dataset.node, box.classList.contains('absent')])",
            side,
        )
        assert sorted(name for name, _ in boxes) == sorted(both)
        assert {name for name, absent in boxes if not absent} == {node.name for node in plan.nodes}
    places = browser.run(
        "const shapes = [...document.querySelector('.layer').querySelectorAll('.box .body, .pill .body')];"
        "const places = shapes.map((shape) => shape.getBoundingClientRect());"
        "return places.map(({x, y, width, height}) => [x, y, width, height])"
    )
    for (x, y, width, height), (left, top, wide, high) in combinations(places, 2):
        assert x + width <= left + 1 or left + wide <= x + 1 or y + height <= top + 1 or top + high <= y + 1


def test_a_plan_of_no_nodes_opens(browser, tmp_path):
    PrecisionPlan("bf16", "default", "cpu", (), ()).to_html(tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert text(browser, "#found") == "0 nodes"
