"""The recipes run, their results hold what they claim, and the page of the zoo is made from them."""

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
HELPERS = {"common", "pictures", "seeds", "text", "trials", "zoo"}
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


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_short_run_prints_every_way(load, name, capsys, tmp_path):
    module = load(name)
    result = load("common").main(*recipes(module), arguments=["--short", "--into", str(tmp_path)])
    message = capsys.readouterr().out
    for results in result:
        assert results["title"] in message
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


def test_the_trials_fail_where_the_page_says_so(load):
    trials = load("trials")
    results = json.loads(trials.RESULT.read_text(encoding="utf-8"))
    assert list(results["rows"]) == list(trials.SETTINGS)
    lost = {name: row["quality"][trials.FP32] - row["quality"][trials.NEITHER] for name, row in results["rows"].items()}
    failing = {"the same, a rate as many times as large", "Adam on the recipe's"}
    assert {name for name, points in lost.items() if points > 20} == failing
    assert all(points < 3 for name, points in lost.items() if name not in failing)


def test_with_its_heads_in_fp32_the_detector_comes_out_as_in_fp32_seed_by_seed(load):
    common, results = load("common"), RESULTS["detector"]
    exact, cured = (common.last(results, way) for way in (common.FP32, common.HEADS))
    assert len(exact) >= 6 and common.paired(cured, exact) >= -1


def test_standard_errors(load):
    common = load("common")
    assert common.standard_error([1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(3))
    assert common.advantage([2.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == pytest.approx(1 / math.sqrt(2 / 3))
    assert common.advantage([2.0, 3.0, 4.0], [1.0, 2.0, 3.0], higher=False) == pytest.approx(-1 / math.sqrt(2 / 3))
    assert common.advantage([1.0], [1.0]) == 0 and common.advantage([1.0], [2.0]) == -math.inf
    # Differences 1, 1 and 4: their mean is 2, its standard error 1.
    assert common.paired([2.0, 12.0, 24.0], [1.0, 11.0, 20.0]) == pytest.approx(2)
    assert common.paired([2.0, 12.0, 24.0], [1.0, 11.0, 20.0], higher=False) == pytest.approx(-2)


def test_the_page_of_the_zoo_is_current(load):
    zoo, pictures = load("zoo"), load("pictures")
    text = PAGE.read_text(encoding="utf-8")
    assert zoo.render(text, zoo.load()) == text
    for name, results in RESULTS.items():
        assert f"<!-- recipe: {name} -->" in text and f"pictures/zoo/{name}.svg" in text
        drawn = (ROOT / "docs" / "pictures" / "zoo" / f"{name}.svg").read_bytes()
        assert pictures.picture(results) == drawn
