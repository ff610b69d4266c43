"""The command line, called as a user calls it but in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from amp_compiler.cli import main as cli

Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """Runs `amp-compiler` with arguments and gives (exit code, standard output, standard error)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["amp-compiler", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        monkeypatch.setenv("COLUMNS", "200")
        code: int | str | None = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return call
