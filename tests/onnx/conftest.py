"""The data of a test are its own, whichever tests ran before it in its process."""

from __future__ import annotations

import pytest
from onnx_models import RNG

_FIRST = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def data_begin_anew():
    """Draw the same numbers in every test, in any order of tests."""
    RNG.bit_generator.state = _FIRST
