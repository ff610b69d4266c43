"""The command `amp-compiler env`. Torch is imported last."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
from importlib import metadata

import typer

_PACKAGES = ("amp_compiler", "torch", "triton", "numpy", "networkx", "pydantic", "onnx", "onnx-ir", "onnxscript",
             "onnxruntime", "onnxruntime-gpu", "transformers", "accelerate", "lightning")  # fmt: skip
_VARIABLES = ("AMP_", "TORCH", "OMP_", "MKL_", "CUDA_", "CXX", "NCCL_")


def env() -> None:
    """Print versions, devices, the compiler, caches and variables: what to paste into a report of a bug."""
    import torch

    from amp_compiler.fx.torch_private.runtime import has_bf16_kernels
    from amp_compiler.ir.plan import many
    from amp_compiler.ops.cache_folder import cache_folder
    from amp_compiler.ops.cpu.build import compiler_command

    typer.echo(f"Python: {platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        try:
            typer.echo(f"{package}: {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            typer.echo(f"{package}: not installed")
    kernels = "with" if has_bf16_kernels() else "without"
    threads = f"{many(torch.get_num_threads(), 'thread')}, {kernels} BF16 products"
    typer.echo(f"CPU: {torch.backends.cpu.get_cpu_capability()}, {threads}")
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        typer.echo(f"GPU {number}: {gpu.name}, capability {gpu.major}.{gpu.minor}, CUDA {torch.version.cuda}")
    typer.echo(f"C++ compiler: {_compiler(compiler_command())}")
    typer.echo(f"cache of loops: {cache_folder()}")
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            typer.echo(f"{name}={value}")


def _compiler(command: list[str]) -> str:
    if not command:
        return "none"
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as wrong:
        return f"{shlex.join(command)} does not run: {wrong}"
    return done.stdout.partition("\n")[0]
