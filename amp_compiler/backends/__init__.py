"""What executes a rewritten graph. `BACKENDS` is the one table of them: a new backend is a file and a name in it."""

from __future__ import annotations

import difflib
from typing import Literal

from amp_compiler.backends import eager, inductor
from amp_compiler.backends.backend import Backend
from amp_compiler.errors import AmpError

BackendName = Literal["inductor", "eager"]
BackendArgument = BackendName | Backend
BACKENDS: dict[str, Backend] = {one.name: one for one in (inductor.BACKEND, eager.BACKEND)}


def find_backend(name: object) -> Backend:
    """The backend of that name.

    Args:
        name: a key of `BACKENDS`, or a backend of one's own, as it is.

    Raises:
        AmpError: there is none of that name.

    Example:
        >>> find_backend("eager").compiled
        False
    """
    if isinstance(name, Backend):
        return name
    if not isinstance(name, str) or name not in BACKENDS:
        near = difflib.get_close_matches(str(name), BACKENDS, 1)
        known = f"use one of {', '.join(map(repr, BACKENDS))}"
        raise AmpError(f"backend={name!r} is not known", hint=f"did you mean '{near[0]}'?" if near else known)
    return BACKENDS[name]
