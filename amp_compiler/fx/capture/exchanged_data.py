"""`x.data = y` in forward: a copy into the memory of `x`, where nobody can tell that from an exchange."""

import operator

from torch import Tensor, fx

from amp_compiler.errors import CaptureError
from amp_compiler.fx.graph import user_source
from amp_compiler.fx.torch_private.runtime import shares_memory


def assign_data(tensor: Tensor, new: Tensor) -> Tensor:
    """`tensor.data = new`, which keeps its memory."""
    return tensor.detach().copy_(new.detach())


def refuse_unless_copied(node: fx.Node) -> None:
    """Refuse an exchange of memory, `set_(tensor, new)` in Dynamo's graph, of which a copy would give other numbers.

    That is one for another form; for memory of an input, or that is read behind it while something is written there;
    and one behind which the old memory is read still.

    Raises:
        CaptureError: names the line.
    """
    values = {one: value for one in node.graph.nodes if isinstance(value := one.meta.get("example_value"), Tensor)}
    exchanged = [values[one] for one in node.args if isinstance(one, fx.Node) and one in values]
    nodes = [*node.graph.nodes]
    behind, before = nodes[nodes.index(node) + 1 :], [one for one in nodes[: nodes.index(node)] if one in values]
    if len(exchanged) == len(node.args) == 2 and len({(one.shape, one.dtype, one.device) for one in exchanged}) == 1:
        tensor, new = exchanged
        later = [values[one] for one in before if values[one] is not tensor and not set(behind).isdisjoint(one.users)]
        direct = [values[one] for one in before if node.args[0] in one.all_input_nodes]
        old = [one for one in direct if not ((one.requires_grad and one._base is None) or shares_memory(one, new))]
        others = [values[one] for one in before if one.op == "placeholder" and values[one] is not tensor]
        others += later if any(map(_writes, behind)) else []
        is_old_read = any(shares_memory(one, other) for one in later for other in old)
        if not is_old_read and not any(shares_memory(new, one) for one in others):
            return
    raise CaptureError(
        "the memory of a tensor is exchanged (`.data = …` or `set_`) for one of another form or that others use",
        where=user_source(node.meta.get("stack_trace")),
        hint="copy into it: weight.data.copy_(new)",
    )


def _writes(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name == "setitem" or name.endswith("_") or (name[:1] == "i" and hasattr(operator, f"__{name}__"))
    return "out" in node.kwargs or (named and not name.endswith("__"))
