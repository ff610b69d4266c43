"""The recipes run, their results hold what they claim, and the page of the zoo is made from them."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "zoo.md"
RESULTS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (FOLDER / "results").glob("*.json")}
HELPERS = {"common", "pictures", "text", "zoo"}
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in HELPERS)


@pytest.fixture
def load(monkeypatch):
    """Imports a file of the recipes, as a script that stands beside it does."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


def recipes(module):
    return [one for one in vars(module).values() if type(one).__name__ == "Recipe"]


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == "seq2seq" else pytest.mark.slow) for one in SCRIPTS]
)
def test_a_short_run_prints_every_way(load, name, capsys, tmp_path):
    module = load(name)
    found = load("common").main(*recipes(module), arguments=["--short", "--into", str(tmp_path)])
    told = capsys.readouterr().out
    for results in found:
        assert results["title"] in told
        assert all(math.isfinite(run["quality"][-1]) for runs in results["runs"].values() for run in runs)
    assert not list(tmp_path.iterdir())


def test_every_recipe_has_results(load):
    assert {one.name for script in SCRIPTS for one in recipes(load(script))} == set(RESULTS)


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_the_results_hold_what_the_recipe_claims(load, name):
    common, results = load("common"), RESULTS[name]
    exact = common.last(results, common.FP32)
    assert len(exact) >= 3
    for way in results["runs"]:
        better = common.advantage(common.last(results, way), exact, results["higher"])
        if way in results["fails"]:
            assert better <= -3, way
        elif way in common.GOOD:
            assert better >= -1, way


def test_standard_errors(load):
    common = load("common")
    assert common.standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert common.advantage([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(2 / 3))
    assert common.advantage([2.0, 3.0, 4.0], [1.0, 2.0, 3.0], higher=False) == pytest.approx(-1 / math.sqrt(2 / 3))
    assert common.advantage([1.0], [1.0]) == 0 and common.advantage([1.0], [2.0]) == -math.inf


def test_the_page_of_the_zoo_is_current(load):
    zoo, pictures = load("zoo"), load("pictures")
    text = PAGE.read_text(encoding="utf-8")
    assert zoo.render(text, zoo.load()) == text
    for name, results in RESULTS.items():
        assert f"<!-- recipe: {name} -->" in text and f"pictures/zoo/{name}.svg" in text
        drawn = (ROOT / "docs" / "pictures" / "zoo" / f"{name}.svg").read_bytes()
        assert pictures.picture(results) == drawn
