"""CPU time of a token in `generate`: `model.to(torch.bfloat16)`, torch.compile of that, and `amp.compile`.

A small Llama with random weights decodes 32 tokens behind a prompt of 16, greedily, in turns: one `generate` of each
variant after the other, on one thread. Counted is the CPU time of the process, which other processes leave alone; of
some rounds the least and the median. torch.compile is put on `forward`, as transformers does it itself on a GPU.

    python benchmarks/generate.py
    python benchmarks/generate.py --rounds 20 --caches static
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring import write_results
from torch import Tensor, nn

import amp_compiler as amp

AS_BF16, COMPILED, OURS = "model.to(bfloat16)", "torch.compile of that", "amp.compile"
PROMPT, TOKENS, WARM_UPS = 16, 32, 2


def llama(width: int = 256, layers: int = 4) -> nn.Module:
    """With random weights, which end no text before its length."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def variants() -> dict[str, Any]:
    """Copies of one model."""
    model = llama()
    as_bf16 = copy.deepcopy(model).to(torch.bfloat16)
    compiled = copy.deepcopy(as_bf16)
    compiled.forward = torch.compile(compiled.forward)
    return {AS_BF16: as_bf16, COMPILED: compiled, OURS: amp.compile(model, dtype="bf16")}


def generated(model: Any, prompt: Tensor, cache: str) -> int:
    """How many tokens came."""
    options = {"cache_implementation": cache} if cache != "dynamic" else {}
    with torch.no_grad():
        result = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, **options)
    return int(result.shape[1]) - PROMPT


def measured(cache: str, rounds: int) -> list[dict[str, Any]]:
    """Least and median milliseconds of CPU time of a token."""
    prompt = torch.randint(1, 1024, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    models, times = variants(), dict[str, list[float]]()
    for number in range(rounds + WARM_UPS):
        for name, model in models.items():
            began = time.process_time()
            tokens = generated(model, prompt, cache)
            if number >= WARM_UPS:
                times.setdefault(name, []).append(1000 * (time.process_time() - began) / tokens)
    return [
        {"cache": cache, "variant": name, "least_ms": min(one), "median_ms": statistics.median(one)}
        for name, one in times.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--caches", nargs="+", choices=["dynamic", "static"], default=["dynamic", "static"])
    parser.add_argument("--device", choices=["cpu"], default="cpu")
    parser.add_argument("--json", type=Path, help="where the numbers go; nowhere by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for cache in options.caches for row in measured(cache, options.rounds)]
    for row in rows:
        print(f"{row['cache']:8} {row['variant']:28} {row['least_ms']:6.2f} ms a token, median {row['median_ms']:6.2f}")
    if options.json is not None:
        write_results(options.json, "generate", options, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
