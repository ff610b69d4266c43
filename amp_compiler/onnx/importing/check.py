"""Refuses what `onnx_to_fx` cannot convert, all at once and before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx
import onnx_ir as ir

from amp_compiler.errors import OnnxCaptureError
from amp_compiler.onnx.importing.ops.registry import find_op
from amp_compiler.onnx.model.types import canonical_domain

BUILT_IN = ("If", "Loop", "Scan", "Constant")
"""Operators that are no function: see `bodies` and `load.constant_of`."""
HINT = (
    "write a function with @op in a module of amp_compiler/onnx/importing/ops (registry.py shows how), or replace the "
    "node by operators that have one"
)
_SHOWN = 20


def check_operators(model: ir.Model) -> None:
    """Raise for operators without a conversion.

    Raises:
        OnnxCaptureError: names every such operator with its first nodes.
    """
    functions = {(key[0], key[1]) for key in model.functions}
    missing: dict[str, list[str]] = {}
    graphs = [(model.graph, opset_versions(model.graph.opset_imports))]
    graphs += [(function.graph, opset_versions(function.opset_imports)) for function in model.functions.values()]
    for graph, versions in graphs:
        for node in ir.traversal.RecursiveGraphIterator(graph):
            domain = canonical_domain(node.domain)
            known = (domain, node.op_type) in functions or (not domain and node.op_type in BUILT_IN)
            if known or find_op(domain, node.op_type) or schema_has_body(domain, node.op_type, versions):
                continue
            label = f"{domain}.{node.op_type}" if domain else node.op_type
            missing.setdefault(label, []).append(node_label(node))
    if missing:
        listed = "; ".join(f"{name} (node {', '.join(nodes[:3])})" for name, nodes in sorted(missing.items())[:_SHOWN])
        raise OnnxCaptureError(f"there is no conversion for {len(missing)} operator(s): {listed}", hint=HINT)


def node_label(node: ir.Node) -> str:
    """A node's name, or that of its first output where it has none."""
    return f"'{node.name or next((one.name for one in node.outputs if one.name), '?')}'"


def opset_versions(imports: Mapping[str, int]) -> dict[str, int]:
    """The version of each domain that is imported; the default domain is `""`."""
    return {canonical_domain(domain): version for domain, version in imports.items()}


def schema_of(domain: str, name: str, version: int) -> Any:
    """ONNX's own description of an operator, or `None`."""
    try:
        return onnx.defs.get_schema(name, version, domain)
    except onnx.defs.SchemaError:
        return None


def schema_has_body(domain: str, name: str, opsets: Mapping[str, int]) -> bool:
    """Whether ONNX defines the operator by others."""
    schema = schema_of(domain, name, opsets.get(domain, 1))
    return schema is not None and (schema.has_function or schema.has_context_dependent_function)


def default_attributes(domain: str, name: str, opsets: Mapping[str, int]) -> dict[str, ir.Attr]:
    """What the attributes of an operator are that a node leaves out."""
    schema = schema_of(domain, name, opsets.get(domain, 1))
    held = {} if schema is None else schema.attributes
    return {key: ir.from_proto(one.default_value) for key, one in held.items() if one.default_value.name}
