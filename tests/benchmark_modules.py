"""The benchmarks' modules, for their tests: scripts beside each other, which are no part of the package."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MODULES = (
    "bursts", "cases", "comparison", "first_step", "frameworks", "inference", "measuring", "models", "parity",
    "plan_models", "processes", "profile_step", "readme", "reduction", "train_step", "train_step_runs", "update",
    "update_kernels", "update_runs",
)  # fmt: skip


def benchmark_modules():
    """Each module by its name."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(BENCHMARKS))
