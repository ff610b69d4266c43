"""The command line, called as a user calls it but in this process."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_compiler.cli import main as cli

Shell = Callable[..., tuple[int, str, str]]
ERRORS = Path(__file__).parents[2] / "docs" / "errors.md"
SECTIONS = {title.lower() for title in re.findall(r"^## (.*)", ERRORS.read_text(encoding="utf-8"), re.MULTILINE)}


WIDE = """
import torch

class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        torch.nn.init.constant_(self.wide.weight, 5e4)

    def forward(self, x):
        return self.last(self.wide(x.abs() + 1) * 1e-5)

def loss(model, x):
    return model(x).float().square().mean()
"""


@pytest.fixture
def wide(tmp_path: Path) -> str:
    """A model whose first product FP16 does not hold; `:loss` stands beside it."""
    (tmp_path / "wide_model.py").write_text(WIDE, encoding="utf-8")
    return f"{tmp_path / 'wide_model.py'}:Wide"


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
        assert {*re.findall(r"see:  docs/errors.md#(.*)", captured.err)} <= SECTIONS
        assert isinstance(code, int)
        return code, captured.out, captured.err

    return call
