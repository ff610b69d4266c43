"""`amp-compiler passes`: the catalogue, and all that one pass says of itself."""

import inspect

import pytest

from amp_compiler.cli import passes as catalogue
from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.pipeline import PIPELINES


def test_the_catalogue_has_every_pass_in_the_order_of_the_run(shell):
    code, out, _ = shell("passes")
    assert code == 0
    lines = out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [f"{one.name}: {one.about}" for one in PIPELINES]
    assert [line.split()[0] for line in lines if line.startswith(" ")] == [
        name for one in PIPELINES for name in one.names
    ]
    assert {name for one in PIPELINES for name in one.names} == set(PASSES)
    assert all(one.about.endswith(".") for one in PIPELINES)
    assert "\x1b" not in out


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_says_what_it_does(name):
    """The first line of its docstring is a sentence that stands by itself."""
    line = catalogue.summary(find_pass(name))
    assert line and line[-1] in ".;:", f"{name}: {line!r}"
    assert line[0].isupper()


def test_a_pass_prints_its_whole_docstring(shell):
    code, out, _ = shell("passes", "simplify_casts")
    assert code == 0
    assert out.endswith(f"\n\n{inspect.getdoc(find_pass('simplify_casts'))}\n")
    assert out.startswith(
        "simplify_casts: `passes/step/simplify_casts.py` · in place · changes no number · may be skipped"
    )


def test_an_unknown_pass_is_an_error_with_the_nearest(shell):
    code, out, err = shell("passes", "simplify_cast")
    assert (code, out) == (2, "")
    assert "there is no pass 'simplify_cast'" in err
    assert "did you mean 'simplify_casts'?" in err
