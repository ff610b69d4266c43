"""Compilers for processors that can do less than this one, for the tests of loops in C++ beside it."""

from __future__ import annotations

import os
import subprocess

import pytest

from amp_compiler.ops.cpu import build


def compiler_without(features: str) -> tuple[list[str], str]:
    """A command of g++ that leaves features out, and the macros that it then defines; skips where there is none.

    Args:
        features: as g++ names them, such as "avx512f avx2".
    """
    compiler = ["g++", *(f"-mno-{feature}" for feature in features.split())]
    asked = [*compiler, *build._FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        return compiler, subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no g++ that knows these flags")
