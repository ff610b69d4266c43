"""What the systems know, read from the YAML files beside this one."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from amp_compiler.errors import RuleError
from amp_compiler.policy.yaml_tree import parse_yaml

LEAST, MOST = 2.0**-126, 2.0**127 * (2 - 2.0**-23)  # of FP32's normal numbers
_BYTES = 10_000_000  # that a file which is imported has at most


@cache
def facts(name: str) -> dict[str, Any]:
    """The facts about a system.

    Args:
        name: of its file, without `.yaml`.
    """
    text = (files("amp_compiler.policy.importing") / f"{name}.yaml").read_text(encoding="utf-8")
    data: dict[str, Any] = parse_yaml(text, f"{name}.yaml").plain()
    return data


def read_text(path: Path) -> str:
    """The text of a file that a user names.

    Raises:
        RuleError: it cannot be read, is too large, or is no text.
    """
    try:
        if path.stat().st_size > _BYTES:
            raise RuleError("it is too large", file=str(path), hint="name a list, or what a run is set up with")
        return path.read_text(encoding="utf-8")
    except OSError as cause:
        why = (cause.strerror or str(cause)).lower()
        raise RuleError(f"it cannot be read: {why}", file=str(path), hint="name a file") from cause
    except UnicodeDecodeError as cause:
        raise RuleError("it is no UTF-8 text", file=str(path), hint="name a text file") from cause
