"""What the execution providers of ONNX Runtime have kernels for: the tables `rules/targets/*.yaml`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal, NamedTuple, get_args

from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.policy.marks import Mark, nearest
from amp_compiler.policy.names import known_op
from amp_compiler.policy.op_table import op_table
from amp_compiler.policy.yaml_tree import Tree, parse_yaml, tree_error

Target = Literal["cpu", "cuda", "directml", "webgpu", "tensorrt"]
TARGETS: tuple[Target, ...] = get_args(Target)
_NEXT: Mapping[str, tuple[Target, ...]] = {"cpu": (), "tensorrt": ("cuda", "cpu")}  # who runs what it does not
_KEYS, _TYPES = ("source", "types", "kernels"), ("fp32", "fp16", "bf16")
_RANGE = re.compile(r"(\d+)-(\d*)")


class Kernels(NamedTuple):
    """The types that an op has kernels for from one opset to another, and the line that says so."""

    first: int
    last: float
    types: frozenset[DType]
    line: int | None


@dataclass(frozen=True)
class KernelTable:
    """The kernels of one execution provider.

    Args:
        file: name of the file, for reasons.
        source: what it was made from, with its version.
        types: the floating-point types that the provider knows.
        ops: by op, its kernels, in the order of their opsets.
    """

    file: str
    source: str
    types: frozenset[DType]
    ops: Mapping[str, tuple[Kernels, ...]]

    def has(self, op: str, opset: int, dtype: DType) -> bool:
        """Whether there is a kernel of an op at an opset of its domain with the data in a type."""
        return any(one.first <= opset <= one.last and dtype in one.types for one in self.ops.get(op, ()))

    def place(self, op: str) -> str:
        """`file:line` of an op; the file alone where it has no line."""
        known = self.ops.get(op)
        return f"{self.file}:{known[0].line}" if known else self.file


@dataclass(frozen=True)
class Providers:
    """The provider that a model is planned for, and those that run what it has no kernel for.

    Args:
        name: of the target.
        tables: the one of each, in the order in which ONNX Runtime asks them.
    """

    name: Target
    tables: tuple[KernelTable, ...]

    def obstacle(self, op: str, opset: int, low: DType) -> str | None:
        """Why a node must not have its data in the low type; `None` where there is a kernel.

        A node falls to the next provider where one has no kernel in FP32 either.
        """
        fallen = ""
        for table in self.tables:
            if table.has(op, opset, low):
                return None
            name = table.file.removesuffix(".yaml")
            if table.has(op, opset, DType.FLOAT32):
                return f"{fallen}{name} has no {low.short} kernel of {op} at opset {opset} ({table.place(op)})"
            fallen += f"falls from {name} ({table.place(op)}): " if not fallen else ""
        return f"no provider of {self.name} has a kernel of {op} at opset {opset} ({self.tables[0].place(op)})"


def load_target(name: str, low: DType | None = None) -> Providers:
    """The tables of a target.

    Args:
        name: one of `TARGETS`.
        low: the type that the model is to have.

    Raises:
        AmpError: there is no such target, or it does not know the type.
    """
    target = next((one for one in TARGETS if one == name), None)
    if target is None:
        raise AmpError(f"{name!r} is no target", hint=nearest(str(name), TARGETS))
    tables = tuple(_table(one) for one in (target, *_NEXT.get(target, ("cpu",))))
    if low is not None and low not in tables[0].types:
        others = " or ".join(f'"{one.short}"' for one in (DType.FLOAT16, DType.BFLOAT16) if one in tables[0].types)
        raise AmpError(f"the target {target} has no {low.short}", hint=f"give dtype={others}")
    return Providers(target, tables)


@functools.cache
def _table(target: Target) -> KernelTable:
    path = resources.files("amp_compiler.rules").joinpath("targets", f"{target}.yaml")
    return parse_table(path.read_text(encoding="utf-8"), f"{target}.yaml")


def parse_table(text: str, file: str) -> KernelTable:
    """Read the text of a table.

    Args:
        text: YAML as `rules/targets/*.yaml` have it.
        file: its name, for errors and reasons.

    Raises:
        RuleError: an unknown key, op or type, or ranges of opsets that overlap.
    """
    root = parse_yaml(text, file)
    keys = tuple(root.value) if isinstance(root.value, dict) else ()
    if keys != _KEYS or not isinstance(root.value["kernels"].value, dict):
        raise tree_error(f"a table of kernels has the keys {', '.join(_KEYS)}", file, root, "see rules/README.md")
    source, types, kernels = root.value.values()
    known = _types(types, file, _TYPES, "names no type of a table")
    shorts = [one.short for one in known]
    ops: dict[str, tuple[Kernels, ...]] = {}
    for op, entry in kernels.value.items():
        key = kernels.keys[op]
        known_op(op, op_table(), Mark(file, key.line, key.column, op))
        if not isinstance(entry.value, dict):
            hint = "write {7-12: fp32, 13-: fp32 fp16}"
            raise tree_error(f"'{op}' needs its types by range of opsets", file, entry, hint)
        ops[op] = tuple(_kernels(text, entry.keys[text], tree, file, shorts) for text, tree in entry.value.items())
        for before, after in zip(ops[op], ops[op][1:], strict=False):
            if after.first <= before.last:
                raise tree_error(f"a range of '{op}' begins before the one above it ends", file, key, "separate them")
    return KernelTable(file, str(source.value), frozenset(known), ops)


def _kernels(text: str, key: Tree, tree: Tree, file: str, shorts: list[str]) -> Kernels:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise tree_error(f"'{text}' is no range of opsets", file, key, "write 7-12, or 13- for all from 13 on")
    types = _types(tree, file, shorts, "is none of the types above")
    return Kernels(int(match[1]), float(match[2] or "inf"), frozenset(types), key.line)


def _types(tree: Tree, file: str, known: tuple[str, ...] | list[str], wrong: str) -> list[DType]:
    names = str(tree.value).split()
    for name in names:
        if name not in known:
            raise tree_error(f"'{name}' {wrong}", file, tree, nearest(name, known))
    return [dtype_from_short(name) for name in names]
