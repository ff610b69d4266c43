"""What a benchmark's numbers depend on: processor, versions, date. No path, host or user name."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def machine_facts(device: str = "cpu") -> dict[str, Any]:
    """The facts that a results file carries, ready for JSON."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **(_cuda_versions() if device == "cuda" else {}),
        },
    }


def _cuda_versions() -> dict[str, Any]:
    import triton

    return {"triton": triton.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}


def cpu_name() -> str:
    """The processor's own name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
