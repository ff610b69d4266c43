"""Rules as the text of a YAML file that extends others."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amp_compiler.policy.sources import FROM_DICT, preset_names


def head_lines(name: str, data: Mapping[str, Any] | None = None, folder: Path | None = None) -> list[str]:
    """The lines up to the first rule that is put behind those of a rule set, `rules:` among them.

    Args:
        name: of the rule set: a preset's or a path; or `FROM_DICT`.
        data: the dict that it came as. Where that is not at hand, no file can extend it, and the text says so.
        folder: where the file will be; `None` where it will be nowhere, so that paths are absolute.
    """
    if name != FROM_DICT:
        return ["version: 1", f"extends: {_extended(name, folder)}", "rules:"]
    if data is None:
        return ["# put these behind the rules of the dict", "rules:"]
    fields = {key: json.dumps(value, ensure_ascii=False) for key, value in data.items() if key != "rules"}
    if data.get("extends") is not None:
        fields["extends"] = _extended(str(data["extends"]), folder)
    lines = [*(f"{key}: {value}" for key, value in fields.items()), "rules:"]
    return lines + [f"  - {json.dumps(rule, ensure_ascii=False)}" for rule in data.get("rules") or []]


def _extended(name: str, folder: Path | None) -> str:
    """What stands behind `extends:` in a file in a folder."""
    if name in preset_names():
        return name
    path = Path(name).resolve()
    if folder is None:
        return json.dumps(str(path))
    near = Path(os.path.relpath(path, folder.resolve())).as_posix()
    return json.dumps(near if "/" in near else f"./{near}")


def rule_lines(match: Mapping[str, Any], precision: str, **words: Any) -> list[str]:
    """One rule.

    Args:
        match: what it is for.
        precision: what that runs in.
        words: what else it says, such as `math` and `why`; what is empty is left out.
    """
    conditions = ", ".join(f"{key}: {json.dumps(value)}" for key, value in match.items())
    lines = [f"  - match: {{{conditions}}}", f"    precision: {precision}"]
    return [*lines, *(f"    {key}: {json.dumps(value)}" for key, value in words.items() if value)]
