"""What people read for the names of a plan: `fc.weight` for `p_fc_weight`, `bf16` for `low`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from amp_compiler.ir.plan import PrecisionPlan

_QUOTED = re.compile(r"'([\w./]+)'")


def type_of(precision: str, low: str) -> str:
    """A precision as the type that it is: `bf16` for `low`."""
    return low if precision == "low" else precision


def for_people(subject: Any, plan: PrecisionPlan) -> Any:
    """A graph with the names that the model has for its parameters and buffers.

    A name that a node or an input of the graph has already is not given once more.

    Args:
        subject: the plan, or the `StepGraph` of the step that its forward is part of.
        plan: knows the names.
    """
    own = {name for node in subject.nodes for name in (node.name, *dict(node.outputs))} | dict(subject.inputs).keys()
    names = {value: name for value, name in plan.model.names.items() if name not in own}
    for value, _ in getattr(subject, "stored", ()):
        weight, _, number = value.rpartition("_low")
        if weight in names and number.isdigit():
            names[value] = f"{names[weight]} in {plan.dtype}"
    return _renamed(subject, names) if names else subject


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):  # a name, or a reason that quotes some
        return names.get(value) or _QUOTED.sub(lambda match: repr(names.get(match[1], match[1])), value)
    if isinstance(value, tuple):
        return tuple(_renamed(one, names) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _renamed(getattr(value, one.name), names) for one in fields(value)})
    return value
