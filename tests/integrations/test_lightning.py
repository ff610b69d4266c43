"""`AmpPrecision` beside Lightning's own BF16: losses, clipping, accumulation, schedules, checkpoints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_compiler as amp

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # Lightning's advice on workers and devices


class Lit(pl.LightningModule):
    """A classifier that logs, validates and has a schedule."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        self.automatic_optimization = not manual

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train", loss, on_step=True)
        return {"loss": loss, "count": y.sum()}

    def validation_step(self, batch, batch_idx):
        self.log("valid", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)]


class Seen(pl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.losses.append(float(outputs["loss"]))
        assert torch.equal(trainer.callback_metrics["train"], outputs["loss"] * trainer.accumulate_grad_batches)
        assert int(outputs["count"]) == int(batch[1].sum())


def loader():
    draw = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(
        torch.randn(20, 8, generator=draw), torch.randint(0, 4, (20,), generator=draw)
    )
    return torch.utils.data.DataLoader(data, 4)


def fitted(tmp_path, epochs=10, resume=None, module=None, **options):
    module, seen = module or Lit(), Seen()
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", callbacks=[seen], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        **{"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, **options},
    )  # fmt: skip
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return module, seen.losses, trainer


def plugin(dtype="bf16"):
    from amp_compiler.integrations.lightning import AmpPrecision

    return AmpPrecision(dtype, rules="default", backend="eager")


def test_it_trains_as_lightnings_own_mixed_precision(tmp_path):
    result = plugin()
    _, ours, trainer = fitted(tmp_path, 20, plugins=result)
    _, theirs, reference = fitted(tmp_path, 20, precision="bf16-mixed")
    assert len(ours) == 100 and trainer.global_step == reference.global_step == 60  # the fifth batch counts alone
    assert ours == pytest.approx(theirs, rel=0.05)  # BF16 roundings that AdamW amplifies over 60 updates
    valid = [float(one.callback_metrics["valid"]) for one in (trainer, reference)]
    assert valid[0] == pytest.approx(valid[1], rel=0.05)
    assert result._step.execution.startswith("as one graph") and result._step.plan.low_nodes


@pytest.mark.slow
def test_several_processes_train_as_lightnings_own(tmp_path):
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*command, __file__, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"rank\d", done.stdout)) == ["rank0", "rank1"]


def main(folder):
    """One process of two."""
    result = plugin()
    ours, losses, _ = fitted(folder, plugins=result, strategy="ddp", devices=2)
    theirs, reference, _ = fitted(folder, precision="bf16-mixed", strategy="ddp", devices=2)
    assert result._step.execution.startswith("as one graph") and result._step.plan.low_nodes
    assert losses == pytest.approx(reference, rel=0.05) and losses[0] != losses[1]
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.01)  # a fifth of an update of AdamW
    print(f"rank{os.environ['RANK']}", flush=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_checkpoint_resumes_bit_for_bit(tmp_path, dtype):
    whole, _, _ = fitted(tmp_path, 4, plugins=plugin(dtype))
    _, _, first = fitted(tmp_path, 2, plugins=plugin(dtype))
    first.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=False)
    assert dtype == "bf16" or "scale" in saved["AmpPrecision"]
    again, _, _ = fitted(tmp_path, 4, tmp_path / "half.ckpt", plugins=plugin(dtype))
    assert all(map(torch.equal, again.parameters(), whole.parameters()))


@pytest.mark.parametrize(
    ("module", "options", "hint"),
    [
        (True, {"gradient_clip_val": None, "accumulate_grad_batches": 1}, "automatic optimization"),
        (False, {"gradient_clip_algorithm": "value"}, "clips by the norm"),
    ],
)
def test_what_it_cannot_do_is_refused(tmp_path, module, options, hint):
    with pytest.raises(amp.AmpError, match=hint):
        fitted(tmp_path, 1, None, Lit(module), plugins=plugin(), **options)


def test_a_module_of_lightning_is_not_compiled():
    with pytest.raises(amp.AmpError, match=r"LightningModule.*AmpPrecision"):
        amp.compile(Lit())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
