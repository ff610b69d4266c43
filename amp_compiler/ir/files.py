"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from amp_compiler.errors import AmpError


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write `content` to a temporary file beside `path`, then rename it over `path`.

    Raises:
        AmpError: where the folder does not exist or cannot be written.
    """
    target = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as cause:
        raise AmpError(
            f"cannot write there: {cause.strerror}",
            where=str(target),
            mend="name a file in a folder that can be written",
        ) from cause
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as cause:
        Path(temporary).unlink(missing_ok=True)
        raise AmpError(f"cannot write there: {cause.strerror}", where=str(target), mend="name a file") from cause
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
