"""100 steps in the loops of other frameworks, with their own BF16 and with ours: losses, milliseconds, resuming.

Both train the same model from the same weights on the same batches. `off` is the greatest difference of a loss, as a
part of it. A time is CPU time of a step, the median of the second half of them. Resuming: half of the steps, a
checkpoint by the framework's means, all objects made anew, the rest; the losses are to be those of the run without a
stop, to the bit. Where a framework's own mixed precision is for CUDA alone, `torch.autocast` stands around its loop.
Rows of frameworks that are left out stay as they are.

    make test-frameworks                                     # makes the environment .venv/frameworks, and tries these
    .venv/frameworks/bin/python benchmarks/frameworks.py     # all that are installed, with Inductor
    .venv/frameworks/bin/python benchmarks/frameworks.py --only ignite skorch --steps 20 --backend eager --width 32
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import itertools
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import framework_loops
import hugging_face_loops
import torch
from framework_loops import Loop
from measuring import RESULTS, write_results

MOST_OFF = 0.05  # BF16 roundings that AdamW amplifies over 100 updates
LOOPS: dict[str, type[Loop]] = {
    "Lightning": framework_loops.Lightning,
    "Fabric": framework_loops.Fabric,
    "Trainer of transformers": hugging_face_loops.Trainer,
    "Accelerate": hugging_face_loops.Accelerate,
    "TRL": hugging_face_loops.Trl,
    "PEFT": hugging_face_loops.Peft,
    "diffusers": hugging_face_loops.Diffusers,
    "sentence-transformers": hugging_face_loops.SentenceTransformers,
    "PyTorch Geometric": framework_loops.Geometric,
    "MONAI": framework_loops.Monai,
    "skorch": framework_loops.Skorch,
    "ignite": framework_loops.Ignite,
    "torchao, float8": framework_loops.Float8,
    "torchao, AdamW8bit": framework_loops.LowBitOptimizer,
}


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A loop leaves no settings of Accelerate's to the next, and says nothing on defaults."""
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def trained(name: str, ours: bool, steps: int, width: int, options: dict[str, Any]) -> Loop:
    """A loop that has made all its steps."""
    with alone():
        loop = LOOPS[name](ours, steps, width, options)
        loop.run(steps)
    return loop


def resumed(name: str, whole: Loop, steps: int, width: int, options: dict[str, Any]) -> list[float]:
    """Losses of the second half, behind a checkpoint and with new objects."""
    with tempfile.TemporaryDirectory() as folder:
        with alone():
            first = LOOPS[name](True, steps, width, options)
            first.run(steps // 2)
            first.save(folder)
        with alone():
            second = LOOPS[name](True, steps, width, options)
            second.load(folder)
            second.losses = copy.copy(first.losses)
            second.run(steps - steps // 2)
    return second.losses


def difference(ours: list[float], own: list[float]) -> float:
    """The greatest of all steps, as a part of the loss."""
    return max(abs(a - b) / max(abs(b), 0.05) for a, b in zip(ours, own, strict=True))


def milliseconds(loop: Loop) -> float:
    """Of a step, after warm-up."""
    late = loop.times[len(loop.times) // 2 :]
    return 1000 * statistics.median(b - a for a, b in itertools.pairwise(late))


def row_of(name: str, steps: int, width: int, options: dict[str, Any]) -> dict[str, Any]:
    """What the table says of a framework."""
    kind = LOOPS[name]
    ours, own = (trained(name, which, steps, width, options) for which in (True, False))
    again = resumed(name, ours, steps, width, options)
    package = {"ignite": "pytorch-ignite"}.get(kind.package, kind.package)
    return {
        "framework": name,
        "version": importlib.metadata.version(package),
        "lines": kind.lines,
        "graph": kind.graph,
        "first_loss": own.losses[0],
        "last_loss": own.losses[-1],
        "off": difference(ours.losses, own.losses),
        "own_ms": milliseconds(own),
        "ours_ms": milliseconds(ours),
        "resumed": again == ours.losses,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=LOOPS, default=list(LOOPS))
    parser.add_argument("--steps", type=int, default=100, help="even multiples of 10")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--json", type=Path, default=RESULTS / "frameworks_cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(1)  # CPU time counts threads that wait
    rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.is_file() else []
    for name in options.only:
        try:
            __import__(LOOPS[name].package)
        except ImportError:
            print(f"{name}: not installed", file=sys.stderr)
            continue
        row = row_of(name, options.steps, options.width, {"dtype": "bf16", "backend": options.backend})
        print(json.dumps(row), flush=True)
        known = {one["framework"]: one for one in [*rows, row]}
        rows = [known[name] for name in LOOPS if name in known]
        write_results(options.json, "frameworks", options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
