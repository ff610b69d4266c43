"""The data of a test are its own, whichever tests ran before it in its process."""

import sys

import pytest
from onnx_models import RNG

from amp_compiler.cli import main as cli

_FIRST = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def data_begin_anew():
    """Draw the same numbers in every test, in any order of tests."""
    RNG.bit_generator.state = _FIRST


@pytest.fixture
def shell(monkeypatch, capsys):
    """Calls `amp-compiler` with arguments and gives its exit code and all that it writes."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["amp-compiler", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as stop:
            cli.main()
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out + captured.err

    return call
