"""The JSON schema of rule files, by which editors complete and check them: `rules/schema.json`."""

from __future__ import annotations

from typing import Any

from amp_compiler.policy.op_table import op_table
from amp_compiler.policy.schema import RuleFileModel
from amp_compiler.policy.sources import preset_names


def schema() -> dict[str, Any]:
    """The JSON schema of a rule file, with the known families and presets as suggestions.

    Example:
        >>> schema()["title"]
        'amp_compiler rules'
    """
    whole = RuleFileModel.model_json_schema(mode="validation")
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", **whole}
    families = sorted(op_table().families)
    entry = {"anyOf": [{"enum": families}, {"type": "string", "pattern": r"[.*?\[]"}]}
    for name in ("allow", "whitelist", "deny", "blacklist"):
        whole["properties"][name]["items"] = entry
    for option in whole["$defs"]["MatchModel"]["properties"]["family"]["anyOf"]:
        option.get("items", option)["enum"] = families
    whole["properties"]["extends"]["examples"] = list(preset_names())
    cleaned: dict[str, Any] = _without_null_defaults(whole)
    return cleaned


def _without_null_defaults(part: Any) -> Any:
    """The schema without `default: null`, which would suggest that a null may be written."""
    if isinstance(part, dict):
        return {key: _without_null_defaults(item) for key, item in part.items() if key != "default" or item is not None}
    return [_without_null_defaults(item) for item in part] if isinstance(part, list) else part
