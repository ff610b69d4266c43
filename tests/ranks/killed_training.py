"""What torchrun runs for `test_rank_checkpoints.py`: two ranks, of which one is killed by SIGKILL, and then another.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --standalone --nproc-per-node 2 --max-restarts 2 killed_training.py FOLDER

At the first start rank 1 is killed between two checkpoints. At the second rank 0 is, in the midst of saving one. The
third start goes on to the end, trains once more without any of this, and writes into `result.json` what it has found.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import amp_compiler as amp

STEPS, EVERY, KILLED = 10, 3, 7
SCALE = {"mode": "dynamic", "init": 2.0**20, "growth_interval": 4}  # the first steps are skipped
FORMS: dict[str, dict[str, Any]] = {"split": {"shard": "update"}, "plain": {}}


def prepared() -> tuple[dict[str, nn.Module], dict[str, amp.TrainingStep]]:
    torch.manual_seed(dist.get_rank())
    models = {name: nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.Dropout(0.1), nn.Linear(9, 4)) for name in FORMS}
    steps = {
        name: amp.training_step(
            model,
            lambda m, x, y: (m(x) - y).square().mean(),
            torch.optim.AdamW(model.parameters(), 1e-2),
            dtype="fp16",
            rules={"version": 1, "extends": "default", "reduce": FORMS[name], "loss_scale": SCALE},
            process_group=dist.group.WORLD,
            backend="eager",
        )
        for name, model in models.items()
    }
    return models, steps


def train(steps: dict[str, amp.TrainingStep]) -> None:
    for step in steps.values():
        step(torch.randn(4, 8), torch.randn(4, 4))


def everything(models: dict[str, nn.Module], steps: dict[str, amp.TrainingStep]) -> list[Tensor]:
    """Weights, masters, moments and loss scales; all ranks ask for it."""
    states = [step._optimizers[0].state_dict()["state"] for step in steps.values()]
    held = [tensor for state in states for one in state.values() for _, tensor in sorted(one.items())]
    return [
        *held,
        *(p for model in models.values() for p in model.parameters()),
        *(s.loss_scale for s in steps.values()),
    ]


def kill(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, start = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    models, steps = prepared()
    result = amp.load_checkpoint(steps, folder / "checkpoints")
    first = result.number if result else 0
    (folder / f"start {start} of rank {rank}").write_text(str(first))
    for number in range(first, STEPS):
        train(steps)
        if number == KILLED and start == 0 and rank == 1:
            kill()
        if (number + 1) % EVERY == 0:
            stops = start == 1 and rank == 0 and number > first
            with mock.patch.object(Path, "rename", kill) if stops else mock.MagicMock():
                amp.save_checkpoint(steps, folder / "checkpoints", number + 1)
    ended = everything(models, steps)
    models, steps = prepared()
    for _ in range(STEPS):
        train(steps)
    same = [torch.equal(a, b) for a, b in zip(ended, everything(models, steps), strict=True)]
    scales = {name: float(step.skipped_steps) for name, step in steps.items()}
    (folder / f"result {rank}.json").write_text(json.dumps({"same": same, "skipped": scales}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
