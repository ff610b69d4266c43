"""Neutral passes and passes on FX; `PASSES` is the one table of them all."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from amp_compiler.errors import PassError
from amp_compiler.passes.base import Pass

# Name of every pass, with the class that does it, room by room. The classes are imported when they are asked for, as
# those on FX need torch and the neutral ones must do without.
_ROOMS = {
    "capture": "name_modules inline_regions drop_type_checks write_out_types merge_results functionalize"
    " isolate_mutations",
    "plan": "classify assign_precision place_casts",
    "precision": "apply_plan mark_backward mark_math type_backward widen_math legalize hoist_weight_casts",
    "step": "separate_buffers place_weights differentiate restore_upcasts fold_loss_scale simplify_casts"
    " sum_gradients fuse_update defer_gradients cut_step",
    "device": "multiply_convolutions channels_last two_matrices native_ops",
    "onnx_export": "drop_idle_dropout write_out_attention fold_stored_casts open_ends",
}


def _class_of(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


PASSES: dict[str, str] = {
    name: f"amp_compiler.passes.{room}.{name}:{_class_of(name)}"
    for room, names in _ROOMS.items()
    for name in names.split()
}
_CLASSES = {path.partition(":")[2]: name for name, path in PASSES.items()}


def find_pass(name: str) -> type[Pass[Any]]:
    """The class of the pass called `name`.

    Args:
        name: a key of `PASSES`.

    Raises:
        PassError: no pass has this name.

    Example:
        >>> find_pass("place_casts").__name__
        'PlaceCasts'
    """
    if name not in PASSES:
        near = difflib.get_close_matches(name, PASSES, 1)
        raise PassError(
            f"'{name}' is no pass", mend=f"did you mean '{near[0]}'?" if near else f"there are {', '.join(PASSES)}"
        )
    module, _, attribute = PASSES[name].partition(":")
    found: type[Pass[Any]] = getattr(import_module(module), attribute)
    return found


def __getattr__(name: str) -> Any:
    """`amp_compiler.passes.Classify` and the like, imported when they are asked for."""
    if name in _CLASSES:
        return find_pass(_CLASSES[name])
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
