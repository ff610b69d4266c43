"""Refuses what `onnx_to_fx` cannot convert, all at once and before any work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import onnx_ir as ir

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops import find_op

CONTROL = ("If", "Loop", "Scan", "Constant")
MEND = (
    "write a function with @op in a module of amp_compiler/frontends/onnx_ops (registry.py shows how), or replace the "
    "node by operators that have one"
)
_SHOWN = 20


def check_operators(model: ir.Model) -> None:
    """Raise for operators without a conversion.

    Raises:
        CaptureError: names every such operator with its first nodes.
    """
    functions = {(key[0], key[1]) for key in model.functions}
    opsets = dict(model.graph.opset_imports)
    missing: dict[str, list[str]] = {}
    graphs = [
        (model.graph, opsets),
        *((function.graph, function.opset_imports) for function in model.functions.values()),
    ]
    for graph, versions in graphs:
        for node in every_node(graph):
            domain = "" if node.domain == "ai.onnx" else node.domain
            known = (domain, node.op_type) in functions or (not domain and node.op_type in CONTROL)
            if known or find_op(domain, node.op_type) or schema_has_body(domain, node.op_type, versions):
                continue
            label = f"{domain}.{node.op_type}" if domain else node.op_type
            missing.setdefault(label, []).append(node_label(node))
    if missing:
        listed = "; ".join(f"{name} (node {', '.join(nodes[:3])})" for name, nodes in sorted(missing.items())[:_SHOWN])
        raise CaptureError(f"there is no conversion for {len(missing)} operator(s): {listed}", mend=MEND)


def every_node(graph: Any) -> Iterator[ir.Node]:
    """The nodes of a graph and of the bodies in it."""
    yield from ir.traversal.RecursiveGraphIterator(graph)


def node_label(node: ir.Node) -> str:
    """A node's name, or that of its first output where it has none."""
    return f"'{node.name or next((one.name for one in node.outputs if one.name), '?')}'"


def schema_of(domain: str, name: str, version: int) -> Any:
    """ONNX's own description of an operator, or `None`."""
    try:
        return onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None


def schema_has_body(domain: str, name: str, opsets: Any) -> bool:
    """Whether ONNX defines the operator by others."""
    schema = schema_of(domain, name, opsets.get(domain, 1))
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)
