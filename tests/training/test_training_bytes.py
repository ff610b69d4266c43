"""How many bytes an update moves, counted on the step graph: one check, one update, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from toys import eager_step

from amp_compiler.ops.update.operators import CHECK, OPERATORS

pytestmark = pytest.mark.usefixtures("bf16_kernels")

CASES = {
    "adamw": (lambda p: torch.optim.AdamW(p, 1e-3), OPERATORS["adam"], 30),
    "sgd": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), OPERATORS["sgd"], 22),
}
WEIGHTS = 3


def emitted(name, dtype, backend="eager"):
    """The graph of a step over matrices alone, its check and its update."""
    torch.manual_seed(0)
    widths = (16, 24, 32, 8)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))
    make, update, _ = CASES[name]
    optimizer = make(model.parameters())
    step = eager_step(model, lambda m, x: m(x).square().mean(), optimizer, dtype=dtype, clip_norm=1.0, backend=backend)
    step(torch.randn(4, 16))
    graph = step.graph_module.graph
    (check,) = graph.find_nodes(op="call_function", target=CHECK)
    (update,) = graph.find_nodes(op="call_function", target=update)
    return graph, check, update


def traffic(node):
    """Bytes of its matrices, each read once, and written where the schema says so; 16-bit copies are only written."""
    total = 0
    for argument, value in zip(node.target._schema.arguments, node.args, strict=True):
        written = argument.alias_info is not None and argument.alias_info.is_write
        passes = 2 if written and argument.name != "low_weights" else 1
        for each in value if isinstance(value, (list, tuple)) else [value]:
            tensor = each.meta["val"] if isinstance(each, torch.fx.Node) else torch.empty(0)
            assert tensor.dim() == 2 or tensor.numel() <= 6, each  # a matrix, or some numbers
            total += passes * tensor.nbytes * (tensor.dim() == 2)
    return total


def is_view(node):
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def readers(node):
    """What reads a value, itself or by way of a view."""
    for user in node.users:
        yield from readers(user) if is_view(user) else [user]


@pytest.mark.parametrize(
    ("name", "dtype", "backend"), [("adamw", "fp16", "eager"), ("sgd", "bf16", "eager"), ("adamw", "bf16", "compiled")]
)
def test_a_clipped_update_moves_30_bytes_per_parameter_with_adamw_and_22_with_momentum(name, dtype, backend, request):
    if backend == "compiled":  # the same graph, whatever compiles it
        request.getfixturevalue("node_by_node")
    _, check, update = emitted(name, dtype, "eager" if backend == "eager" else "inductor")
    masters = [node.meta["val"] for node in update.args[0]]
    assert len(masters) == WEIGHTS and list(check.args[0]) == list(update.args[1])
    parameters = sum(master.numel() for master in masters)
    assert (traffic(check) + traffic(update)) / parameters <= CASES[name][2]


@pytest.mark.parametrize("name", list(CASES))
def test_nothing_else_reads_a_gradient_or_a_master(name):
    graph, check, update = emitted(name, "bf16")
    for gradient in check.args[0]:
        made = gradient
        while is_view(made):
            made = made.args[0]
        assert set(readers(made)) == {check, update, graph.output_node()}
        # It is given as the product of two matrices made it, with no cast, copy or multiplication behind that.
        assert made.target is torch.ops.aten.mm.default and made.meta["val"].dtype is torch.bfloat16
    assert all(set(master.users) == {update} for master in update.args[0])
