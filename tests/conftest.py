"""Beside the tests' helper modules, so that pytest puts this folder on the import path; a table of the GPU tests."""

from __future__ import annotations

from typing import Any

import pytest
from benchmark_modules import benchmark_modules


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """With `-m gpu` (`make test-gpu`): one line per test with its outcome, seconds and what it measured."""
    if config.getoption("markexpr") != "gpu":
        return
    rows = [
        (report.nodeid.removeprefix("tests/"), outcome, report.duration, report.user_properties)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call" or outcome != "passed"
    ]
    terminalreporter.section("tests on the GPU")
    for name, outcome, seconds, figures in sorted(rows):
        measured = ", ".join(f"{key} {value}" for key, value in figures)
        terminalreporter.write_line(f"{outcome:7}  {seconds:7.2f} s  {name}{'  ' if measured else ''}{measured}")
    if all(outcome == "skipped" for _, outcome, _, _ in rows):
        terminalreporter.write_line("nothing ran: torch sees no CUDA device here")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a step was captured."""
    import amp_compiler.training.step as training

    seen: list[int] = []
    real = training.build_step
    monkeypatch.setattr(training, "build_step", lambda *arguments: (seen.append(1), real(*arguments))[1])
    return seen


@pytest.fixture(scope="session")
def bench() -> dict[str, Any]:
    """The benchmarks' modules."""
    pytest.importorskip("transformers")
    return benchmark_modules()
