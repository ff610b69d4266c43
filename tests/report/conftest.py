"""A window of the browser, for the tests that open pages."""

import importlib.util
import os
from pathlib import Path

import pytest

REQUIRED = os.environ.get("AMP_BROWSER") == "require"  # continuous integration must not leave them out
_SPEC = importlib.util.spec_from_file_location("chromium", Path(__file__).parents[2] / "tools" / "chromium.py")
chromium = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(chromium)


@pytest.fixture(scope="session")
def window():
    lacking = chromium.missing()
    if lacking and not REQUIRED:
        pytest.skip(lacking)
    assert not lacking, f"AMP_BROWSER=require: {lacking}"
    with chromium.window() as opened:
        yield opened


@pytest.fixture
def browser(window):
    """The window; nothing may have come to its console when the test ends."""
    window.complaints()
    yield window
    assert window.complaints() == []
