"""`amp.save_checkpoint` and `amp.load_checkpoint`: what a training step goes on from.

A checkpoint says the same whoever writes it: the FP32 value of each weight that is trained, its master where it has
one, and the optimizer's state, by name. Of a weight whose update is split each rank writes its part, of all else the
first one writes all; so any number of ranks goes on from what any other has written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_compiler.errors import AmpError
from amp_compiler.fx.capture.generators import random_state, set_random_state
from amp_compiler.ranks import checkpoint_folder
from amp_compiler.ranks.coordinator import LOADING_ALL, SAVING_ALL
from amp_compiler.ranks.ranks import Ranks, check_equal
from amp_compiler.training.checkpoint_state import StepContents
from amp_compiler.training.step import TrainingStep

_SAME = "call it on all ranks with the same steps, folder and number"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Args:
        number: its number.
        path: its folder.
        extra: what was saved beside the steps.
    """

    number: int
    path: Path
    extra: Any


def save_checkpoint(
    steps: TrainingStep | Mapping[str, TrainingStep],
    folder: str | os.PathLike[str],
    number: int,
    *,
    extra: Any = None,
    keep: int | None = None,
) -> Path:
    """Save what a training step goes on from: the folder `number` in `folder`, with a file for each rank.

    It holds weights in FP32, buffers, the optimizer's state and hyperparameters, loss scale with its counters, and
    random state of each rank. With several ranks all of them call it, and each writes what it alone has. The folder
    gets its name when all of it is on the disk, and is whole from then on.

    Args:
        steps: a step, or those of one training by name, such as the two of a GAN.
        folder: of this training's checkpoints; all ranks see it.
        number: of this one, such as the number of steps so far.
        extra: anything that can be pickled, such as `scheduler.state_dict()`; of several ranks the first one's.
        keep: how many checkpoints stay, this one and those before it; `None` for all.

    Returns:
        The folder of the checkpoint.

    Raises:
        AmpError: there is a checkpoint of that number, a file cannot be written, an argument is wrong, or batches were
            gathered (`accumulate=`) that no update has used. With several ranks, on each of them.

    Example:
        >>> import tempfile, torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1),
        ...                          dtype="bf16", backend="eager")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = amp.save_checkpoint(step, folder, 0, extra={"epoch": 3})
        ...     checkpoint = amp.load_checkpoint(step, folder)
        >>> checkpoint.number, checkpoint.extra
        (0, {'epoch': 3})
    """
    named, ranks = _joined(steps, SAVING_ALL)
    saved: dict[str, Any] = {}
    about: dict[str, Any] = {}

    def prepare() -> dict[str, Any]:
        if type(number) is not int or number < 0:
            raise AmpError(f"number={number!r}", hint="pass a whole number from 0 on, such as that of the steps so far")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise AmpError(f"keep={keep!r}", hint="pass a whole number from 1 on, or None to keep all")
        for name, one in named.items():
            saved[name], about[name] = one.saved(), one.about()
        shared = sorted(f"{name} {entry}".strip() for name, one in named.items() for entry in one.entries())
        return {"number": number, "keep": keep, "entries": shared}

    check_equal(checkpoint_folder.each(ranks, prepare), _SAME)
    drawn = random_state(next(iter(named.values())).device)
    own: dict[str, Any] = {"steps": saved, "random": dict(zip(("cpu", "cuda"), drawn, strict=False))}
    if checkpoint_folder.place(ranks)[0] == 0:
        own["extra"] = extra
    return checkpoint_folder.write(Path(folder), number, {"steps": about}, own, keep, ranks)


def load_checkpoint(
    steps: TrainingStep | Mapping[str, TrainingStep], folder: str | os.PathLike[str], number: int | None = None
) -> Checkpoint | None:
    """Let a training step go on from a checkpoint that `save_checkpoint` wrote, on any number of ranks.

    The files are compared with their checksums, and what they hold with the step, before anything is changed. The step
    may be new or have trained before. torch's random state is taken over where there are as many ranks as there were.

    Warning:
        A checkpoint can run code: its files are pickles, and checksums find damage, not an attacker. Load only
        checkpoints that you trust.

    Args:
        steps: a step, or those of one training by name, as they were saved.
        folder: of this training's checkpoints; all ranks see it.
        number: which one; `None` for the newest.

    Returns:
        The checkpoint; `None` where the folder has none, and no number was asked for.

    Raises:
        AmpError: there is none of that number, a file is damaged, or it is the checkpoint of another model, optimizer
            or kind of weights. With several ranks, on each of them.

    Example:
        >>> import tempfile, torch, amp_compiler as amp
        >>> model = torch.nn.Linear(4, 1)
        >>> step = amp.training_step(model, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1),
        ...                          dtype="bf16", backend="eager")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(amp.load_checkpoint(step, folder))  # the first start of a run
        None
    """
    named, ranks = _joined(steps, LOADING_ALL)
    chosen = checkpoint_folder.choose(Path(folder), number, ranks)
    if chosen is None:
        return None
    path, about = chosen
    files: list[Any] = []  # of each rank

    def prepare() -> None:
        if sorted(about["steps"]) != sorted(named):
            was, now = (
                "a step" if list(one) == [""] else f"the steps {', '.join(one)}" for one in (about["steps"], named)
            )
            raise AmpError(
                f"holds {was}, not {now}", where=str(path), hint="pass to it what was saved: a step, or a dict of them"
            )
        files.extend(checkpoint_folder.read(path, about["ranks"]))
        for name, one in named.items():
            one.check([file["steps"][name] for file in files], about["steps"][name], str(path))

    checkpoint_folder.each(ranks, prepare)
    for one in named.values():
        one.place()
    rank, size = checkpoint_folder.place(ranks)
    if len(files) == size:
        device, drawn = next(iter(named.values())).device, files[rank]["random"]
        set_random_state(device, [drawn[kind] for kind in dict.fromkeys(("cpu", device.type)) if kind in drawn])
    return Checkpoint(int(path.name), path, files[0]["extra"])


def _joined(steps: Any, called: str) -> tuple[dict[str, StepContents], Ranks | None]:
    """The steps by name, once all ranks call the same."""
    named = {"": steps} if isinstance(steps, TrainingStep) else steps
    if not isinstance(named, Mapping) or not named or not all(isinstance(one, TrainingStep) for one in named.values()):
        raise AmpError(
            f"{called} was given a {type(steps).__name__}", hint="pass a training step, or a dict of them by name"
        )
    if any(not isinstance(name, str) or (name == "") != (named is not steps) for name in named):
        raise AmpError("the steps need names", hint='pass them as {"generator": step, …}')
    ranks = next(iter(named.values()))._setup.ranks
    if len({None if one._setup.ranks is None else one._setup.ranks.name for one in named.values()}) > 1:
        raise AmpError(
            "the steps are of different process groups", hint="give all of them one, or save them one by one"
        )
    for one in named.values():
        if one._coordinator is not None:
            one._coordinator.join(called)
    owned = {
        name: {id(p) for o in one._optimizers for g in o.param_groups for p in g["params"]}
        for name, one in named.items()
    }
    every = set().union(*owned.values())
    return {name: StepContents(one, every - owned[name]) for name, one in named.items()}, ranks
