"""What is wrong with a command line."""

from __future__ import annotations

from amp_compiler.errors import AmpError


class UsageError(AmpError):
    """An option cannot be what it is, or does not go with another one; the command ends with exit code 2."""
