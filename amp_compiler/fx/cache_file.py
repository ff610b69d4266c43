"""What a process has compiled, in one file: torch's portable cache, with files of ours and code for a CPU in it.

Torch's cache holds graphs and Triton kernels, and none of the libraries that a C++ compiler made for a CPU.
"""

import hashlib
import io
import json
import platform
import re
import zipfile
import zlib
from importlib.metadata import version
from pathlib import Path

import torch

from amp_compiler.errors import AmpError
from amp_compiler.fx.torch_private.inductor import kernel_folder, kernel_libraries
from amp_compiler.ir.files import write_atomically
from amp_compiler.ops.cache_folder import cache_folder
from amp_compiler.ops.cpu.build import library, processor

_ANEW = "write it again with amp.save_cache"
_TORCHS = "artifacts"  # what torch.compiler.save_cache_artifacts gives
_OURS = re.compile(r"ours/(joint_\w+\.gz|cpu_loops_\w+\.so)")
_KERNELS = re.compile(r"torch/(\w\w/\w+(\.\w+)?\.so)")


_KEPT: dict[Path, None] = {}  # files in the folder of ours that this process has written or read


def keep(file: Path) -> None:
    """Let `save_cache` save a file of the folder of ours.

    Args:
        file: its path.
    """
    _KEPT[file] = None


def save_cache(path: str | Path | None = None) -> bytes:
    """Save what this process has compiled, so that another one need not: torch's cache artifacts, and ours.

    Args:
        path: a file to write, as a whole or not at all.

    Returns:
        What `load_cache` takes, which is what the file holds.

    Raises:
        AmpError: nothing has been compiled yet, or the file cannot be written.

    Example:
        >>> amp.save_cache("model.cache")  # doctest: +SKIP
    """
    files: dict[str, bytes] = {}
    try:
        if library.cache_info().currsize and (loops := library()) is not None:
            keep(Path(loops._name))
        files |= {f"ours/{file.name}": file.read_bytes() for file in [*_KEPT] if file.exists()}
        probes = [Path(mark.read_text(encoding="utf-8")) for mark in sorted(cache_folder().glob("loads_*"))]
        for file in [*kernel_libraries(), *probes]:
            if file.is_relative_to(kernel_folder()) and file.exists():
                files[f"torch/{file.relative_to(kernel_folder()).as_posix()}"] = file.read_bytes()
    except OSError as cause:
        raise AmpError(
            f"compiled code cannot be read: {cause.strerror}", where=str(cause.filename), hint="compile it again"
        ) from cause
    if (saved := torch.compiler.save_cache_artifacts()) is not None:
        files[_TORCHS] = saved[0]
    if not files:
        raise AmpError("nothing has been compiled yet", hint="call the model or the step first")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = json.dumps(_versions()).encode()
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name), files[name])  # with no date, so that equal caches are equal files
    content = packed.getvalue()
    if path is not None:
        write_atomically(path, content)
    return content


def load_cache(source: str | Path | bytes) -> None:
    """Put what another process has compiled into the caches of torch and of ours.

    What is loaded runs: load a file only from where you would run code from. Do it before the first compilation.

    Args:
        source: a file that `save_cache` wrote, or the bytes that it returned.

    Raises:
        AmpError: it cannot be read, is damaged or no such file, or comes from another version of torch, Python or this
            package, or from another kind of processor.

    Example:
        >>> amp.load_cache("model.cache")  # doctest: +SKIP
    """
    where = "" if isinstance(source, bytes) else str(source)
    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
    except OSError as cause:
        raise AmpError(f"cannot be read: {cause.strerror}", where=where, hint="check the path") from cause
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_versions(dict(json.loads(archive.comment)), where)
            files = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, ValueError, TypeError, EOFError, RuntimeError) as cause:
        raise AmpError(
            "this is no cache that amp.save_cache made, or it is damaged", where=where, hint=_ANEW
        ) from cause
    try:
        for name, one in files.items():
            _put(name, one, where)
    except OSError as cause:
        raise AmpError(
            f"the cache cannot be written: {cause.strerror}",
            where=str(cause.filename),
            hint="free or change the folder",
        ) from cause


def _check_versions(saved: dict[str, str], where: str) -> None:
    for name, here in _versions().items():
        if saved.get(name) != here:
            raise AmpError(
                f"the cache was made for {name} {saved.get(name)}, and this is {here}", where=where, hint=_ANEW
            )


def _versions() -> dict[str, str]:
    """What compiled code is made for, under the names that an error says."""
    return {
        "amp_compiler": version("amp_compiler"),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the processor": hashlib.sha256(processor().encode()).hexdigest()[:12],
    }


def _put(name: str, content: bytes, where: str) -> None:
    """Give torch what is its own, and write a file into the folder that it came from."""
    if name == _TORCHS:
        if torch.compiler.load_cache_artifacts(content) is None:
            raise AmpError("torch cannot read its part of the cache", where=where, hint=_ANEW)
        return
    if match := _OURS.fullmatch(name):
        target = cache_folder() / match[1]
    elif match := _KERNELS.fullmatch(name):
        target = kernel_folder() / match[1]
        target.parent.mkdir(parents=True, exist_ok=True)
    else:
        raise AmpError(f"the cache names a file that is none of it: {name!r}", where=where, hint=_ANEW)
    if not target.exists():
        write_atomically(target, content)
