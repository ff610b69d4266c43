"""The folder of what is kept from process to process: compiled loops, traced graphs."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """The folder, made where there is none: `AMP_COMPILER_CACHE`, else one of this user's among temporary files.

    Raises:
        OSError: it cannot be made, or belongs to another user, who could have put anything into it.
    """
    setting = os.environ.get("AMP_COMPILER_CACHE")
    user = str(os.getuid()) if hasattr(os, "getuid") else getpass.getuser()  # in a container it may have no name
    folder = Path(setting) if setting else Path(tempfile.gettempdir()) / f"amp_compiler_{user}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    owner = folder.stat().st_uid
    if hasattr(os, "getuid") and owner != os.getuid():
        raise OSError(f"the folder {folder} belongs to another user; set AMP_COMPILER_CACHE to one of yours")
    return folder
