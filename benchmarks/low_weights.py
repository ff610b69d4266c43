"""Memory of `amp.compile(model, weights="low")` beside `model.to(torch.bfloat16)`, plain or compiled, and autocast.

Each variant runs GPT-2 (124 million parameters, 248 MB in BF16) in a process of its own, on a CPU, behind a tiny model
that has brought what a first compilation imports. Counted are pages that no file stands behind: what it holds behind
its first call, without what the allocator keeps of freed memory, and the most in a later call. Linux only.

    python benchmarks/low_weights.py
    python benchmarks/low_weights.py --layers 4 --backend eager
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, write_results
from torch import Tensor, nn

import amp_compiler as amp

AS_BF16, COMPILED_BF16 = "model.to(bfloat16)", "torch.compile(model.to(bfloat16))"
COMPILED, OURS = "torch.compile + autocast", 'amp.compile(weights="low")'
VARIANTS = (AS_BF16, COMPILED_BF16, COMPILED, OURS)
MOST_HELD, MOST_PEAK = 1.05, 0.6  # of the first, and of the third


def own_pages(peak: bool = False) -> float:
    """Megabytes of the process that no file stands behind; with `peak`, the most since `forget_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    pages = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", status, re.MULTILINE)}
    shared = pages["RssFile"] + pages["RssShmem"]
    return (pages["VmHWM"] - shared if peak else pages["RssAnon"]) * 1024 / 1e6


def forget_peak() -> None:
    """Let the peak begin at what is held now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def gpt2(layers: int, width: int = 768) -> nn.Module:
    """With random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_embd=width, use_cache=False)).eval()


def prepared(variant: str, model: nn.Module, backend: Any) -> Callable[..., Any]:
    """What is called."""
    if variant in (AS_BF16, COMPILED_BF16):
        model = model.to(torch.bfloat16)
        return model if variant == AS_BF16 else torch.compile(model)
    return (
        torch.compile(model)
        if variant == COMPILED
        else amp.compile(model, dtype="bf16", weights="low", backend=backend)
    )


def called(variant: str, run: Callable[..., Any], ids: Tensor) -> None:
    """One forward."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=variant == COMPILED):
        run(input_ids=ids)


def measured(variant: str, layers: int, backend: Any) -> dict[str, float]:
    """One variant, in this process."""
    torch.set_num_threads(1)
    ids = torch.zeros(1, 32, dtype=torch.int64)
    called(variant, prepared(variant, gpt2(1, 48), backend), ids)
    torch.compiler.reset()
    gc.collect()
    start, model = own_pages(), gpt2(layers)
    run = prepared(variant, model, backend)
    called(variant, run, ids)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    held = own_pages()
    forget_peak()
    called(variant, run, ids)
    peak = own_pages(peak=True)
    return {"variant": variant, "held_mb": held - start, "peak_mb": peak - start}  # type: ignore[dict-item]


def rows_of(layers: int, backend: str) -> list[dict[str, Any]]:
    """All variants."""
    command = [sys.executable, __file__, "--layers", str(layers), "--backend", backend, "--variant"]
    env = os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # else the tiny model would bring nothing
    done = [subprocess.run([*command, one], capture_output=True, text=True, check=True, env=env) for one in VARIANTS]
    return [json.loads(one.stdout.splitlines()[-1]) for one in done]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--json", type=Path, default=RESULTS / "low_weights_cpu.json")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        print(json.dumps(measured(options.variant, options.layers, options.backend)))
        return 0
    rows = rows_of(options.layers, options.backend)
    for row in rows:
        print(f"{row['variant']:34} held {row['held_mb']:7.1f} MB, peak {row['peak_mb']:7.1f} MB")
    low, low_compiled, compiled, ours = rows
    held, peak = ours["held_mb"] / low["held_mb"], ours["peak_mb"] / compiled["peak_mb"]
    print(f"held {held:.3f} of the first (at most {MOST_HELD}), peak {peak:.3f} of the third (at most {MOST_PEAK})")
    print(f"held {ours['held_mb'] / low_compiled['held_mb']:.3f} of the second, which a compiler holds too")
    write_results(options.json, "low_weights", options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
