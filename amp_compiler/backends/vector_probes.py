"""What torch found out about this processor's vector instructions, kept from process to process.

Inductor builds a small library for each set of instructions that the processor has, and lets a process of its own load
each to see whether that works: about a second, in every process that compiles for a CPU. The libraries are kept by
torch; what became of them is kept here.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically
from amp_compiler.ops.cache_folder import cache_folder


def remembered(load: Callable[[str], bool]) -> Callable[[str], bool]:
    """A probe that loads a library only where it is not known to load; what fails is tried again by each process.

    Args:
        load: tries whether the library at a path loads.
    """

    def probe(library: str) -> bool:
        mark = _mark(library)
        if mark is not None and mark.exists():
            return True
        loads = load(library)
        if loads and mark is not None:
            try:
                write_atomically(mark, library)
            except AmpError:  # a full disk: the next process tries again
                return True
        return loads

    return probe


def _mark(library: str) -> Path | None:
    """The file that says that a library loads, by this Python and torch and on this machine; `None` where none can be.

    A library that was built anew has another time, and so another file.
    """
    try:
        file = Path(library).resolve(strict=True)
        state = file.stat()
        folder = cache_folder()
    except OSError:
        return None
    machine = [platform.node(), platform.machine(), torch.backends.cpu.get_cpu_capability()]
    text = json.dumps([str(file), state.st_size, state.st_mtime_ns, sys.executable, torch.__version__, *machine])
    return folder / f"loads_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
