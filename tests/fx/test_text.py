"""An FX graph as text reads back as itself, and text that says nothing sensible is an error that names the line."""

import math

import pytest
import torch
from fx_reader import parse_fx
from torch import fx, nn
from toys import eager_step

from amp_compiler.fx.meta import Key
from amp_compiler.fx.text import Lines, format_fx

EVERYTHING = """in w: fp32[4, 4]
in x: bf16[4, 8]{1, 4}  # low=w:bf16
in s: fp32[]  # state=scale/scale/0
mul: fp32[4, 4] = aten.mul.Tensor(w, -1e-05)  # phase=forward seed volatile cast math at=mlp.fc1:Linear
max_1: (fp32[4], i64[4]) = aten.max.dim(mul, 0)  # pin=cast backward=fp16
getitem: fp32[4] = getitem(max_1, 0)
full: fp32[] = aten.full.default([], inf, dtype=torch.float32, device=device("cpu"), pin_memory=False)
typed: fp32[4] = typed_op(aten.neg.default, (w,), {"a": 1}, [torch.bfloat16], [torch.float32], torch.float32)
index: fp32[2, 4] = aten.index.Tensor(w, [None, mul])
zeros: bf16[4, 8] = Product.zeros(4, 8)
reshaped: bf16[8, 4] = call_method("reshaped", zeros, 8, 4)
inner = attribute("inner")
call: (fp32[4]) = call_module("inner", getitem)
check = aten._assert_async.msg(s, "it's \\"odd\\"")
return getitem, None, full, 1
graph inner
in getitem: fp32[4]
neg: fp32[4] = aten.neg.default(getitem)
return neg
"""


CHANGES = {
    "a name": lambda w, m: w._rename("v"),
    "an argument": lambda w, m: m.update_arg(1, 2.0),
    "a target": lambda w, m: setattr(m, "target", torch.ops.aten.add.Tensor),
    "a keyword": lambda w, m: m.update_kwarg("out", w),
    "an example": lambda w, m: m.meta.update(val=m.meta["val"].half()),
    "a mark": lambda w, m: m.meta.update({Key.MASTER: "w"}),
    "a mark less": lambda w, m: m.meta.pop(Key.PHASE),
    "a module": lambda w, m: m.meta.update(nn_module_stack={"fc2": ("fc2", "Linear")}),
    "a node more": lambda w, m: m.append(m.graph.node_copy(m)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_lines_that_are_kept_are_those_that_would_be_written(change) -> None:
    module, lines = parse_fx(EVERYTHING), Lines()
    for graph_module in (module, module.inner):
        before = lines.format(graph_module)
        assert before == lines.format(graph_module) == format_fx(graph_module)
    before = lines.format(module)
    change(*list(module.graph.nodes)[:1], next(node for node in module.graph.nodes if node.name == "mul"))
    assert lines.format(module) == format_fx(module) != before


def test_everything_reads_back_as_itself() -> None:
    module = parse_fx(EVERYTHING)
    assert format_fx(module) == EVERYTHING
    nodes = {node.name: node for node in module.graph.nodes}
    assert nodes["x"].meta["val"].stride() == (1, 4) and nodes["x"].meta[Key.LOW] == ("w", torch.bfloat16)
    assert nodes["full"].args[1] == math.inf and nodes["full"].kwargs["device"] == torch.device("cpu")
    assert nodes["mul"].meta[Key.SEED] is True and nodes["s"].meta[Key.STATE] == ("scale", "scale", 0)
    assert isinstance(module.inner, fx.GraphModule)


def test_marks_are_the_keys_of_the_enum() -> None:
    assert Key.PHASE == "amp_phase" and {Key.PHASE: 1}["amp_phase"] == 1  # type: ignore[index]
    assert len({key.value for key in Key}) == len(Key)


def test_a_size_that_torch_settles_while_a_pass_runs_is_no_change_of_that_pass() -> None:
    """The rows that a mask takes of a second batch size: tracing anew replaces their symbol in the graph before."""
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return torch.masked_select(model(x)[:, :1], mask).sum()

    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = eager_step(model, loss, optimizer, enabled=False)
    for rows in (2, 3):
        x, mask = torch.randn(rows, 4), torch.rand(rows, 6) > 0.1
        torch.testing.assert_close(step(x, mask), loss(model, x, mask).detach())
