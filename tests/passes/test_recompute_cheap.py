"""What a backward computes again rather than keep: fewer bytes, the same bits."""

import operator

import pytest
import torch
from fx_reader import parse_fx
from torch import nn
from toys import TOYS, Toy, squares

import amp_compiler as amp
from amp_compiler.errors import PassError
from amp_compiler.fx.alias import alias_sources
from amp_compiler.fx.graph import copy_graph
from amp_compiler.fx.meta import Key
from amp_compiler.passes.device.recompute_cheap import RecomputeCheap, products_in_bytes

EVERYTHING = RecomputeCheap(devices=("cpu",), least=0, most=100.0)
HEAD = """in x: bf16[16, 8]
in w: bf16[8, 8]
in v: bf16[8, 8]
in grad: bf16[16, 8]
"""
VALUE = 16 * 8 * 2  # bytes of a 16-bit value


def kept(graph_module):
    """The values of the forward that later nodes read, views aside."""
    forward = {node for node in graph_module.graph.nodes if node.meta.get(Key.PHASE) == "forward"}
    result = {}
    for node in graph_module.graph.nodes:
        if node not in forward and node.op != "output":
            todo = [one for one in node.all_input_nodes if one in forward]
            while todo:
                one = todo.pop()
                sources = [] if one.target is operator.getitem else alias_sources(one)
                todo += [source for source in sources if source in forward]
                if not sources:
                    result[one.name] = one.meta["val"].nbytes
    return result


def after(text, run=EVERYTHING):
    graph_module = parse_fx(HEAD + text)
    run(graph_module)
    return graph_module


def test_time_goes_to_what_is_kept_longest():
    layer = """m{0}: bf16[16, 8] = aten.mm.default({1}, w)  # phase=forward
silu{0}: bf16[16, 8] = aten.silu.default(m{0})  # phase=forward
"""
    back = """t{0}: bf16[8, 16]{{1, 8}} = aten.t.default(silu{0})  # phase=backward
w{0}: bf16[8, 8] = aten.mm.default(t{0}, grad)  # phase=backward
g{0}: bf16[16, 8] = aten.silu_backward.default(grad, m{0})  # phase=backward
"""
    forward = layer.format(0, "x") + layer.format(1, "silu0") + "out: bf16[16, 8] = aten.mm.default(silu1, v)"
    text = forward + "  # phase=forward\n" + back.format(1) + back.format(0) + "return out, w0, g0, w1, g1\n"
    share = 1.5 * VALUE / products_in_bytes(parse_fx(HEAD + text).graph)  # enough to write one of them again
    assert set(kept(after(text))) == {"m0", "m1"}
    assert set(kept(after(text, RecomputeCheap(devices=("cpu",), least=0, most=share)))) == {"m0", "m1", "silu1"}


def test_products_count_as_long_as_they_take():
    text = "mm: bf16[16, 8] = aten.mm.default(x, w)  # phase=forward\nreturn mm\n"
    moved = 2 * (16 * 8 + 8 * 8 + 16 * 8)
    assert products_in_bytes(parse_fx(HEAD + text).graph) == moved, "of a small one the bytes"
    big = """in a: bf16[4096, 4096]
mm: bf16[4096, 4096] = aten.mm.default(a, a)  # phase=forward
return mm
"""
    assert products_in_bytes(parse_fx(big).graph) == pytest.approx(2 * 4096**3 * 4.8e12 / 989e12, rel=1e-3)


class Gated(nn.Module):
    """Two residual blocks with a norm written out, a gated activation and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(3))

    def forward(self, x):
        for gate, up, down in zip(self.gate, self.up, self.down, strict=True):
            normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
            inner = nn.functional.silu(gate(normal)) * up(normal)
            x = x + down(nn.functional.dropout(inner, 0.25))
        return x


TOY = {
    "mlp": TOYS["mlp"],
    "gan": TOYS["gan"],
    "gated": Toy(Gated, lambda: (torch.randn(4, 8), torch.randn(4, 8)), squares),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", TOY)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_gives_the_same_bits(name, dtype):
    toy = TOY[name]
    step = toy.step(amp, backend="eager", dtype=dtype)
    torch.manual_seed(1)
    step(*toy.batch())
    before = step.graph_module
    changed = copy_graph(before)
    assert EVERYTHING(changed).modified
    assert sum(kept(changed).values()) < sum(kept(before).values())
    generator = torch.Generator().manual_seed(2)
    inputs = [_filled(node.meta["val"], generator) for node in before.graph.find_nodes(op="placeholder")]
    runs = []
    for graph_module in (before, changed):
        args = [value.clone() for value in inputs]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)  # of the dropout
            runs.append([*graph_module(*args), *args])  # what it writes in place too
    for one, other in zip(*runs, strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def _filled(value, generator):
    if value.dtype.is_floating_point:
        return torch.rand(value.shape, generator=generator).add(0.1).to(value.dtype)
    return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)


@pytest.mark.parametrize("wrong", [{"devices": "cuda"}, {"least": -1}, {"most": float("nan")}, {"most": "all"}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(PassError, match="recompute_cheap: "):
        RecomputeCheap(**wrong)
