"""What a GPU and its software are, and the two rates that all others are shares of: of a copy, and of a matrix product.

python tools/gpu_facts.py --json facts.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("amp_compiler", "torch", "triton", "transformers", "numpy", "onnx", "pydantic")
ROUNDS = 20


def milliseconds(call: Callable[[], object]) -> float:
    """Of one of 20 calls in a row, by the device's clock."""
    for _ in range(3):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(ROUNDS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / ROUNDS


def facts() -> dict[str, Any]:
    """Versions and the device."""
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory, GB": round(device.total_memory / 1e9, 1),
        "multiprocessors": device.multi_processor_count,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "Python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def version(name: str) -> str:
    """Of an installed package."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def ceilings(elements: int, side: int) -> dict[str, float]:
    """TB/s of a copy, read and written, and TFLOP/s of a product, of random numbers: zeros are multiplied faster.

    Args:
        elements: of the FP32 tensors that are copied, far more than fit in a cache.
        side: rows and columns of the matrices.
    """
    source, target = (torch.randn(elements, device="cuda") for _ in range(2))
    figures = {"copy, TB/s": 8 * elements / milliseconds(lambda: target.copy_(source)) / 1e9}
    for dtype in (torch.bfloat16, torch.float16):
        a, b = (torch.randn(side, side, device="cuda").to(dtype) for _ in range(2))
        took = milliseconds(lambda a=a, b=b: a @ b)
        figures[f"product in {str(dtype).removeprefix('torch.')}, TFLOP/s"] = 2 * side**3 / took / 1e9
    return figures


def main() -> int:
    """Print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--elements", type=int, default=2**29)
    parser.add_argument("--side", type=int, default=8192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 1
    figures = facts() | ceilings(options.elements, options.side)
    for name, value in figures.items():
        print(f"{name:30} {value:.2f}" if isinstance(value, float) else f"{name:30} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
