"""Lists of what stays FP32, as other converters read them, made into a rule file.

Three forms are known. A text with a name on each line, of nodes that stay FP32, or with `name:precision` as in the
`--layer-precisions` of Polygraphy; `*` and `?` stand for any letters. A mapping in JSON or YAML with the options of
NVIDIA ModelOpt's AutoCast (`nodes_to_exclude`, `op_types_to_exclude`, `data_max`, `init_max`, …), or with those of the
float16 converters of ONNX Runtime and onnxconverter-common (`op_block_list`, `node_block_list`). A list in JSON or YAML
of such names.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from amp_compiler.errors import RuleError
from amp_compiler.policy.importing.facts import read_text
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.marks import nearest
from amp_compiler.policy.op_table import op_table

_PRECISIONS = {
    **dict.fromkeys(("float32", "fp32", "float", "kfloat"), "fp32"),
    **dict.fromkeys(("float16", "fp16", "half", "khalf", "bfloat16", "bf16", "kbf16"), "low"),
}
_OPTIONS = {
    "low_precision_type": "--dtype",
    "keep_io_types": "--keep-io-types",
    "calibration_data": "--calibrate",
    "trt_plugins": "--custom-ops",
    "providers": "--provider",
    "opset": "--opset",
    "output_path": "OUT.onnx",
    "onnx_path": "IN.onnx",
}


@dataclass
class Imported:
    """What came of a list.

    Args:
        rules: the rule file as a dict.
        notes: what the list says that is no rule, in a sentence each.
    """

    rules: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def to_text(self) -> str:
        """The rule file as YAML, with the notes as comments."""
        yaml = YAML()
        yaml.width = 110
        yaml.indent(mapping=2, sequence=4, offset=2)
        text = io.StringIO()
        yaml.dump(self.rules, text)
        head = ["# yaml-language-server: $schema=schema.json", *(f"# {note}" for note in self.notes)]
        return "\n".join(head) + "\n" + text.getvalue()


def import_rules(path: Path, *, extends: str = "default") -> Imported:
    """Make a rule file of a list.

    Args:
        path: the list, see the head of this module.
        extends: what the rules stand on.

    Returns:
        The rules, in the order of the list; what it asks to be low stands last and wins, as it does in AutoCast.

    Raises:
        RuleError: the list cannot be read, or names an op, an option or a precision that is not known.

    Example:
        ```python
        Path("exclude.txt").write_text("/lm_head/MatMul:float32\\n")
        print(import_rules(Path("exclude.txt")).to_text())
        ```
    """
    reader = _Reader(path)
    data = _parsed(path)
    if isinstance(data, dict):
        for key, value in data.items():
            reader.option(str(key), value)
    elif isinstance(data, list):
        for entry in data:
            reader.line(reader.text(entry, "the list"))
    else:
        for line in str(data or "").splitlines():
            reader.line(line.partition("#")[0].strip())
    rules = [*reader.fp32, *reader.low]
    if not rules:
        raise RuleError("it names no node and no op", file=str(path), hint="write a name on each line")
    imported = Imported({"version": 1, "extends": extends, "rules": rules}, reader.notes)
    load_rules(imported.rules)  # whatever is wrong with it is told now
    return imported


def _parsed(path: Path) -> Any:
    """A mapping or a list, or the text where it is neither."""
    text = read_text(path)
    if path.suffix == ".json" or text.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(text)
        except ValueError as cause:
            raise RuleError(f"it is no JSON: {cause}", file=str(path), hint="correct the syntax there") from cause
    if path.suffix in (".yaml", ".yml"):
        try:
            return YAML(typ="safe").load(text)
        except YAMLError as cause:
            raise RuleError(f"it is no YAML: {cause}", file=str(path), hint="correct the syntax there") from cause
    return text


class _Reader:
    """Collects rules.

    Args:
        path: the list, for messages and reasons.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fp32: list[dict[str, Any]] = []
        self.low: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._options: dict[str, Callable[[str, Any], None]] = {
            "nodes_to_exclude": partial(self._nodes, "fp32", _pattern),
            "nodes_to_include": partial(self._nodes, "low", _pattern),
            "op_types_to_exclude": partial(self._ops, "fp32"),
            "op_types_to_include": partial(self._ops, "low"),
            "op_block_list": partial(self._ops, "fp32"),
            "node_block_list": partial(self._nodes, "fp32", lambda name: f"^{re.escape(name)}$"),
            "layer_precisions": self._precisions,
            "data_max": partial(self._bound, "absmax"),
            "init_max": partial(self._bound, "weight_absmax"),
            "max_depth_of_reduction": partial(self._bound, "reduction_size"),
        }

    def option(self, key: str, value: Any) -> None:
        """One option of a mapping."""
        if value is None:
            return
        if key in self._options:
            self._options[key](key, value)
        elif key in _OPTIONS:
            self.notes.append(f"{key} is no rule: see the option {_OPTIONS[key]} of amp-compiler convert")
        else:
            known = sorted((*self._options, *_OPTIONS))
            raise self._error(
                f"'{key}' is no option that is known", nearest(key, known, "see `rules import --help`"), key
            )

    def line(self, text: str) -> None:
        """A name, or a name with a precision."""
        if not text:
            return
        name, colon, precision = text.rpartition(":")
        if colon and precision.strip().lower() in _PRECISIONS:
            self._add(_PRECISIONS[precision.strip().lower()], {"node": _glob(name.strip())}, f"'{text}'")
        elif colon and re.fullmatch(r"[a-z]+\d+", precision.strip().lower()):
            raise self._error(
                f"'{precision.strip()}' is no precision that a rule can ask for",
                "write float32, float16 or bfloat16, or remove the line",
                text,
            )
        else:
            self._add("fp32", {"node": _glob(text)}, f"'{text}'")

    def text(self, entry: Any, where: str) -> str:
        """An entry of a list, which must be a name."""
        if not isinstance(entry, str) or not entry.strip():
            raise self._error(f"an entry is {json.dumps(entry)[:60]}, which is no name", "write names", where)
        return entry.strip()

    def _add(self, precision: str, match: dict[str, Any], source: str) -> None:
        rules = self.fp32 if precision == "fp32" else self.low
        rules.append({"match": match, "precision": precision, "why": f"{source} in {self.path.name}"})

    def _error(self, what: str, hint: str, key: str) -> RuleError:
        return RuleError(what, file=str(self.path), key=key, hint=hint)

    def _listed(self, key: str, value: Any) -> list[str]:
        entries = value if isinstance(value, list) else str(value).split(",") if isinstance(value, str) else None
        if entries is None:
            raise self._error("it is no list of names", "write [name, name]", key)
        return [self.text(entry, key) for entry in entries]

    def _nodes(self, precision: str, form: Callable[[str], str], key: str, value: Any) -> None:
        patterns = []
        for entry in self._listed(key, value):
            try:
                re.compile(form(entry))
            except re.error as cause:
                raise self._error(f"'{entry}' is no regular expression: {cause}", "correct it", key) from cause
            patterns.append(form(entry))
        if patterns:
            self._add(precision, {"node": patterns}, key)

    def _ops(self, precision: str, key: str, value: Any) -> None:
        known = op_table().ops
        matches = []
        for entry in self._listed(key, value):
            name = entry if "." in entry else f"onnx.{entry}"
            if name.startswith("onnx.") and name not in known:
                names = sorted(op.removeprefix("onnx.") for op in known if op.startswith("onnx."))
                raise self._error(f"there is no ONNX op '{entry}'", nearest(entry, names), key)
            matches.append(name)
        if matches:
            self._add(precision, {"op": matches}, key)

    def _bound(self, matcher: str, key: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise self._error(f"it is {json.dumps(value)[:60]}, which is no number", "write a number", key)
        self._add("fp32", {matcher: f"> {value:g}"}, key)

    def _precisions(self, key: str, value: Any) -> None:
        if isinstance(value, dict):
            value = [f"{name}:{precision}" for name, precision in value.items()]
        for entry in self._listed(key, value):
            self.line(entry)


def _glob(name: str) -> str:
    return f"^{re.escape(name).replace(re.escape('*'), '.*').replace(re.escape('?'), '.')}$"


def _pattern(text: str) -> str:
    """A regular expression that must match from the beginning of a name on, as `re.match` asks for."""
    return text if text.startswith("^") else f"^(?:{text})"
