"""What a step keeps from its forward for its backward: 16-bit values as they are, never copies of them in FP32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step

from amp_compiler.cli.demo import SmallCnn
from amp_compiler.fx.graph import canonical_op, node_tensor
from amp_compiler.passes.step import simplify_casts

pytestmark = pytest.mark.usefixtures("bf16_kernels")

LOW = (torch.bfloat16, torch.float16)
CASTS = ("aten._to_copy", "aten.to", "prims.convert_element_type")
VIEWS = ("view", "reshape", "_unsafe_view", "permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "clone")
VIEWS = tuple(f"aten.{name}" for name in VIEWS)


def cnn():
    def loss(model, images, labels):
        return F.cross_entropy(model(images), labels)

    return SmallCnn(True, width=4), loss, (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,)))


class Sines(nn.Module):
    """The derivative of an FP32 sine of a BF16 product reads the product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        wide = self.a(x).float()
        return self.b(torch.sin(wide.t()).t())


def sines():
    return Sines(), lambda model, x: model(x).square().mean(), (torch.randn(8, 8),)


MODELS = {"cnn with batch norm": cnn, "sines of a view": sines}


def graph_of(name):
    torch.manual_seed(0)
    model, loss, batch = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = eager_step(model, loss, optimizer)
    step(*batch)
    return step.graph_module.graph


def upcasts(graph):
    """FP32 copies of 16-bit values, and views of them."""
    found = []
    for node in graph.nodes:
        made = node_tensor(node)
        if node.op != "call_function" or made is None or made.dtype != torch.float32 or not node.all_input_nodes:
            continue
        op, source = canonical_op(node.target), node.all_input_nodes[0]
        copied = op in CASTS and node_tensor(source).dtype in LOW
        if copied or (op in VIEWS and source in found):
            found.append(node)
    return found


def readers(node, phase):
    return [user for user in node.users if user.meta.get("amp_phase") == phase]


def kept(graph):
    """FP32 copies of 16-bit values that the forward makes and the backward reads."""
    made = [node for node in upcasts(graph) if node.meta.get("amp_phase") == "forward"]
    return [node for node in made if readers(node, "backward")]


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
