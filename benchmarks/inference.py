"""Time and memory of inference: eager FP32, torch.autocast, torch.compile with autocast, and `amp.compile`.

A step is one forward in eval mode under `torch.no_grad()`; the models give logits and no loss. Each model comes with a
large batch, where matrix products take the time, and with a small one, where reading the weights does. How time, memory
and first call are measured is said in `train_step.py`. `amp.compile` keeps 16-bit weights beside the FP32 ones, which
`of it state` shows.

    python benchmarks/inference.py --models gpt2 lstm --steps 20
"""

from __future__ import annotations

import contextlib
import sys

import cases
import torch
from comparison import FP8, FP32, Comparison, compiled, mode_of_ours
from measuring import TORCH_TYPES

import amp_compiler as amp


class Inference:
    """One way to run a model: call it for one forward."""

    def __init__(self, variant: str, name: str, bound: str, dtype: str, device: str) -> None:
        self.model, self.batch = cases.build_for_inference(name, bound, device)
        self.context = contextlib.nullcontext
        mode = mode_of_ours(variant)
        if mode is not None:
            self.model = amp.compile(self.model, dtype=dtype, mode=mode, rules="fp8" if variant == FP8 else "default")
        elif variant != FP32:
            self.context = lambda: torch.autocast(device, TORCH_TYPES[dtype])
        self.run = compiled(self.model, variant)

    def __call__(self) -> object:
        with torch.no_grad(), self.context():
            return self.run(**self.batch)

    def idle(self) -> None:
        """Nothing is left over between two forwards."""


INFERENCE = Comparison(
    name="inference",
    title="inference",
    description=(__doc__ or "").splitlines()[0],
    make=Inference,
    bounds=(cases.LARGE, "weights"),
    backward=False,
)

if __name__ == "__main__":
    sys.exit(INFERENCE.main())
