"""Whatever file is given, made into a rule file by the reader that knows its form."""

from __future__ import annotations

from pathlib import Path

from amp_compiler.policy.exclusions import Imported
from amp_compiler.policy.exclusions import import_rules as import_list
from amp_compiler.policy.importing.deepspeed import import_deepspeed, is_deepspeed
from amp_compiler.policy.importing.nvcaffe import import_nvcaffe

_TEXT_FORMAT = (".prototxt", ".pbtxt")


def import_file(path: Path, *, extends: str | None = None) -> Imported:
    """Make a rule file of a file of another system.

    Args:
        path: a `.prototxt` of NVCaffe (a net, or a solver that names one); a JSON configuration of DeepSpeed; or a
            list of names as in `policy.exclusions`.
        extends: what the rules stand on; `None` for what fits the form: `default` for a list, `deepspeed` for
            DeepSpeed, nothing for a net, which says all.

    Raises:
        RuleError: the file cannot be read, or asks for what no rule can ask for.

    Example:
        ```python
        print(import_file(Path("ds_config.json")).to_text())
        ```
    """
    if path.suffix in _TEXT_FORMAT:
        return import_nvcaffe(path, extends=extends)
    if path.suffix == ".json" and is_deepspeed(path):
        return import_deepspeed(path, extends=extends)
    return import_list(path, extends=extends or "default")
