"""A run of torch.autocast, GradScaler and AdamW that goes on in a training step, and back, by plain state dicts."""

import io
import math
from itertools import pairwise

import pytest
import torch
from toys import classes, eager_step, mlp

GENERATOR = torch.Generator().manual_seed(0)
PART = 6  # steps until the run changes sides
X = torch.randn(32, 8, generator=GENERATOR)
BATCHES = [X + 0.1 * torch.randn(32, 8, generator=GENERATOR) for _ in range(3 * PART)]
Y = torch.randint(0, 4, (32,), generator=GENERATOR)
BAD = {2, PART + 3, 2 * PART + 1}  # one step on each side
# Type, whether a GradScaler is enabled, and the loss scale of the training step.
KINDS = {
    "fp16": (torch.float16, True, "dynamic"),
    "bf16": (torch.bfloat16, False, None),
    "bf16, scaled": (torch.bfloat16, True, "dynamic"),
}


class Side:
    """A model, its AdamW and what holds the scale; started anew, or from the state dicts of the side before."""

    def __init__(self, kind, saved=None, backend="eager"):
        self.low, self.scaled, self.loss_scale = KINDS[kind]
        torch.manual_seed(0 if saved is None else 1)
        self.model = mlp()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.scale = self.start(backend)
        if saved is not None:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.scale.load_state_dict(saved["scale"])

    def save(self):
        """Plain state dicts, by way of a file that may hold nothing else."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scale": self.scale}
        file = io.BytesIO()
        torch.save({key: part.state_dict() for key, part in parts.items()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def train(self, first, last):
        """The losses of some steps, and the scale and the growth tracker after each."""
        losses, scales = [], []
        for number in range(first, last):
            x = BATCHES[number].clone()
            if self.scaled and number in BAD:
                x[3, 2] = float("inf")
            losses.append(float(self.step(x)))
            state = self.scale.state_dict() if self.scaled else {}
            scales.append((state.get("scale"), state.get("_growth_tracker")))
        return losses, scales


class Torchs(Side):
    def start(self, backend):
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4, enabled=self.scaled)

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", self.low):
            loss = classes(self.model, x, Y)
        self.scale.scale(loss).backward()
        self.scale.step(self.optimizer)
        self.scale.update()
        return loss.detach()


class Ours(Side):
    def start(self, backend):
        dtype = "fp16" if self.low is torch.float16 else "bf16"
        return eager_step(self.model, classes, self.optimizer, dtype=dtype, loss_scale=self.loss_scale, backend=backend)

    def step(self, x):
        return self.scale(x, Y)


def runs(kind, backend="eager"):
    """The run that is torch's all the way, and the one that changes sides twice: their last sides and their logs."""
    whole = Torchs(kind)
    expected = whole.train(0, 3 * PART)
    first = Torchs(kind)
    logs = [first.train(0, PART)]
    second = Ours(kind, first.save(), backend)
    logs.append(second.train(PART, 2 * PART))
    last = Torchs(kind, second.save())
    logs.append(last.train(2 * PART, 3 * PART))
    return whole, expected, last, [a + b + c for a, b, c in zip(*logs, strict=True)]


def counters(side):
    return [int(state["step"]) for state in side.optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        *((kind, "eager") for kind in ("fp16", "bf16", "bf16, scaled")),
        pytest.param("fp16", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_changes_sides_twice_is_torchs_run(kind, backend):
    whole, (wanted, wanted_scales), last, (losses, scales) = runs(kind, backend)
    assert scales == wanted_scales
    if whole.scaled:
        pairs = [(before[0], after[0]) for before, after in pairwise(scales)]
        assert {number for number, (before, after) in enumerate(pairs, 1) if after < before} == BAD
        assert scales[PART][0] > scales[PART - 1][0] and scales[2 * PART - 1][1] == 2  # the tracker crosses over
    skipped = len(BAD) if whole.scaled else 0
    assert counters(last) == counters(whole) == [3 * PART - skipped] * 6
    assert [math.isfinite(a) for a in losses] == [math.isfinite(b) for b in wanted]
    assert sum(not math.isfinite(a) for a in losses) == skipped
    assert last.optimizer.state_dict()["param_groups"] == whole.optimizer.state_dict()["param_groups"]
    # Both sides round the same values at the same places. Where a sum is taken in another order before, a logit of
    # about 1 differs by one unit in the last place, and the mean loss of 32 rows by no more than half of that.
    bound = torch.finfo(whole.low).eps / 2
    differences = [abs(a - b) for a, b in zip(losses, wanted, strict=True) if math.isfinite(a)]
    assert differences[0] == 0.0 and max(differences) < bound
    assert wanted[0] - wanted[-1] > 100 * bound
