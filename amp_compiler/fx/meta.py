"""What a model's own text demands of a node, kept in the node's meta until the graph is lowered."""

from __future__ import annotations

from typing import Any

from amp_compiler.ir.graph import Pin

PIN = "amp_pin"  # key in node.meta; the value is a Pin


def region_pin(device: Any, source: str) -> Pin:
    """The pin of a node that stands in an `autocast(enabled=False)` region of the model."""
    return Pin("fp32", f"the model's autocast('{device}', enabled=False) region{f' at {source}' if source else ''}")
