"""Checkpoints of one process; those of several are in `test_rank_checkpoints.py`."""

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rank_harness import adamw, equal, rows, sgd, squares
from torch import nn

import amp_compiler as amp


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 4))


def prepared(seed, model: Callable[[], nn.Module] = net, optimizer=adamw, **options):
    torch.manual_seed(seed)
    trained = model()
    options = {"dtype": "bf16", "backend": "eager", **options}
    return trained, amp.training_step(trained, squares, optimizer(trained.parameters()), **options)


def everything(model, step):
    """All tensors that training goes on from, of one process."""
    states = [step._optimizers[0].state.get(p, {}) for p in model.parameters()]
    held = [value for state in states for _, value in sorted(state.items())]
    return [t.clone() for t in (*model.state_dict().values(), *held, step.loss_scale, step.skipped_steps)]


FP16 = {"mode": "dynamic", "init": 2.0**20, "growth_interval": 2}
LOW = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "stochastic"}}
KAHAN = {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "kahan"}}
STEPS = {
    "adamw": {},
    "sgd in FP16": {
        "optimizer": sgd,
        "dtype": "fp16",
        "rules": {"version": 1, "extends": "default", "loss_scale": FP16},
    },
    "a 16-bit model": {"model": lambda: net().bfloat16()},
    "stochastic rounding": {"optimizer": sgd, "rules": LOW},
    "kahan": {"rules": KAHAN},
    "traced": {"optimizer": lambda inputs: torch.optim.NAdam(inputs, 1e-2)},
    "dropout and statistics": {
        "model": lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    },
    "gathered batches": {"accumulate": 3, "dtype": "fp16", "clip_norm": 1.0},
    "fp32": {"enabled": False},
    "two groups": {
        "optimizer": lambda inputs: torch.optim.AdamW(
            [{"params": [p], "lr": 0.01 * n} for n, p in enumerate(inputs, 1)]
        )
    },
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("case", STEPS)
def test_a_step_goes_on_to_the_bit(case, tmp_path):
    model, step = prepared(0, **STEPS[case])
    for batch in rows(6)[:3]:
        step(*batch)
    amp.save_checkpoint(step, tmp_path, 3)
    saved = everything(model, step)
    for batch in rows(6)[3:]:
        step(*batch)
    for trained_before in (False, True):
        again, resumed = prepared(7, **STEPS[case])
        if trained_before:
            resumed(*rows(6)[0])
            resumed._optimizers[0].param_groups[0]["lr"] = 10.0
        result = amp.load_checkpoint(resumed, tmp_path)
        assert result == amp.Checkpoint(3, tmp_path / "3", None)
        if trained_before:
            assert equal(everything(again, resumed), saved)
        for batch in rows(6)[3:]:
            resumed(*batch)
        assert equal(everything(again, resumed), everything(model, step))


@pytest.mark.parametrize("begun", [0.0, 1.0])
def test_the_mark_beside_a_first_momentum_in_an_older_checkpoint_is_read(begun, tmp_path):
    dampened = {"optimizer": lambda inputs: torch.optim.SGD(inputs, 0.1, momentum=0.9, dampening=0.5)}
    (model, step), (again, resumed) = prepared(0, **dampened), prepared(7, **dampened)
    state = step._optimizers[0].state
    for one in model.parameters():
        state[one] = {"momentum_buffer": torch.zeros_like(one), "begun": torch.tensor(begun)}
    amp.save_checkpoint(step, tmp_path, 1)
    if not begun:
        state.clear()  # as torch has it in front of the first update
    amp.load_checkpoint(resumed, tmp_path)
    for batch in rows(6)[:2]:
        assert equal([step(*batch)], [resumed(*batch)])
    assert equal([*model.parameters()], [*again.parameters()])


def test_a_step_that_never_ran_is_saved_and_loaded(tmp_path):
    model, step = prepared(0)
    amp.save_checkpoint(step, tmp_path, 0, extra={"epoch": 3})
    again, resumed = prepared(7)
    result = amp.load_checkpoint(resumed, tmp_path)
    assert result is not None and result.extra == {"epoch": 3}
    assert equal(everything(again, resumed), everything(model, step))


def test_plain_torch_reads_it(tmp_path):
    model, step = prepared(0, model=lambda: net().bfloat16())
    for batch in rows(6):
        step(*batch)
    path = amp.save_checkpoint(step, tmp_path, 6)
    masters = [step._optimizers[0].state[p]["master"] for p in model.parameters()]
    plain = nn.ModuleDict({"model": net()})
    saved = torch.load(path / "rank-0.pt")["steps"][""]
    plain.load_state_dict(saved["model"])
    assert equal(masters, list(plain.parameters()))
    assert saved["state"]["0.weight"]["exp_avg"].shape == (9, 8)


def gan(seed):
    torch.manual_seed(seed)
    nets = {"made": nn.Linear(8, 8).bfloat16(), "judge": nn.Linear(8, 4)}
    first = amp.training_step(
        nets, lambda nets, x, y: -squares(lambda x: nets["judge"](nets["made"](x)), x, y),
        sgd(nets["made"].parameters()), dtype="bf16", backend="eager",
    )  # fmt: skip
    second = amp.training_step(
        nets, lambda nets, x, y: squares(lambda x: nets["judge"](nets["made"](x)), x, y),
        adamw(nets["judge"].parameters()), dtype="bf16", backend="eager",
    )  # fmt: skip
    return nets, {"generator": first, "judge": second}


def test_the_steps_of_a_gan_are_one_checkpoint(tmp_path):
    def run(steps, some):
        for batch in some:
            for step in steps.values():
                step(*batch)

    nets, steps = gan(0)
    run(steps, rows(6)[:3])
    path = amp.save_checkpoint(steps, tmp_path, 3)
    run(steps, rows(6)[3:])
    again, resumed = gan(7)
    amp.load_checkpoint(resumed, tmp_path)
    run(resumed, rows(6)[3:])
    for name, step in steps.items():
        for key in nets:
            assert equal(everything(again[key], resumed[name]), everything(nets[key], step))
    saved = torch.load(path / "rank-0.pt")["steps"]
    held = [[key for key in one["model"] if key.endswith("weight")] for one in saved.values()]
    assert held == [["model.made.weight"], ["model.judge.weight"]]  # each once
    with pytest.raises(amp.AmpError, match="holds the steps generator, judge, not a step; pass to it what was saved"):
        amp.load_checkpoint(resumed["judge"], tmp_path)


class Killed(BaseException):
    """In the place of SIGKILL: nothing behind it runs, but for what Python unwinds."""


@pytest.mark.parametrize("where", ["mkdir", "save", "rename"])
def test_what_was_half_written_is_never_taken(where, tmp_path, monkeypatch):
    """Killed behind the making of the folder, when its file is to be written, and in front of the last name."""
    model, step = prepared(0)
    step(*rows(6)[0])
    amp.save_checkpoint(step, tmp_path, 1)
    before = everything(model, step)
    step(*rows(6)[1])
    real = Path.mkdir

    def kill(self, *args, **kwargs):
        if where == "mkdir":
            real(self, *args, **kwargs)
        if where == "save" or self.name == "2.partial":
            raise Killed

    monkeypatch.setattr(torch if where == "save" else Path, where, kill)
    with pytest.raises((Killed, amp.AmpError)):
        amp.save_checkpoint(step, tmp_path, 2)
    monkeypatch.undo()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1", "2.partial"]
    result = amp.load_checkpoint(step, tmp_path)
    assert result is not None and result.number == 1
    assert equal(everything(model, step), before)
    with pytest.raises(amp.AmpError, match=r"there is no checkpoint 2; pass one of: 1"):
        amp.load_checkpoint(step, tmp_path, 2)
    amp.save_checkpoint(step, tmp_path, 2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["1", "2"]


def test_so_many_are_kept_and_none_is_overwritten(tmp_path):
    _, step = prepared(0)
    for number in (1, 2, 10):
        amp.save_checkpoint(step, tmp_path, number)
    amp.save_checkpoint(step, tmp_path, 5, keep=2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["10", "2", "5"]
    result = amp.load_checkpoint(step, tmp_path)
    assert result is not None and result.number == 10
    with pytest.raises(amp.AmpError, match="10: there is a checkpoint already; delete it, or pass another number"):
        amp.save_checkpoint(step, tmp_path, 10)


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "changed":
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["truncated", "changed", "deleted"])
@pytest.mark.parametrize("file", ["rank-0.pt", "checkpoint.json"])
def test_a_damaged_file_is_named_and_changes_nothing(file, how, tmp_path):
    _, step = prepared(0)
    path = amp.save_checkpoint(step, tmp_path, 1)
    damaged(path / file, how)
    again, other = prepared(7)
    before = everything(again, other)
    with pytest.raises(amp.AmpError, match=rf"1/{file}: .*delete the folder: the checkpoint before it"):
        amp.load_checkpoint(other, tmp_path)
    assert equal(everything(again, other), before)


def frozen(dtype: torch.dtype) -> dict:
    """A step whose first layer is in a type and not trained."""

    def model() -> nn.Module:
        result = net()
        result[0].to(dtype).requires_grad_(False)
        return result

    return {"model": model, "optimizer": lambda inputs: sgd([p for p in inputs if p.requires_grad])}


MISFITS: dict[str, tuple[dict, str]] = {
    "another layer": (
        {"model": lambda: nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 4))},
        r"model.1.bias is missing there and float32 \[4\] here; .* and 9 more",
    ),
    "another shape": (
        {"model": lambda: nn.Sequential(nn.Linear(8, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 4))},
        r"model.0.bias is float32 \[9\] there and float32 \[5\] here; .* and 2 more",
    ),
    "another optimizer": (
        {"optimizer": sgd},
        "of 0.bias is AdamW 0, group 0, place 1 there and SGD 0, ",
    ),
    "other groups": (
        {"optimizer": lambda inputs: torch.optim.AdamW([{"params": [p]} for p in inputs])},
        "optimizer of 0.bias is AdamW 0, group 0, place 1 there and AdamW 0, group 1, place 0 here",
    ),
    "without masters": (
        {"rules": {"version": 1, "extends": "default", "weights": {"master": "low"}}},
        "weights.master is fp32 there and low here",
    ),
    "other buffers": (
        {"model": lambda: nn.Sequential(nn.Linear(8, 9), nn.GELU(), nn.BatchNorm1d(9), nn.Linear(9, 4))},
        r"model.2.num_batches_tracked is missing there and int64 \[\] here",
    ),
    "a frozen weight of another type": (
        frozen(torch.bfloat16),
        r"0\.bias is float32 \[9\] there and bfloat16",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_another_steps_checkpoint_is_refused_by_name(case, tmp_path):
    _, step = prepared(0, **(frozen(torch.float32) if "frozen" in case else {}))
    step(*rows(6)[0])
    amp.save_checkpoint(step, tmp_path, 1)
    options, message = MISFITS[case]
    other, misfit = prepared(7, **options)
    before = everything(other, misfit)
    with pytest.raises(amp.AmpError, match=message) as caught:
        amp.load_checkpoint(misfit, tmp_path)
    assert caught.value.where == str(tmp_path / "1")
    assert caught.value.hint == "give the step the model, optimizer, dtype and rules that it was saved with"
    assert equal(everything(other, misfit), before)


def test_a_loss_scale_that_cannot_be_taken_over_changes_nothing(tmp_path):
    _, step = prepared(0, dtype="fp16", loss_scale=amp.DynamicLossScale(backoff_factor=0.3))
    amp.save_checkpoint(step, tmp_path, 1)
    again, other = prepared(7, dtype="fp16", loss_scale=amp.NormAdaptiveLossScale())
    before = everything(again, other)
    with pytest.raises(amp.AmpError, match="backoff_factor must be a power of two"):
        amp.load_checkpoint(other, tmp_path)
    assert equal(everything(again, other), before)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        result = self.net(x)
        return result if result.sum() > 0 else result * 2


@pytest.mark.parametrize("model", [net, Branching])
def test_a_step_is_saved_behind_the_last_gathered_batch(model, tmp_path):
    """And begins to gather anew where it is loaded."""
    make, (model, step) = model, prepared(0, model=model, accumulate=2)
    step(*rows(6)[0])
    with pytest.raises(amp.AmpError, match=r"1 of 2 batches were gathered, .* behind step\.flush"):
        amp.save_checkpoint(step, tmp_path, 1)
    step(*rows(6)[1])
    amp.save_checkpoint(step, tmp_path, 2)
    again, resumed = prepared(7, model=make, accumulate=2)
    resumed(*rows(6)[0])
    amp.load_checkpoint(resumed, tmp_path)
    for batch in rows(6)[2:]:
        step(*batch)
        resumed(*batch)
    assert ("subgraph" in step.execution) == (make is Branching)
    assert equal(everything(again, resumed), everything(model, step))


def test_extra_state_of_another_kind_is_loaded_and_a_view_is_saved_alone(tmp_path):
    class Seen(nn.Linear):
        def __init__(self):
            super().__init__(4, 1)
            self.seen = None
            self.register_buffer("few", torch.arange(1_000_000.0)[:3])

        def get_extra_state(self):
            return self.seen

        def set_extra_state(self, state):
            self.seen = state

    def built():
        model = Seen()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return model, amp.training_step(model, lambda m, x: m(x).mean(), optimizer, dtype="bf16", backend="eager")

    model, step = built()
    step(torch.ones(2, 4))
    model.seen = {"batches": 1}
    folder = amp.save_checkpoint(step, tmp_path, 1)
    assert sum(one.stat().st_size for one in folder.iterdir()) < 100_000
    other, loaded = built()
    amp.load_checkpoint(loaded, tmp_path)
    assert other.seen == {"batches": 1} and torch.equal(other.few, model.few)


def test_what_cannot_be_pickled_is_named_and_leaves_no_checkpoint(tmp_path):
    _, step = prepared(0)
    with pytest.raises(amp.AmpError, match=r"pass as `extra`.*what pickle takes"):
        amp.save_checkpoint(step, tmp_path, 1, extra=lambda: None)
    assert amp.load_checkpoint(step, tmp_path) is None
    amp.save_checkpoint(step, tmp_path, 1)
    assert amp.load_checkpoint(step, tmp_path).number == 1


def test_a_full_disk_is_named_and_leaves_no_checkpoint(tmp_path):
    _, step = prepared(0)
    amp.save_checkpoint(step, tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # bytes of a file, as if there were no more room
    try:
        with pytest.raises(amp.AmpError, match=r"2\.partial/rank-0\.pt: .*see that there is room"):
            amp.save_checkpoint(step, tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert amp.load_checkpoint(step, tmp_path).number == 1
    amp.save_checkpoint(step, tmp_path, 2)


def test_wrong_arguments_are_named(tmp_path):
    _, step = prepared(0)
    wrong = {
        "number=-1": lambda: amp.save_checkpoint(step, tmp_path, -1),
        "number=True": lambda: amp.save_checkpoint(step, tmp_path, True),
        "keep=0": lambda: amp.save_checkpoint(step, tmp_path, 1, keep=0),
        "was given a Linear": lambda: amp.save_checkpoint(nn.Linear(1, 1), tmp_path, 1),
        "was given a dict": lambda: amp.load_checkpoint({}, tmp_path),
        "the steps need names": lambda: amp.load_checkpoint({"": step}, tmp_path),
    }
    for message, call in wrong.items():
        with pytest.raises(amp.AmpError, match=message):
            call()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(
        amp.AmpError, match=r"file/1.partial: it cannot be read or written: (File exists|Not a directory)"
    ):
        amp.save_checkpoint(step, tmp_path / "file", 1)
    with pytest.raises(
        amp.AmpError, match="it cannot be read or written: Not a directory"
    ):  # and not None, as where there is nothing yet
        amp.load_checkpoint(step, tmp_path / "file")
    shutil.rmtree(tmp_path)
    assert amp.load_checkpoint(step, tmp_path) is None
