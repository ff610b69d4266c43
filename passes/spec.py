"""The legal graph behind each pipeline, as a table: which ops, phases and marks may stand in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from amp_compiler.fx.graph import canonical_op
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import lacks_example

_CAPTURED = frozenset({Key.PIN, Key.VOLATILE, Key.GROUP})
_CAST = _CAPTURED | {Key.PLACED, Key.MATH}
_PLANNED = _CAST | {Key.BACKWARD, Key.BACKWARD_RULE, Key.BACKWARD_MATH}
_STEP = _PLANNED | {Key.PHASE, Key.PLANNED, Key.SEED, Key.LOW, Key.MASTER, Key.WIDE, Key.STATE, Key.CHECKPOINT}
_REGIONS = ("higher_order.wrap_with_autocast", "higher_order.wrap_with_set_grad_enabled")


@dataclass(frozen=True)
class Spec:
    """What a graph must be.

    Args:
        marks: the keys of `fx.meta.Key` that may stand in `node.meta`.
        forbidden: canonical names of ops that must not stand in it.
        phases: the phases that nodes must have; empty where they need none.
        modules: whether it may call graphs of its own.
    """

    marks: frozenset[Key]
    forbidden: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    modules: bool = False


SPECS: dict[str, Spec] = {
    "CAPTURE": Spec(_PLANNED, (*_REGIONS, "aten._assert_tensor_metadata", "aten.alias")),
    "FORWARD": Spec(_PLANNED | {Key.STATE}, (*_REGIONS, "aten._assert_tensor_metadata")),
    "INFERENCE": Spec(_CAST | {Key.LOW, Key.STATE}, (*_REGIONS, "aten._assert_tensor_metadata")),
    "STEP": Spec(
        _STEP,
        (
            *_REGIONS,
            "aten._assert_tensor_metadata",
            "amp_compiler.ops.typed_op.typed_op",
            "amp_compiler.ops.fp8.fp8_product",
        ),
        ("forward", "backward", "update"),
    ),
    "UPDATE": Spec(_STEP, phases=("update",)),
    "ONNX_CAPTURE": Spec(_CAPTURED, (*_REGIONS, "aten._assert_tensor_metadata", "aten.alias")),
    "DEVICE": Spec(_STEP, modules=True),
    "SUBGRAPH": Spec(_STEP),
}


def complaint(graph_module: Any, spec: Spec, whole: bool = True) -> str | None:
    """What makes a graph illegal, as a sentence; `None` where it is legal.

    Args:
        graph_module: a `torch.fx.GraphModule`.
        spec: what it must be.
        whole: all of it. Else what holds in the midst of a pipeline too: example values, and marks of known types.
    """
    for node in graph_module.graph.nodes:
        wrong = _wrong_node(node, spec, whole) or _wrong_marks(node, spec, whole)
        if wrong is not None:
            return f"node '{node.name}' {wrong}"
    outputs = [node for node in graph_module.graph.nodes if node.op == "output"]
    return None if len(outputs) == 1 else f"the graph has {len(outputs)} outputs"


def _wrong_node(node: fx.Node, spec: Spec, whole: bool) -> str | None:
    if node.op == "output":
        return None
    if node.op == "call_module" and not spec.modules:
        return "calls a module"
    if lacks_example(node):
        return "carries no example value in meta['val']"
    if node.op != "call_function" or not whole:
        return None
    op = canonical_op(node.target)
    if op in spec.forbidden:
        return f"is {op}, which must not stand here"
    if spec.phases and node.meta.get(Key.PHASE) not in spec.phases:
        return f"has the phase {node.meta.get(Key.PHASE)!r}, not one of {', '.join(spec.phases)}"
    return None


def _wrong_marks(node: fx.Node, spec: Spec, whole: bool) -> str | None:
    known = {key.value: key for key in Key}
    for name, value in node.meta.items():
        if not str(name).startswith("amp_"):
            continue
        key = known.get(str(name.value) if isinstance(name, Key) else str(name))
        if key is None:
            return f"carries '{name}', which is no key of fx.meta.Key"
        if whole and key not in spec.marks:
            return f"carries the mark '{key.value}', which does not belong here"
        if not isinstance(value, key.kind):
            return f"carries '{key.value}' of type {type(value).__name__}, not {key.kind.__name__}"
    return None
