"""Every row of the table through every door: as eager, in so many builds, as one graph or not."""

import importlib
from pathlib import Path

import pytest
from doors import run
from table import ROWS

for path in sorted(Path(__file__).parent.glob("rows_*.py")):
    importlib.import_module(path.stem)

CASES = [(name, door) for name, row in ROWS.items() for door in row.doors]
# By default each row goes through one door, with one of four rows through each.
QUICK = {(name, row.doors[number % len(row.doors)]) for number, (name, row) in enumerate(ROWS.items())}


@pytest.mark.parametrize(
    ("name", "door"), [pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow) for one in CASES]
)
def test_it_is_as_in_eager(name: str, door: str) -> None:
    row = ROWS[name]
    outcome = run(row, door)
    short, refused = row.today.get(door), row.refused.get(door)
    if short is not None:
        assert outcome.faults or outcome.refused, "it is right now: take `today` out of the row"
        pytest.xfail(short)
    assert not outcome.faults
    assert (refused is not None) == bool(outcome.refused), outcome.refused
    assert refused is None or refused in outcome.refused
    assert outcome.one_graph is (door not in row.broken.split() and refused is None)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("name", "door"),
    [
        pytest.param(n, d, marks=[pytest.mark.slow] * ((n, d) != ("second and third batch size", "backend")))
        for n, d in CASES
        if ROWS[n].inductor and d not in ROWS[n].today
    ],
)
def test_it_is_as_in_eager_where_it_is_compiled(name: str, door: str) -> None:
    outcome = run(ROWS[name], door, "inductor")
    assert not [fault for fault in outcome.faults if "builds" not in fault]
    assert not outcome.refused
