"""The process group that a training step belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from amp_compiler.errors import AmpError, RankError
from amp_compiler.ranks.ranks import Ranks

_ALONE = "process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True)"
_TOGETHER = "process_group=dist.group.WORLD"


def ranks_of(process_group: Any, mesh: Any = None) -> Ranks | None:
    """The ranks that train one model together; `None` for a process that trains by itself.

    Args:
        process_group: what the step was given; `None` stands for the default group, where there is one.
        mesh: a `DeviceMesh` of one dimension, in the place of a group.

    Raises:
        AmpError: the default group has more ranks than this one, of which nobody was told; what was given is no group,
            or none of this process.

    Example:
        >>> ranks_of(None) is None  # no process group: one process
        True
    """
    if not dist.is_available() or not dist.is_initialized():
        if process_group is not None or mesh is not None:
            argument = "process_group=" if mesh is None else "mesh="
            raise AmpError(
                f"{argument} without torch.distributed", hint="call torch.distributed.init_process_group first"
            )
        return None
    if mesh is not None:
        process_group = _group_of(mesh, process_group)
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise AmpError("this process is not in process_group", hint=f"pass a group that has it, such as {_ALONE}")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise AmpError(
            f"process_group is a {type(process_group).__name__}", hint=f"pass a ProcessGroup, such as {_TOGETHER}"
        )
    ranks = dist.get_world_size(process_group)
    if process_group is None and ranks > 1:
        raise AmpError(
            f"the default process group has {ranks} ranks, and this step was not told whether they train one model",
            hint=f"pass {_TOGETHER} to average the gradients over them, or, where each rank is to train a model of its"
            f" own, {_ALONE}",
        )
    return Ranks(process_group) if process_group is not None and ranks > 1 else None


def _group_of(mesh: Any, process_group: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh  # here: a torch without distributed has none

    if process_group is not None:
        raise AmpError("process_group= and mesh= are two names of one thing", hint="pass one of them")
    if not isinstance(mesh, DeviceMesh):
        raise AmpError(f"mesh is a {type(mesh).__name__}", hint="pass a DeviceMesh of one dimension")
    if mesh.ndim != 1:
        named = " or ".join(f'mesh["{name}"]' for name in mesh.mesh_dim_names or ())
        unnamed = 'name them, init_device_mesh(…, mesh_dim_names=("dp", …)), and pass mesh["dp"]'
        raise AmpError(
            f"the mesh has {mesh.ndim} dimensions, and gradients are averaged over one",
            hint=f"pass that of data parallelism: {named}" if named else unnamed,
        )
    return mesh.get_group()


def group_of_norm(ranks: Ranks, norm: Any) -> tuple[str, int]:
    """The name and the size of the group over whose rows a `SyncBatchNorm` takes its statistics.

    Args:
        ranks: the ranks of the step.
        norm: the module; its `process_group` is `None` for all ranks that there are.

    Raises:
        AmpError: the group has ranks that do not train with this step, or not this one.
    """
    members = ranks_of_norm(ranks, norm)
    return (ranks.name, ranks.size) if len(members) == ranks.size else (norm.process_group.group_name, len(members))


def ranks_of_norm(ranks: Ranks, norm: Any) -> list[int]:
    """The same group as places in the step's group, in order; raises as `group_of_norm` does."""
    group = norm.process_group or dist.group.WORLD
    own = dist.get_process_group_ranks(ranks.group)
    theirs = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    if not set(theirs) <= set(own) or own[ranks.rank] not in theirs:
        raise AmpError(
            f"a SyncBatchNorm takes its statistics over the ranks {theirs}; rank {own[ranks.rank]} trains with {own}",
            hint="give it a group of ranks of the step with this one among them: "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, process_group)",
        )
    return sorted(map(own.index, theirs))


def check_groups(groups: Sequence[Sequence[list[int]]]) -> None:
    """Refuse groups of norms whose ranks do not name one another.

    Args:
        groups: for each rank, the group of each norm as `ranks_of_norm` gives it.

    Raises:
        RankError: names the ranks.

    Example:
        >>> check_groups([[[0, 1]], [[0, 1]], [[2]]])
    """
    for rank, norms in enumerate(groups):
        for place, group in enumerate(norms):
            other = next((one for one in group if groups[one][place] != group), None)
            if other is not None:
                raise RankError(
                    f"rank {rank} has a SyncBatchNorm over the ranks {group}, and rank {other} has it over"
                    f" {groups[other][place]}",
                    hint="give it on all ranks of a group that group",
                )
