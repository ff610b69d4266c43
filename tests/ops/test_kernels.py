"""The Triton kernels without a GPU: interpreted against the reference, and compiled ahead of time for two devices.

The interpreter replaces Triton's language when Triton is imported, so its tests run in a process of their own. A
compiled kernel learns its spills only when a driver loads it; without a driver they are read from what `ptxas -v`
(which comes with Triton) says about the PTX that was compiled.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from amp_compiler.ops.cuda import update as kernels

HERE = Path(__file__).parent

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from amp_compiler.errors import AmpError
from amp_compiler.ops.update import operators as fused_update
from amp_compiler.ops.cuda import update as kernels
ones = [torch.ones(3)]
assert torch.ops.amp_compiler.grad_check(ones, torch.tensor(1.0))[0] > 1.7
try:
    kernels.grad_check(ones, torch.tensor(1.0))
except AmpError as error:
    assert "pip install triton" in str(error), error
else:
    raise SystemExit("no error")
"""


def run_python(arguments, **environment):
    environment = {**os.environ, **environment}
    return subprocess.run([sys.executable, *arguments], cwd=HERE, env=environment, capture_output=True, text=True)


@pytest.mark.long
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_under_the_interpreter(which, tmp_path):
    pytest.importorskip("triton")
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which]
    arguments = ["-m", "pytest", *options, "kernels_interpreted.py"]
    done = run_python(arguments, TRITON_INTERPRET="1", HYPOTHESIS_STORAGE_DIRECTORY=str(tmp_path))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"\b(\d+) passed", done.stdout)[1]) >= (24 if which == "slow" else 60)


@pytest.mark.long
def test_the_module_imports_without_triton():
    done = run_python(["-c", WITHOUT_TRITON])
    assert done.returncode == 0, done.stderr


def ptxas_report(ptx, folder):
    import triton

    (folder / "kernel.ptx").write_text(ptx)
    arch = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)[1]
    command = [triton.knobs.nvidia.ptxas.path, "-v", "--fmad=false", f"--gpu-name={arch}", "kernel.ptx", "-o", "out"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


TABLE = {"rows": "*i64", "blocks": "*i64"}
NUMBERS = {"coef": "*fp32", "skip": "*fp32"}
TYPES = {"GRAD_TYPE": "bfloat16", "WEIGHT_TYPE": "float32", "MOMENT_TYPE": "float32", "EXTRA_TYPE": "bfloat16"}
TYPES |= {"stale": None, "TAKES": False}
LOOK = {"stale": "*i64"}
ADAM = {
    **TYPES,
    "started": None,
    "rng": None,
    "MODE": 0,
    "AMSGRAD": False,
    "MAXIMIZE": False,
    "DECOUPLED": True,
    "ALIGNED": True,
}
SGD = {**TYPES, "rng": None, "MODE": 0, "NESTEROV": True, "MAXIMIZE": False, "ALIGNED": True}
ADAM_ARGS = {**TABLE, "scalars": "*fp32", **NUMBERS}
SGD_ARGS = {**TABLE, "hyper": "*fp64", **NUMBERS, "started": "*fp32"}
STOCHASTIC = {"WEIGHT_TYPE": "float16", "EXTRA_TYPE": None, "MODE": 1}
KAHAN = {"WEIGHT_TYPE": "bfloat16", "MODE": 2}
KERNELS = {
    "adam": ("adam_kernel", {**ADAM_ARGS, **LOOK}, ADAM),
    "adam, takes": ("adam_kernel", {**ADAM_ARGS, **LOOK}, {**ADAM, "TAKES": True}),
    "adam, all options, unaligned": (
        "adam_kernel",
        {**ADAM_ARGS, **LOOK},
        {**ADAM, "GRAD_TYPE": "float16", "AMSGRAD": True, "MAXIMIZE": True, "DECOUPLED": False, "ALIGNED": False},
    ),
    "adam, stochastic": ("adam_kernel", {**ADAM_ARGS, "rng": "*i64"}, {**ADAM, **STOCHASTIC}),
    "adam, Kahan": ("adam_kernel", {**ADAM_ARGS, "rng": "*i64"}, {**ADAM, **KAHAN}),
    "sgd": ("sgd_kernel", {**SGD_ARGS, **LOOK}, SGD),
    "sgd, stochastic": ("sgd_kernel", {**SGD_ARGS, "rng": "*i64"}, {**SGD, **STOCHASTIC}),
    "sgd, no momentum": ("sgd_kernel", SGD_ARGS, {**SGD, "MOMENT_TYPE": None, "EXTRA_TYPE": None, "NESTEROV": False}),
    "check": (
        "check_kernel",
        {**TABLE, "inv_scale": "*fp32", "partials": "*fp32", "bad_places": "*i32"},
        {"GRAD_TYPE": "float16", "ALIGNED": True},
    ),
}


def compiled_ptx(name, capability):
    """The PTX of a kernel for a device that need not be there."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has taken the compiler's place")
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from amp_compiler.ops.cuda import triton_kernels

    kernel, signature, constants = KERNELS[name]
    checks = kernel == "check_kernel"
    options, block = (kernels._CHECK_OPTIONS, kernels.CHECK_BLOCK) if checks else (kernels._OPTIONS, kernels.BLOCK)
    options = kernels._WATCHING if "stale" in signature else options
    function = getattr(triton_kernels, kernel)
    names = function.arg_names
    options = {**options, **{key: value for key, value in constants.items() if key not in names}}
    constants = {key: value for key, value in {"BLOCK": block, **constants}.items() if key in names}
    values = {
        (names.index(key),): getattr(tl, value) if isinstance(value, str) else value
        for key, value in constants.items()
        if key not in signature
    }
    known = {(names.index(key),): [["tt.divisibility", 16]] for key, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(function, {key: signature.get(key, "constexpr") for key in names}, values, known)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]


NEWER = ("adam, all options, unaligned", "sgd, stochastic", "check")  # the largest of each
PER_THREAD = 1024 // 128  # elements
FMAS = {"adam": 3, "adam, all options, unaligned": 4, "adam, Kahan": 3, "sgd": 4, "check": 0}
# For every column of a full block: bytes of an element, and whether it is read and written.
COLUMNS = {
    "adam": {"gradient": (2, 1, 0), "weight": (4, 1, 1), "copy": (2, 0, 1), "m": (4, 1, 1), "v": (4, 1, 1)},
    "adam, stochastic": {"gradient": (2, 1, 0), "weight": (2, 1, 1), "m": (4, 1, 1), "v": (4, 1, 1)},
    "adam, Kahan": {"gradient": (2, 1, 0), "weight": (2, 1, 1), "error": (2, 1, 1), "m": (4, 1, 1), "v": (4, 1, 1)},
    "sgd": {"gradient": (2, 1, 0), "weight": (4, 1, 1), "copy": (2, 0, 1), "momentum": (4, 1, 1)},
    "check": {"gradient": (2, 1, 0)},
}


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        pytest.param(name, capability, marks=[pytest.mark.slow] * (capability == 90 and name not in NEWER))
        for name in KERNELS
        for capability in (80, 90)
    ],
)
def test_machine_code(name, capability, tmp_path):
    """Nothing spills; it rounds as the reference does; full blocks load and store 4 elements of every column."""
    ptx = compiled_ptx(name, capability)
    report = ptxas_report(ptx, tmp_path)
    watches = "stale" in KERNELS[name][1]
    per_thread = PER_THREAD // (1 + watches)  # of twice as many
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    assert registers <= 64, "with 128 threads per program, more leave too few programs on a multiprocessor"
    if name in FMAS:
        assert not re.search(r"div\.full|sqrt\.approx|rsqrt|\.ftz", ptx)
        # Contraction is off: an fma stands only where the kernel asks for one, and two blocks of code ask for each.
        assert len(re.findall(r"fma\.rn\.f32", ptx)) == FMAS[name] * 2 * per_thread
    if name in FMAS and "adam" in name:
        assert "sqrt.rn.f32" in ptx and "div.rn.f32" in ptx
    if name in COLUMNS:
        check_columns(ptx, COLUMNS[name].values(), per_thread * (1 + (name == "check")))
    if name != "check" and not watches:  # which add up what their warps have found
        assert "st.shared" not in ptx and "bar.sync" not in ptx


def check_columns(ptx, columns, per_thread):
    for what, place in (("ld", 1), ("st", 2)):
        for size in (2, 4):
            whole = sum(column[0] == size for column in columns if column[place])
            result = re.findall(rf"\b{what}\.global\.v{size}\.b32", ptx)
            assert len(result) == whole * per_thread // 4, (what, size)
