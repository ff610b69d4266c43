"""Arguments of a training step and of its calls, which are refused where they are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
import torch.utils._pytree as pytree

from amp_compiler.errors import AmpError
from amp_compiler.fx.torch_private.dynamo import tracer_around
from amp_compiler.fx.torch_private.tracing import traced_elsewhere

Uneven = Literal["refuse", "weight"]


def check_options(clip_norm: float | None, accumulate: Any, uneven: Any) -> None:
    """The largest norm is positive or `None`, the number of calls from 1 on, the way with batches one of the words."""
    if clip_norm is not None and (not isinstance(clip_norm, Real) or clip_norm is True or not clip_norm > 0):
        raise AmpError(f"clip_norm={clip_norm!r}", hint="pass a positive number, or None for no clipping")
    if type(accumulate) is not int or accumulate < 1:
        raise AmpError(f"accumulate={accumulate!r}", hint="pass a whole number from 1 on")
    if uneven not in get_args(Uneven):
        raise AmpError(f"uneven={uneven!r}", hint=f"pass one of {', '.join(map(repr, get_args(Uneven)))}")


def check_loss_function(loss_fn: Any) -> None:
    """It can be called."""
    if not callable(loss_fn):
        raise AmpError(
            f"loss_fn is a {type(loss_fn).__name__}",
            hint="pass a function that is called as loss_fn(model, *batch) and returns the loss, or (loss, aux)",
        )


def check_call(batch: Sequence[Any], named: Mapping[str, Any]) -> None:
    """A batch comes by position, where gradients can be, and where nothing traces or transforms the call.

    Args:
        batch: what was given by position.
        named: what was given by name.
    """
    if named:
        raise AmpError(
            f"a training step takes its batch by position, and was given {', '.join(map(repr, named))} by name",
            hint="give them as one dict, step({'x': x, 'y': y}), which loss_fn takes as its second argument",
        )
    if torch.is_inference_mode_enabled():
        raise AmpError(
            "a training step is called within torch.inference_mode(), in which nothing is differentiated",
            hint="call it outside, or within torch.inference_mode(False); torch.no_grad() around it does no harm",
        )
    if traced := tracer_around(levels=False) or traced_elsewhere(lambda: pytree.tree_leaves(list(batch))):
        raise AmpError(
            f"a training step updates weights that no trace holds, and {traced}",
            hint="call the step by itself, it compiles itself; trace, export or transform the model that it trains",
        )
