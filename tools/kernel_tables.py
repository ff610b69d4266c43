"""Make `rules/targets/*.yaml`: which types the execution providers of ONNX Runtime have kernels for.

Usage, each in the folder of the repository:

    python tools/kernel_tables.py cpu                  # of the installed ONNX Runtime, the package for the CPU alone
    python tools/kernel_tables.py cuda FILE VERSION       # docs/OperatorKernels.md of ONNX Runtime
    python tools/kernel_tables.py directml FILE VERSION   # the same file
    python tools/kernel_tables.py webgpu FOLDER           # the npm package onnxruntime-web, unpacked
    python tools/kernel_tables.py tensorrt FILE VERSION   # docs/operators.md of onnx-tensorrt

VERSION names the release or commit that the file is of.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx.defs import OpSchema

OUTPUT = Path("rules/targets")
OPEN = 2**31 - 1  # the last version of a kernel that is registered for one version of its op and no later one
TYPES = {"fp32": "float", "fp16": "float16", "bf16": "bfloat16"}
NO_BF16 = ("directml", "webgpu")  # they know no such type, though the tables list it where a kernel leaves a type open
DOMAINS = {"ai.onnx": "", "com.microsoft": "com.microsoft"}
# The table of WebGPU names no types. Its kernels take FP32 and FP16, but for those of these ops, which are registered
# for FP32 alone (onnxruntime/core/providers/js/operators, onnxruntime/contrib_ops/js).
FP32_ALONE = {"ArgMax", "ArgMin", "Einsum", "FusedConv", "GatherElements", "Range", "Split", "com.microsoft.Gelu"}


class Kernel(NamedTuple):
    """Kernels of one op for its versions `first` to `last`, with the types that they have by type variable."""

    first: int
    last: int
    types: dict[str, set[str]]

    def is_for(self, since: int) -> bool:
        """Whether ONNX Runtime takes it for a version of the op: one without an end is for its first alone."""
        return self.first == since or (self.last != OPEN and self.first <= since <= self.last)


Kernels = dict[tuple[str, str], list[Kernel]]  # by domain and op


def installed() -> tuple[Kernels, str]:
    """The kernels of the installed ONNX Runtime, and what it is."""
    import onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def

    kernels: Kernels = defaultdict(list)
    for one in get_all_opkernel_def():
        if one.provider == "CPUExecutionProvider":
            types = {name: set(known) for name, known in one.type_constraints.items()}
            kernels[one.domain, one.op_name].append(Kernel(*one.version_range, types))
    return kernels, f"get_all_opkernel_def() of onnxruntime {onnxruntime.__version__} for x86-64"


def documented(text: str, provider: str) -> Kernels:
    """The kernels that `OperatorKernels.md` lists for a provider."""
    kernels: Kernels = defaultdict(list)
    part = text.partition(f"## Operators implemented by {provider}\n")[2].partition("\n## ")[0]
    domain = op = ""
    for line in part.splitlines():
        named = re.match(r"\|\*\*Operator Domain:\*\* \*(.+)\*\|", line)
        cells = line.strip("|").split("|") if not line.startswith("|||") else ["", "", *line[3:].strip("|").split("|")]
        if named:
            domain = named[1]
        elif domain in DOMAINS and len(cells) == 4 and not cells[2].startswith(("-", "OpSet")):
            op = cells[0] or op
            first, last = _range(cells[2].strip("[]").replace(", ", "-"))
            types = dict(re.findall(r"\*\*(\w+)\*\* = ([^*]*)", cells[3]))
            kernels[DOMAINS[domain], op].append(
                Kernel(
                    first,
                    last,
                    {name: set(re.findall(r"[a-z(]*tensor\(\w+\)+", known)) for name, known in types.items()},
                )
            )
    return kernels


def _range(text: str) -> tuple[int, int]:
    """`7-12`, `13` and `13+` as the first and the last version."""
    if text.endswith("+"):
        return int(text[:-1]), OPEN
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def of_webgpu(text: str) -> Kernels:
    """The kernels that `webgpu-operators.md` lists."""
    kernels: Kernels = defaultdict(list)
    for op, cell in re.findall(r"^\| (\w+) \| ([^|]+) \|", text, re.MULTILINE):
        for domain, ranges in re.findall(r"([\w.]+)\(([^)]+)\)", cell):
            known = {op, f"{domain}.{op}"} & FP32_ALONE
            every = {f"tensor({TYPES[name]})" for name in (["fp32"] if known else ["fp32", "fp16"])}
            if domain in DOMAINS:
                for one in ranges.split(","):
                    kernels[DOMAINS[domain], op].append(Kernel(*_range(one), {"*": every}))
    return kernels


def of_tensorrt(text: str) -> Kernels:
    """The ops that the parser of TensorRT takes, by `operators.md`, which knows no versions of them."""
    kernels: Kernels = defaultdict(list)
    for op, cell in re.findall(r"^\| (\w+) +\| Y +\| ([^|\n]+)", text, re.MULTILINE):
        types = {f"tensor({TYPES[name.lower()]})" for name in re.findall(r"FP32|FP16|BF16", cell)}
        kernels["", op].append(Kernel(0, OPEN - 1, {"*": types}))
    return kernels


def schemas(domain: str, op: str) -> list[OpSchema]:
    """The versions of an op, in order."""
    if domain:
        from amp_compiler.onnx.model.contrib import contrib_schemas

        return [contrib_schemas()[domain, op]] if (domain, op) in contrib_schemas() else []
    every = [one for one in onnx.defs.get_all_schemas_with_history() if one.name == op and not one.domain]
    return sorted(every, key=lambda one: one.since_version)


def takes(kernels: Kernels, domain: str, schema: OpSchema, type_name: str) -> bool:
    """Whether there is a kernel of one version of an op with its data in a type.

    All type variables of its inputs that may have the type must have it; those of its outputs where it reads no data.
    An op without a kernel is run by ONNX's definition of it in other ops, where it has one.
    """
    limits = {one.type_param_str: one.allowed_type_strs for one in schema.type_constraints}

    def holds(variable: str) -> bool:
        return any(f"tensor({type_name})" in one for one in limits.get(variable, (variable,)))

    outputs = {put.type_str for put in schema.outputs if holds(put.type_str)}
    variables = {put.type_str for put in schema.inputs if holds(put.type_str)} or outputs
    if not variables:
        return False
    fitting = [one for one in kernels.get((domain, schema.name), ()) if one.is_for(schema.since_version)]
    for kernel in fitting:
        known = (kernel.types.get(one, kernel.types.get("*")) for one in variables)
        if all(one is None or any(f"tensor({type_name})" in text for text in one) for one in known):
            return True
    if fitting or domain or not schema.has_function:
        return False
    version = {one.domain: one.version for one in schema.function_body.opset_import}.get("", schema.since_version)
    inner = [onnx.defs.get_schema(node.op_type, version, "") for node in schema.function_body.node]
    floating = [one for one in inner if one.name not in ("Constant", "Cast", "CastLike", "Shape") and _floats(one)]
    return all(takes(kernels, "", one, type_name) for one in floating)


def _floats(schema: OpSchema) -> bool:
    return any("tensor(float)" in one.allowed_type_strs for one in schema.type_constraints)


def lines(kernels: Kernels, names: Sequence[str]) -> Iterator[str]:
    """One line an op: the types, of those named, that it has kernels for, by range of opsets."""
    ops = set(kernels) | {("", one.name) for one in onnx.defs.get_all_schemas_with_history() if not one.domain}
    for domain, op in sorted(ops, key=lambda one: (one[0] or "onnx", one[1])):
        known = schemas(domain, op)
        ranges: list[list[str | int]] = []  # first, last, types
        for schema, later in itertools.pairwise([*known, None]):
            types = " ".join(name for name in names if takes(kernels, domain, schema, TYPES[name]))
            last = "" if later is None else later.since_version - 1
            if ranges and ranges[-1][2] == types:
                ranges[-1][1] = last
            else:
                ranges.append([schema.since_version, last, types])
        ranges_text = ", ".join(f"{first}-{last}: {types}" for first, last, types in ranges if types)
        if ranges_text:
            yield f"  {domain or 'onnx'}.{op}: {{{ranges_text}}}\n"


def main(target: str, source: str = "", version: str = "") -> None:
    """Write the table of one target."""
    if target == "cpu":
        kernels, where = installed()
    elif target == "webgpu":
        folder = Path(source)
        kernels = of_webgpu((folder / "docs/webgpu-operators.md").read_text(encoding="utf-8"))
        version = json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"]
        where = f"docs/webgpu-operators.md of onnxruntime-web {version}"
    elif target == "tensorrt":
        kernels, where = (
            of_tensorrt(Path(source).read_text(encoding="utf-8")),
            f"docs/operators.md of onnx-tensorrt {version}",
        )
    else:
        provider = {"cuda": "CUDAExecutionProvider", "directml": "DmlExecutionProvider"}[target]
        kernels = documented(Path(source).read_text(encoding="utf-8"), provider)
        where = f"docs/OperatorKernels.md of onnxruntime {version}"
    names = [name for name in TYPES if name != "bf16" or target not in NO_BF16]
    head = f"# Made by tools/kernel_tables.py.\nsource: {where}\ntypes: {' '.join(names)}\nkernels:\n"
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / f"{target}.yaml").write_text(head + "".join(lines(kernels, names)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
