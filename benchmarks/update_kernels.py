"""The kernels of the check and of AdamW on a GPU: what their machine code takes, and which sizes are fastest.

    python benchmarks/update_kernels.py             # needs Triton, and no GPU
    python benchmarks/update_kernels.py --sweep     # times block sizes, warps and registers on the GPU that is there

The first table compiles each kernel for an H200 (sm_90): registers, spills, programs and threads that fit on a
multiprocessor, the widths of loads and stores in a full block, and bytes of memory a parameter. `--sweep` times the
check and the update of 350 million parameters, replayed as a CUDA graph, for every choice of elements and warps a
program, and for the update of registers a thread; the first line of each table is what the project uses.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import measuring
import torch
from rich.console import Console
from rich.table import Table
from update import PARAMETERS
from update_runs import MIXES, Ours

from amp_compiler.ops.cuda import update as kernels

CAPABILITY = 90
_REGISTERS, _THREADS, _PROGRAMS = 65536, 2048, 32  # of a multiprocessor of an H200
_TABLE = {"rows": "*i64", "blocks": "*i64"}
_NUMBERS = {"coef": "*fp32", "skip": "*fp32"}
_UNUSED = {"started": None, "rng": None}
CHECK, ADAM = "check", "adam"
BLOCKS = {CHECK: (2048, 4096, 8192, 16384), ADAM: (512, 1024, 2048, 4096)}
WARPS = {CHECK: (4, 8, 16), ADAM: (2, 4, 8)}
MOST_REGISTERS = {CHECK: (None,), ADAM: (None, 48, 64, 96)}
Row = dict[str, Any]


def machine_code(name: str, gradients: str, block: int, options: Mapping[str, Any]) -> tuple[str, str]:
    """The PTX of a kernel, and what `ptxas -v` says of it.

    Args:
        name: `check` or `adam`.
        gradients: their type, `bf16`, `fp16` or `fp32`.
        block: elements of a program.
        options: of Triton's compiler.
    """
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from amp_compiler.ops.cuda import triton_kernels

    types = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
    kernel = getattr(triton_kernels, f"{name}_kernel")
    constants: dict[str, Any] = {"GRAD_TYPE": types[gradients], "ALIGNED": True, "BLOCK": block}
    if name == ADAM:
        signature = {**_TABLE, "scalars": "*fp32", **_NUMBERS}
        low = None if gradients == "fp32" else types[gradients]
        constants |= {"WEIGHT_TYPE": tl.float32, "MOMENT_TYPE": tl.float32, "EXTRA_TYPE": low, "MODE": 0}
        constants |= {"AMSGRAD": False, "MAXIMIZE": False, "DECOUPLED": True, **_UNUSED}
    else:
        signature = {**_TABLE, "inv_scale": "*fp32", "partials": "*fp32", "bad_places": "*i32"}
    forms = {argument: signature.get(argument, "constexpr") for argument in kernel.arg_names}
    values = {(kernel.arg_names.index(argument),): value for argument, value in constants.items()}
    aligned = {(kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in signature}
    source = ASTSource(kernel, forms, values, aligned)
    ptx = str(triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=dict(options)).asm["ptx"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        arch = _found(r"\.target (\w+)", ptx)
        command = [
            triton.knobs.nvidia.ptxas.path,
            "-v",
            "--fmad=false",
            f"--gpu-name={arch}",
            str(path),
            "-o",
            "out",
        ]
        return ptx, subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr


def read_code(ptx: str, report: str, warps: int) -> Row:
    """What one kernel's code takes; loads and stores of 8 bytes and less are those of a program's table and numbers.

    Args:
        ptx: of the kernel.
        report: of `ptxas -v`.
        warps: of a program.
    """
    registers = int(_found(r"Used (\d+) registers", report))
    threads = 32 * warps
    granted = -(-registers // 8) * 8  # a warp is given registers by the 256
    programs = min(_REGISTERS // (granted * threads), _THREADS // threads, _PROGRAMS)
    widths = {
        f"{what} of {size} bytes": len(re.findall(rf"\b{word}\.global\.{form}\b", ptx))
        for what, word in (("loads", "ld"), ("stores", "st"))
        for size, form in ((16, r"v4\.b32"), (8, r"v2\.b32"))
    }
    return {
        "registers": registers,
        "spilled": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "shared": int(_found(r"(\d+) bytes smem", report, "0")),
        "programs": programs,
        "threads": programs * threads,
        **widths,
    }


def _found(pattern: str, text: str, otherwise: str | None = None) -> str:
    match = re.search(pattern, text)
    if match is None and otherwise is None:
        raise ValueError(f"ptxas did not say: {pattern}")
    return match[1] if match is not None else str(otherwise)


def bytes_of(name: str, gradients: str) -> int:
    """Bytes that a kernel reads and writes a parameter."""
    size = measuring.TORCH_TYPES[gradients].itemsize
    return size if name == CHECK else size + 24 + (0 if gradients == "fp32" else 2)


def used(name: str) -> tuple[int, dict[str, Any]]:
    """Elements of a program and compiler options, as the project has them."""
    return (kernels.CHECK_BLOCK, kernels._CHECK_OPTIONS) if name == CHECK else (kernels.BLOCK, kernels._OPTIONS)


def code_rows(types: Sequence[str]) -> list[Row]:
    """One row for each kernel and type of gradients."""
    rows = []
    for name, gradients in itertools.product((CHECK, ADAM), types):
        block, options = used(name)
        ptx, report = machine_code(name, gradients, block, options)
        facts = read_code(ptx, report, options["num_warps"])
        rows.append({"kernel": name, "gradients": gradients, "bytes": bytes_of(name, gradients), **facts})
    return rows


@contextmanager
def sizes(name: str, block: int, options: Mapping[str, Any]) -> Iterator[None]:
    """Within it the kernels are launched with other sizes."""
    names = ("CHECK_BLOCK", "_CHECK_OPTIONS") if name == CHECK else ("BLOCK", "_OPTIONS")
    before = [getattr(kernels, one) for one in names]
    for one, value in zip(names, (block, dict(options)), strict=True):
        setattr(kernels, one, value)
    try:
        yield
    finally:
        for one, value in zip(names, before, strict=True):
            setattr(kernels, one, value)


def choices(name: str) -> list[tuple[int, dict[str, Any]]]:
    """What is tried: what the project uses, and all others of 4 to 64 elements a thread."""
    own = used(name)
    tried = [own]
    for block, warps, most in itertools.product(BLOCKS[name], WARPS[name], MOST_REGISTERS[name]):
        options = {**own[1], "num_warps": warps, "maxnreg": most}
        kept = {key: value for key, value in options.items() if value is not None}
        if 4 <= block // (32 * warps) <= 64 and (block, kept) != own:
            tried.append((block, kept))
    return tried


def sweep(name: str, gradients: str, parameters: int, repeats: int) -> list[Row]:
    """Milliseconds of one kernel over all parameters, one row for each choice, the project's own first."""
    tensors = Ours(MIXES["transformer"](parameters), gradients, "cuda")
    count = sum(weight.numel() for weight in tensors.weights)
    rows = []
    for block, options in choices(name):
        with sizes(name, block, options):
            milliseconds = _milliseconds(_call(name, tensors), repeats)
        row = {"kernel": name, "gradients": gradients, "block": block, "warps": options["num_warps"]}
        speed = bytes_of(name, gradients) * count / milliseconds / 1e9
        rows.append({**row, "registers": options.get("maxnreg"), "ms": milliseconds, "tb_per_s": speed})
    return rows


def _call(name: str, tensors: Ours) -> Callable[[], object]:
    if name == CHECK:
        return lambda: tensors.check(tensors.grads, tensors.inverse)
    state = (tensors.masters, tensors.grads, *tensors.moments, [], tensors.low_weights, tensors.steps)
    zero, one = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    return lambda: tensors.adam(*state, tensors.hyper, one, zero, False, False, True)


def _milliseconds(call: Callable[[], object], repeats: int) -> float:
    """The median of some replays of a graph, by the GPU's clock."""
    from update_runs import _replayed

    replay = _replayed(lambda: (call(), None)[1])
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def table(rows: Sequence[Row], title: str) -> Table:
    """All that is known of each row."""
    result = Table(title=title, title_justify="left")
    for column in rows[0]:
        result.add_column(column, justify="right")
    for row in rows:
        result.add_row(
            *(f"{one:.3f}" if isinstance(one, float) else "" if one is None else str(one) for one in row.values())
        )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Compile or time, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sweep", action="store_true", help="time sizes on a GPU")
    parser.add_argument("--dtype", nargs="+", choices=("bf16", "fp16", "fp32"), default=["bf16", "fp32"])
    parser.add_argument("--parameters", type=int, default=PARAMETERS["cuda"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    options = parser.parse_args(argv)
    options.device, options.threads = "cuda" if options.sweep else "cpu", torch.get_num_threads()
    console = Console(width=170)
    if not options.sweep:
        rows = code_rows(options.dtype)
        console.print(table(rows, "kernels of the update, compiled for an H200"))
        measuring.write_results(options.json, "update_kernels", options, rows)
        return 0
    if not torch.cuda.is_available():
        print("no GPU to time anything on", file=sys.stderr)
        return 2
    rows = []
    for gradients, name in itertools.product(options.dtype, (CHECK, ADAM)):
        timed = sweep(name, gradients, options.parameters, options.repeats)
        ranked = [timed[0], *sorted(timed[1:], key=lambda row: row["ms"])]
        console.print(table(ranked[:8], f"{name}, {gradients} gradients: the project's own, then the fastest"))
        rows += timed
        measuring.write_results(options.json, "update_kernels", options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
