"""The process group that a training step belongs to."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from amp_compiler.errors import AmpError

_ALONE = "process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True)"


def check_group(process_group: Any) -> None:
    """Refuse to train a model of its own on each of several ranks, of which nobody was told.

    Args:
        process_group: what the step was given; `None` stands for the default group, where there is one.

    Raises:
        AmpError: the group has more ranks than this one, or is none of this process.

    Example:
        >>> check_group(None)  # no process group: one process
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None:
            raise AmpError(
                "process_group= without torch.distributed", mend="call torch.distributed.init_process_group first"
            )
        return
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise AmpError("this process is not in process_group", mend=f"pass a group that has it, such as {_ALONE}")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise AmpError(
            f"process_group is a {type(process_group).__name__}", mend=f"pass a ProcessGroup, such as {_ALONE}"
        )
    ranks = dist.get_world_size(process_group)
    if ranks > 1:
        held = "process_group" if process_group is not None else "the default process group"
        raise AmpError(
            f"{held} has {ranks} ranks, and a step averages no gradients over them: their weights would part",
            mend="train DistributedDataParallel(amp.compile(model)) in a loop with a GradScaler, or, where each rank is"
            f" to train by itself, pass {_ALONE}",
        )
