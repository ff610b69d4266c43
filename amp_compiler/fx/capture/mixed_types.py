"""Products and norms whose operands torch refuses to mix, of which a capture takes no notice."""

import torch
from torch import fx

from amp_compiler.errors import AmpError
from amp_compiler.fx.graph import LOW_TYPES, canonical_op, node_tensor, user_source

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "addmm", "addmv", "baddbmm", "addbmm")
_ONE_TYPE = frozenset(f"aten.{name}" for name in (*_PRODUCTS, "layer_norm", "group_norm", "batch_norm"))
_CAST = {*LOW_TYPES, torch.float32}


def refuse_mixed_types(graph_module: fx.GraphModule, casts: bool = True) -> None:
    """Refuse a product or norm that reads tensors of types that its kernel would refuse once the graph runs.

    Args:
        graph_module: captured, with the model's own types; graphs of its regions are looked at too.
        casts: whether FP32 and 16-bit operands will be brought to one type, as torch.autocast does it.

    Raises:
        AmpError: names the line and the types.

    Example:
        >>> program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        >>> refuse_mixed_types(program.graph_module)
    """
    graphs = [one.graph for one in graph_module.modules() if isinstance(one, fx.GraphModule)]
    for node in (node for graph in graphs for node in graph.nodes):
        if node.op != "call_function" or canonical_op(node.target) not in _ONE_TYPE:
            continue
        tensors = [tensor for one in node.all_input_nodes if (tensor := node_tensor(one)) is not None]
        types = {tensor.dtype for tensor in tensors}
        is_norm = "norm" in canonical_op(node.target)  # which takes 16-bit data with FP32 parameters
        if len(types) == 1 or (types <= _CAST and (casts or is_norm)):
            continue
        named = " and ".join(sorted(str(one).removeprefix("torch.") for one in types))
        raise AmpError(
            f"{canonical_op(node.target)} reads {named}, which torch does not mix",
            where=user_source(node.meta.get("stack_trace")),
            hint="bring them to one type in front of it, the batch's data to that of the weights: x.float()",
        )
