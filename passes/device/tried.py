"""Marks of what passes have tried out on a device and left, and the notes made of them."""

from __future__ import annotations

from torch import fx

from amp_compiler.fx.meta import Key


def tell(node: fx.Node, told: str) -> bool:
    """Mark a node with what was tried out there in vain; whether it had no such mark.

    Args:
        node: where it would have been done.
        told: what was tried, and why it is not done, in words joined by hyphens, without commas.
    """
    known = node.meta.get(Key.TRIED, "")
    if told in known.split(","):
        return False
    node.meta[Key.TRIED] = f"{known},{told}" if known else told
    return True


def notes_of(graph_module: fx.GraphModule) -> list[str]:
    """What was tried out and is not done, and why, each form and reason once.

    Args:
        graph_module: as the passes left it, or as it was cut behind them.
    """
    found: dict[str, list[str]] = {}
    for part in graph_module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            for told in filter(None, node.meta.get(Key.TRIED, "").split(",")):
                found.setdefault(told, []).append(node.name)
    return [f"{told.replace('-', ' ')} (at {_few(names)})" for told, names in found.items()]


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
