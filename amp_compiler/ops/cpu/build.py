"""Compiles what is written in C++ once per machine and source, and keeps the library in a cache folder."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from amp_compiler.ops.cache_folder import cache_folder

_LOG = logging.getLogger(__name__)
# No value is reordered and no multiply-add is contracted: results are those of the reference, bit for bit.
_FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp",
    "-shared", "-fPIC",
)  # fmt: skip
_NAME = "cpu_loops"
_SUFFIXES = (".cpp", ".h")  # of the sources: every such file beside this one
_TIMEOUT = 600  # seconds; it takes about ten, and many times that beside other work


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library of the loops for a CPU; `None`, with the reason in the log, where it cannot be made.

    `CXX` names the compiler (g++ or clang++), and `AMP_COMPILER_CACHE` the folder that keeps the library.
    """
    without = "updates, recurrent layers, attention run as torch calls, slower"
    compiler = compiler_command()
    if not compiler:
        _LOG.warning("no C++ compiler was found: %s", without)
        return None
    files = [file for file in resources.files(__package__).iterdir() if file.name.endswith(_SUFFIXES)]
    sources = {file.name: file.read_text(encoding="utf-8") for file in sorted(files, key=lambda file: file.name)}
    try:
        return ctypes.CDLL(str(_built(compiler, sources)))
    except (OSError, subprocess.SubprocessError) as cause:
        detail = getattr(cause, "stderr", None) or str(cause)
        _LOG.warning("'%s' cannot build '%s' (%s): %s", shlex.join(compiler), _NAME, without, detail)
        return None


def compiler_command() -> list[str]:
    """The command of the C++ compiler; empty where there is none."""
    command = shlex.split(os.environ.get("CXX", ""))  # such as "ccache g++"
    return command or [one for one in ("g++", "clang++", "c++") if shutil.which(one)][:1]


def _built(compiler: list[str], sources: dict[str, str]) -> Path:
    """The library's file, compiled where the cache has none; of processes that start together, one compiles."""
    key = hashlib.sha256("\0".join((*sources.values(), *compiler, *_FLAGS, processor())).encode()).hexdigest()[:16]
    folder = cache_folder()
    target = folder / f"{_NAME}_{key}.so"
    if target.exists():
        return target
    with _alone(folder), tempfile.TemporaryDirectory(dir=folder) as work:
        if target.exists():  # by another process, meanwhile
            return target
        for file, text in sources.items():
            (Path(work) / file).write_text(text, encoding="utf-8")
        code, library = [str(Path(work) / file) for file in sources if file.endswith(".cpp")], Path(work) / target.name
        subprocess.run(
            [*compiler, *_FLAGS, *code, "-o", str(library)],
            check=True, capture_output=True, text=True, timeout=_TIMEOUT,
        )  # fmt: skip
        library.replace(target)
    return target


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes out; where the system has no such locks, two may compile, and none sees half a file."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # as NFS has no such lock on a folder
            fcntl.flock(opened, fcntl.LOCK_EX)  # freed with what is open, whatever becomes of the process
        yield
    finally:
        os.close(opened)


def processor() -> str:
    """What `-march=native` depends on, so that a cache on a shared disk serves several kinds of machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"
