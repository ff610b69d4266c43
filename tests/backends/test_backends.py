"""The registry of backends: a new one is a value in the table, and nothing else knows a backend by its name."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import mean_square, sgd_step

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, find_backend
from amp_compiler.backends.backend import Backend
from amp_compiler.errors import AmpError

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "amp_compiler").rglob("*.py"), *(ROOT / "passes").rglob("*.py")])
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def linear():
    torch.manual_seed(0)
    return nn.Linear(8, 4)


@pytest.fixture
def mine(monkeypatch):
    """A backend of a user's own, in the table for one test; the graphs that it was given."""
    graphs = []

    def build(graph_module, inputs, round_exactly):
        graphs.append(graph_module)
        assert len(inputs) == len(graph_module.graph.find_nodes(op="placeholder"))
        return graph_module.forward

    monkeypatch.setitem(BACKENDS, "mine", Backend("mine", build, compiled=True))
    return graphs


def test_one_entry_is_all_that_a_new_backend_needs(mine):
    with torch.no_grad():
        result, expected = (amp.compile(linear(), dtype="bf16", backend=name)(X) for name in ("mine", "eager"))
    assert len(mine) == 1 and torch.equal(result, expected)
    weights = []
    for name in ("mine", "eager"):
        model = linear()
        sgd_step(model, mean_square, 0.5, backend=name)(X)
        weights.append(model.weight.detach())
    assert len(mine) > 1
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2**-8 * float(weights[1].abs().max()))


def test_a_backend_that_does_not_compile_gets_a_step_whole(mine, monkeypatch):
    reason = "backend='mine' counts the nodes"
    monkeypatch.setitem(BACKENDS, "mine", replace(BACKENDS["mine"], compiled=False, no_cuda_graph=reason))
    model = linear()
    step = amp.training_step(model, mean_square, torch.optim.SGD(model.parameters(), 0.5), dtype="bf16", backend="mine")
    step(X)
    assert len(mine) == 1
    assert any("sgd_update" in str(node.target) for node in mine[0].graph.nodes)
    assert reason in str(step.execution)


@pytest.mark.parametrize(("name", "hint"), [("inducter", "did you mean 'inductor'?"), ("tvm", "use one of 'inductor'")])
def test_an_unknown_name_is_an_error_with_the_nearest(name, hint):
    with pytest.raises(AmpError, match=f"backend='{name}' is not known") as caught:
        find_backend(name)
    assert hint in caught.value.hint
    with pytest.raises(AmpError, match="is not known"):
        amp.compile(linear(), backend=name)


@pytest.mark.parametrize("option", ["backend", "mode", "dtype"])
def test_what_is_no_name_is_refused_as_one(option):
    with pytest.raises(AmpError, match=rf"{option}=\['eager'\] is "):
        amp.compile(linear(), **{option: ["eager"]})


def test_names_are_keys():
    assert all(name == backend.name for name, backend in BACKENDS.items())


def test_no_backend_is_known_by_its_name():
    """Neither compared nor looked up: what tells backends apart are the fields of `Backend`."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            parts += (
                [node.slice] if isinstance(node, ast.Subscript) and "counters" not in ast.unparse(node.value) else []
            )
            values = [part.value for part in parts if isinstance(part, ast.Constant)]
            known = {"inductor", "eager"} & {value for value in values if isinstance(value, str)}
            assert not known, f"{path.relative_to(ROOT)}:{node.lineno}"
