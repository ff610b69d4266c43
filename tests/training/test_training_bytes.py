"""What a step moves and keeps, counted on its graph: bytes of the update, and 16-bit values for the backward."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from toys import classes, eager_step, mean_square

from amp_compiler.cli.demo import SmallCnn
from amp_compiler.fx.graph import canonical_op, node_tensor
from amp_compiler.ops.update.operators import CHECK, OPERATORS
from amp_compiler.passes.step import simplify_casts

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
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
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


def all_readers(node):
    """What reads a value, itself or by way of a view."""
    for user in node.users:
        yield from all_readers(user) if is_view(user) else [user]


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
        result = gradient
        while is_view(result):
            result = result.args[0]
        assert set(all_readers(result)) == {check, update, graph.output_node()}
        # It is given as the product of two matrices made it, with no cast, copy or multiplication behind that.
        assert result.target is torch.ops.aten.mm.default and result.meta["val"].dtype is torch.bfloat16
    assert all(set(master.users) == {update} for master in update.args[0])


# ---- what is kept from the forward for the backward: 16-bit values as they are, never copies of them in FP32

LOW = (torch.bfloat16, torch.float16)
CASTS = ("aten._to_copy", "aten.to", "prims.convert_element_type")
VIEWS = ("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "clone")
VIEWS = tuple(f"aten.{name}" for name in VIEWS)


def cnn():
    return SmallCnn(True, width=4), classes, (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,)))


class Sines(nn.Module):
    """The derivative of an FP32 sine of a BF16 product reads the product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        wide = self.a(x).float()
        return self.b(torch.sin(wide.t()).t())


def sines():
    return Sines(), mean_square, (torch.randn(8, 8),)


MODELS = {"cnn with batch norm": cnn, "sines of a view": sines}


def graph_of(name):
    torch.manual_seed(0)
    model, loss, batch = MODELS[name]()
    step = eager_step(model, loss)
    step(*batch)
    return step.graph_module.graph


def upcasts(graph):
    """FP32 copies of 16-bit values, and views of them."""
    result = []
    for node in graph.nodes:
        built = node_tensor(node)
        if node.op != "call_function" or built is None or built.dtype != torch.float32 or not node.all_input_nodes:
            continue
        op, source = canonical_op(node.target), node.all_input_nodes[0]
        copied = op in CASTS and node_tensor(source).dtype in LOW
        if copied or (op in VIEWS and source in result):
            result.append(node)
    return result


def readers(node, phase):
    return [user for user in node.users if user.meta.get("amp_phase") == phase]


def kept(graph):
    """FP32 copies of 16-bit values that the forward makes and the backward reads."""
    result = [node for node in upcasts(graph) if node.meta.get("amp_phase") == "forward"]
    return [node for node in result if readers(node, "backward")]


@pytest.mark.parametrize("name", MODELS)
def test_the_backward_reads_no_fp32_copy_of_a_16_bit_value_that_the_forward_made(name):
    graph = graph_of(name)
    assert kept(graph) == []
    forward = [
        node for node in graph.nodes if node.meta.get("amp_phase") == "forward" and node_tensor(node) is not None
    ]
    assert set(upcasts(graph)).intersection(forward)
    assert any(node_tensor(node).dtype in LOW and readers(node, "backward") for node in forward)


def test_without_the_repeated_casts_there_would_be_such_a_copy(monkeypatch):
    monkeypatch.setattr(simplify_casts, "_repeat_in_backward", lambda graph, written: False)
    assert len(kept(graph_of("sines of a view"))) == 1
