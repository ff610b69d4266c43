"""A forward that prints: a graph would print once, while it is captured, and never again."""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from amp_compiler.errors import CaptureError
from amp_compiler.fx.code_names import Origin, origin_of
from amp_compiler.fx.graph import shorten_path


@contextlib.contextmanager
def prints_refused() -> Iterator[None]:
    """Within it a forward is captured that is to be run later: it prints nothing.

    Raises:
        CaptureError: it would have printed, as Dynamo's pieces do at every call; names the line.
    """
    thread, printing, lines = threading.get_ident(), builtins.print, list[str]()

    def watched(*values: Any, **options: Any) -> None:
        caller = sys._getframe(1)
        foreign = origin_of(str(caller.f_globals.get("__name__", ""))) is Origin.FOREIGN
        if threading.get_ident() == thread and not foreign:
            lines.append(f"{shorten_path(caller.f_code.co_filename)}:{caller.f_lineno}")
        else:
            printing(*values, **options)

    builtins.print = watched
    try:
        yield
    finally:
        builtins.print = printing
    if lines:
        raise CaptureError(
            "forward prints, which one graph cannot do at every call",
            where=lines[0],
            hint="print behind the call, or under `if not torch.compiler.is_compiling()`",
        )
