"""A loss scale as a user or a rule file asks for it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, Literal, cast

from amp_compiler.errors import AmpError
from amp_compiler.ops.loss_scale.adaptive import NormAdaptiveLossScale, NvcaffeLossScale
from amp_compiler.ops.loss_scale.base import LossScale
from amp_compiler.ops.loss_scale.constant import NoLossScale, StaticLossScale
from amp_compiler.ops.loss_scale.dynamic import DynamicLossScale

LossScaleMode = Literal["none", "static", "dynamic", "norm_adaptive", "nvcaffe"]
LossScaleArgument = Literal[LossScaleMode, "rules"] | float | LossScale | Mapping[str, Any] | None
_KINDS: dict[str, type[LossScale]] = {
    kind.mode: kind
    for kind in (NoLossScale, StaticLossScale, DynamicLossScale, NormAdaptiveLossScale, NvcaffeLossScale)
}
_RULE_KEY = {"scale": "init", "init_scale": "init"}  # what a rule file calls these fields


def make_loss_scale(value: object, section: Mapping[str, Any] | None = None) -> LossScale:
    """The loss scale that a user's argument or a rule file asks for.

    Args:
        value: a mode (`"dynamic"`, `"norm_adaptive"`, `"nvcaffe"`, `"none"`, `"static"`), a number for a static scale,
            `None` for no scaling, a `LossScale`, or a mapping such as the `loss_scale` section of a rule file.
        section: the `loss_scale` section of a rule file; gives the settings where `value` is the section's mode.

    Raises:
        AmpError: for anything else, an unknown key or a number out of range.

    Example:
        >>> make_loss_scale("dynamic", {"mode": "dynamic", "max": 2.0**24}).ceiling
        16777216.0
        >>> make_loss_scale(1024)
        StaticLossScale(patience=20, scale=1024.0)
    """
    if isinstance(value, LossScale):
        return value
    if value is None:
        return NoLossScale()
    if isinstance(value, Real) and not isinstance(value, bool):
        return StaticLossScale(cast(float, value))
    if isinstance(value, str):
        settings = section if section and section.get("mode", "dynamic") == value else {}
        return _from_section({**settings, "mode": value})
    if isinstance(value, Mapping):
        return _from_section(value)
    hint = "pass 'dynamic', a number, None, a LossScale, or the loss_scale section of a rule file"
    raise AmpError(f"loss_scale={value!r} is not known", hint=hint)


def _from_section(section: Mapping[str, Any]) -> LossScale:
    """The loss scale of a rule file's section, a null counting as not given."""
    settings = {key: setting for key, setting in section.items() if setting is not None}
    mode = settings.pop("mode", "dynamic")
    kind = _KINDS.get(mode) if isinstance(mode, str) else None
    if kind is None:
        raise AmpError(f"loss_scale mode {mode!r} is not known", hint=f"use one of {', '.join(map(repr, _KINDS))}")
    known = {_RULE_KEY.get(each.name, each.name): each.name for each in fields(kind)}
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(map(repr, known))}"
            raise AmpError(f"a loss scale of mode {mode!r} has no {key!r}", hint=hint)
    if mode == "static" and "init" not in settings:
        raise AmpError("a static loss scale has no scale", hint="give 'init', or pass the number itself")
    return kind(**{known[key]: setting for key, setting in settings.items()})
