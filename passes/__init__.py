"""Neutral passes and passes on FX; `PASSES` is the one table of them all."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import Any

from amp_compiler.errors import PassError
from amp_compiler.passes.base import Pass

# Name of every pass, with the class that does it. The classes are imported when they are asked for, because those on FX
# need torch and the neutral ones must do without.
NEUTRAL = ("classify", "assign_precision", "place_casts")
PASSES: dict[str, str] = {
    "classify": "amp_compiler.passes.plan.classify:Classify",
    "assign_precision": "amp_compiler.passes.plan.assign_precision:AssignPrecision",
    "place_casts": "amp_compiler.passes.plan.place_casts:PlaceCasts",
    "type_backward": "amp_compiler.passes.precision.type_backward:TypeBackward",
    "legalize": "amp_compiler.passes.precision.legalize:Legalize",
    "multiply_convolutions": "amp_compiler.passes.device.multiply_convolutions:MultiplyConvolutions",
    "channels_last": "amp_compiler.passes.device.channels_last:ChannelsLast",
    "two_matrices": "amp_compiler.passes.device.two_matrices:TwoMatrices",
    "native_ops": "amp_compiler.passes.device.native_ops:NativeOps",
    "differentiate": "amp_compiler.passes.step.differentiate:Differentiate",
    "fold_loss_scale": "amp_compiler.passes.step.fold_loss_scale:FoldLossScale",
    "simplify_casts": "amp_compiler.passes.step.simplify_casts:SimplifyCasts",
    "fuse_update": "amp_compiler.passes.step.fuse_update:FuseUpdate",
}


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
