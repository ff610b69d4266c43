"""Time and memory of whole training steps: eager FP32, torch.autocast, torch.compile, and `amp.training_step`.

Every variant trains with AdamW; the torch ones with `fused=True`, and in FP16 with `GradScaler`. Each model comes with
a large batch, where matrix products take the time, and with a small one, where the update does.

Each variant trains in a process of its own, as its users' runs do, with an empty cache of compiled code. The processes
take turns of a few steps, for 10 s or more, so that what else runs on the machine slows all of them; the time is the
median of a step, with the 10% and 90% quantiles. On a CPU torch.compile runs the LSTM once more with Dynamo told to
compile recurrent layers (`allow_rnn`), which it else runs as they stand. Ratios are to the fastest. What a process has
freed goes back to the system, or does not, as its C library has it by default; MALLOC_TRIM_THRESHOLD_ and
MALLOC_MMAP_MAX_ change that for all of them. What is compiled once per machine and kept in cache folders is not in the
first call: Inductor's headers, for us with a flag of their own (some 5 s), and our native loops (some 8 s). The first
call with full caches is that of a second process of the same variant.

The GEMM floor is the time of the step's matrix products at the rate of one large product, which takes its turn among
the variants; the table says which share of the step that is.
peak = bytes of the tensors that live between two steps + growth of the resident pages during a step.

On CUDA the models are as large as they are trained there (`models.CUDA_SIZES`), and torch.compile runs in its modes
`default`, `reduce-overhead` and `max-autotune`; ours in that mode is asked for by its name. Steps are timed in
bursts of a dozen by the device's clock: median, 10% and 90% quantile are those of bursts. A few variants compile at
the same time and then take turns, so that a model takes less than four minutes; what is not compiled by then is left
out and told, and a first call is one beside others. What chooses its kernels by timing them, as `max-autotune` does,
would time the others too: it comes behind them and alone, where time is left. Models share `--limit`. peak = what
the allocator took from the device at most (`max_memory_reserved`) in 8 steps of a process that runs nothing else,
after what compiling needed was given back.

    python benchmarks/train_step.py --models gpt2 lstm --steps 20
    python benchmarks/train_step.py --device cuda --models gpt2
    python benchmarks/train_step.py --device cuda --models vit --variants amp_compiler "amp_compiler max-autotune"
"""

from __future__ import annotations

import sys

import cases
from comparison import Comparison
from train_step_runs import Variant

TRAINING = Comparison(
    name="train_step",
    title="training steps",
    description=(__doc__ or "").splitlines()[0],
    make=Variant,
    bounds=(cases.LARGE, "update"),
    backward=True,
)

if __name__ == "__main__":
    sys.exit(TRAINING.main())
