"""The command `env`: what to paste into a report of a bug."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata

import torch

from amp_compiler.fx.torch_private.runtime import has_bf16_kernels
from amp_compiler.ops.cache_folder import cache_folder
from amp_compiler.ops.cpu.build import compiler_command

_PACKAGES = ("amp_compiler", "torch", "triton", "numpy", "networkx", "pydantic", "onnx", "onnx-ir", "onnxscript",
             "onnxruntime", "onnxruntime-gpu", "transformers", "accelerate", "lightning")  # fmt: skip
_VARIABLES = ("AMP_", "TORCH", "OMP_", "MKL_", "CUDA_", "CXX", "NCCL_")


def environment() -> Iterator[str]:
    """Versions, devices, the compiler, the caches and the variables that are set, a line each."""
    yield f"Python: {platform.python_version()} on {platform.platform()}"
    for package in _PACKAGES:
        try:
            yield f"{package}: {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            yield f"{package}: not installed"
    kernels = "with" if has_bf16_kernels() else "without"
    yield f"CPU: {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, {kernels} BF16 products"
    for number in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
        yield f"GPU {number}: {torch.cuda.get_device_name(number)}, capability {capability}, CUDA {torch.version.cuda}"
    yield f"C++ compiler: {_compiler()}"
    yield f"cache of loops: {cache_folder()}"
    yield from (f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES))


def _compiler() -> str:
    command = compiler_command()
    if not command:
        return "none"
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as wrong:
        return f"{shlex.join(command)} does not run: {wrong}"
    return done.stdout.partition("\n")[0]
