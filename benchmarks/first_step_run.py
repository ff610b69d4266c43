"""One process of `first_step.py`: makes a model, takes its first training step, and prints what that cost as JSON.

    python benchmarks/first_step_run.py amp_compiler gpt2 imports.json

It imports this project only where that is what is measured.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import resource
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import torch
from torch import nn
from torch.nn import functional as F

OURS, THEIRS = VARIANTS = ("amp_compiler", "torch.compile")
NAMES = ("mlp", "gpt2", "bert", "t5", "mobilenet", "llama", "vit", "lstm")
# As deep as the real ones are, or half of that; and narrow, so that the step itself takes next to no time.
_SIZE = models.Size(vocab=512, hidden=128, layers=6, heads=4, batch=2, tokens=32, image=32, classes=10)
_DEEPER = {"t5": 12}  # both halves together
SMALLEST = "smallest"  # whose first step imports what any first step does
Cost = tuple[float, float]  # CPU seconds of the process and its children, and what a clock says


class Mlp(nn.Module):
    """Linear layers with GELU between them, and cross-entropy."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        body = [layer for _ in range(layers) for layer in (nn.Linear(_SIZE.hidden, _SIZE.hidden), nn.GELU())]
        self.layers = nn.Sequential(*body, nn.Linear(_SIZE.hidden, _SIZE.classes))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.layers(inputs), labels)}


def build(name: str) -> models.Built:
    """A model in train mode and a batch for it, the same ones in every process."""
    if name in models.NAMES:
        sizes = {**vars(_SIZE), "layers": _DEEPER.get(name, _SIZE.layers)}
        models.SIZES["first step"] = models.Size(**sizes)
        return models.build(name, "first step")
    torch.manual_seed(0)
    labels = torch.randint(0, _SIZE.classes, (_SIZE.batch,))
    if name == "mobilenet":
        config = models.transformers.MobileNetV2Config(image_size=_SIZE.image, num_labels=_SIZE.classes)
        batch = {"pixel_values": torch.randn(_SIZE.batch, 3, _SIZE.image, _SIZE.image), "labels": labels}
        return models.transformers.MobileNetV2ForImageClassification(config).train(), batch
    model = Mlp(1 if name == SMALLEST else 4)
    return model, {"inputs": torch.randn(_SIZE.batch, _SIZE.hidden), "labels": labels}


def first_step(variant: str, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Make the step and take it: BF16, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    if variant == OURS:
        import amp_compiler as amp

        step = amp.training_step(model, lambda model, batch: model(**batch)["loss"], optimizer, dtype="bf16")
        return step(batch)  # type: ignore[no-any-return]
    compiled: Callable[..., Any] = torch.compile(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss: torch.Tensor = compiled(**batch)["loss"]
    loss.backward()
    optimizer.step()
    return loss.detach()


def spent() -> Cost:
    """What this process and its children have spent so far, but for children that still run.

    Those are the idle workers of torch's pool, which either side starts; the C++ compiler has ended by then.
    """
    cpu = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return cpu, time.perf_counter()


def main(variant: str, name: str, imports: Path) -> int:
    """Take the step; what is imported first stands in the file `imports`, which a run of `smallest` writes."""
    warnings.filterwarnings("ignore")
    if name != SMALLEST:
        for module in json.loads(imports.read_text(encoding="utf-8")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    model, batch = build(name)
    gc.collect()
    ready = spent()
    first_step(variant, model, batch)
    done = spent()
    if name == SMALLEST:
        imports.parent.mkdir(parents=True, exist_ok=True)
        ours = ("torch", "sympy", "amp_compiler")
        known = [module for module in sys.modules if module.partition(".")[0] in ours]
        imports.write_text(json.dumps(known), encoding="utf-8")
    counted = torch._dynamo.utils.counters
    looked = {key: counted["inductor"][f"fxgraph_cache_{key}"] for key in ("hit", "miss", "bypass")}
    step = [after - before for before, after in zip(ready, done, strict=True)]
    print(json.dumps({"total_cpu_s": done[0], "cpu_s": step[0], "s": step[1], "looked": looked}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
