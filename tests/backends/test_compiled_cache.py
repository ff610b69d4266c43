"""A graph that was compiled before is found in torch's caches, by a later step and by a later process."""

import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.utils import fresh_cache

import amp_compiler as amp
from amp_compiler.fx.torch_private import inductor as torch_inductor

pytestmark = pytest.mark.compiles
FP32 = {"version": 1, "extends": "default", "deny": ["matmul", "convolution"]}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    pick_vec_isa()  # what the compiler can do is no part of what is compiled: it is asked once for all tests
    with fresh_cache():
        yield


def trained(rules: object = "default") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    step = amp.training_step(model, lambda m, x: m(x).square().mean(), optimizer, dtype="bf16", rules=rules)
    step(X), step(X)
    return [parameter.detach() for parameter in model.parameters()]


def compiled(rules: object = "default") -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 2))
    run = amp.compile(model, dtype="bf16", rules=rules)
    x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    run(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("make", [trained, pytest.param(compiled, marks=pytest.mark.slow)])
def test_the_second_of_two_alike_compiles_nothing(make):
    counters.clear()
    first = make()
    cold = dict(counters["inductor"])
    assert cold["fxgraph_cache_miss"] >= 1 and "fxgraph_cache_bypass" not in cold
    counters.clear()
    second = make()
    warm = dict(counters["inductor"])
    assert warm["fxgraph_cache_hit"] == cold["fxgraph_cache_miss"]
    assert not {"fxgraph_cache_miss", "fxgraph_cache_bypass"} & set(warm)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


def test_what_gives_the_table_of_operators_can_be_part_of_a_cached_name(monkeypatch):
    """Torch 2.12 hands on a closure, which no cache can name: all compiled code would be compiled anew."""
    from torch._inductor import compile_fx

    def outer(graph_module, inputs, inner_compile, **others):
        return inner_compile(graph_module, inputs, get_decomp_fn=lambda: None)

    def inner(graph_module, inputs, get_decomp_fn):
        return get_decomp_fn

    monkeypatch.setattr(compile_fx, "compile_fx", outer)
    monkeypatch.setattr(compile_fx, "compile_fx_inner", inner)
    gelu = torch.ops.aten.gelu.default
    gives = torch_inductor.compile_with_inductor(
        torch.fx.symbolic_trace(nn.Identity()), [X], {}, lambda table: {gelu: torch.relu}, "ours", lambda cause: cause
    )
    assert gives()[gelu] is torch.relu and len(gives()) > 100
    assert pickle.loads(pickle.dumps(gives))() == "all of Inductor's, changed by ours"
