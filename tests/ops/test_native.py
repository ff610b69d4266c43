"""The table of native kernels, and that the operators in it give what those give whose place they take."""

import shutil

import pytest
import torch
from fx_reader import parse_fx
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from toys import TOYS

import amp_compiler as amp
from amp_compiler.errors import PassError
from amp_compiler.ops.cpu import build
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.native import FORWARD, JOINT, NATIVE_OPS, STAGES, UPDATE, NativeOp
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.passes.device import native_ops
from amp_compiler.passes.device.native_ops import NativeOps

LSTM = torch.ops.aten.lstm.input
OWN = torch.ops.amp_compiler


def signature(op):
    """Types of arguments and results."""
    arguments = [str(argument.type).replace("SymInt", "int") for argument in op._schema.arguments]
    return arguments, [str(one.type) for one in op._schema.returns]


NATIVE = pytest.mark.skipif(
    cpu_update.most_inner() == 0, reason="no C++ compiler, or a processor without bf16 products"
)


@pytest.mark.parametrize("row", NATIVE_OPS, ids=[f"{row.op} on {row.device}" for row in NATIVE_OPS])
def test_a_row_is_complete(row):
    assert row.stage in (*STAGES, UPDATE)
    assert row.gain
    assert isinstance(row.ready(), bool)
    if row.stage != UPDATE:
        assert signature(row.op) == signature(row.implementation)


def test_a_pass_puts_no_update_kernel_into_a_graph():
    assert {row.stage for stage in ("", *STAGES) for row in NativeOps(stage).rows} == set(STAGES)


def lstm_arguments(projected=0):
    torch.manual_seed(0)
    layer = nn.LSTM(6, 5, 1, batch_first=True, proj_size=projected)
    states = [torch.randn(1, 2, projected or 5), torch.randn(1, 2, 5)]
    return torch.randn(2, 3, 6), states, list(layer._flat_weights), True, 1, 0.0, True, False, True


def test_what_it_does_not_take_is_left_to_aten():
    arguments = lstm_arguments(projected=4)
    with torch.no_grad():
        result, expected = OWN.lstm(*arguments), LSTM(*arguments)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NATIVE)])
def test_it_is_traced_as_the_operators_that_it_is_made_of(dtype):
    def gradient(x, h, c, *weights):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = OWN.lstm(x, [h, c], list(weights), True, 1, 0.0, True, False, True)[0]
        return torch.autograd.grad(out.sum(), x)

    x, states, weights, *_ = lstm_arguments()
    low = [one.to(dtype) for one in (x, *states, *weights)]
    traced = make_fx(gradient, tracing_mode="fake")(*low)
    targets = {node.target for node in traced.graph.nodes}
    if dtype == torch.bfloat16:
        assert {OWN.recurrent_layer.default, OWN.recurrent_sums_backward.default} <= targets
    else:
        assert {OWN.recurrent_network.default, OWN.recurrent_network_backward.default} <= targets
    assert not {OWN.lstm.default, LSTM} & targets


ATTENTION = """in q: bf16[2, 4, 10, 8]
made: (bf16[2, 4, 10, 8], fp32[2, 4, 10]) = aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)
out: bf16[2, 4, 10, 8] = getitem(made, 0)
return out
"""


def test_a_compilers_backward_is_awaited_only_where_there_may_be_one():
    graph = parse_fx(ATTENTION).graph
    assert NativeOps(JOINT).awaited(graph)
    assert not NativeOps(FORWARD).awaited(graph)
    assert not NativeOps(JOINT).awaited(parse_fx(ATTENTION.replace("]", "]@cuda")).graph)
    assert not NativeOps(JOINT).awaited(parse_fx("in x: fp32[2]\nneg: fp32[2] = aten.neg.default(x)\nreturn neg").graph)
    (node,) = graph.find_nodes(
        op="call_function", target=torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    )
    node.args = (node.target, node.args, {}, (torch.bfloat16,) * 3, (torch.bfloat16,) * 3, None)
    node.target = typed_op
    assert NativeOps(JOINT).awaited(graph)


NEGATION = "in x: fp32[2]\nneg: fp32[2] = aten.neg.default(x)\nreturn neg"
NEG, ABS, SIN = (getattr(torch.ops.aten, name).default for name in ("neg", "abs", "sin"))


def row_of(implementation, device="cpu", fits=True):
    return NativeOp(NEG, device, JOINT, lambda: True, lambda self: fits, implementation, "for a test")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row_of(ABS), row_of(SIN, device="cuda")], ABS),
        ([row_of(SIN, device="cuda"), row_of(ABS)], ABS),
        ([row_of(SIN, fits=False), row_of(ABS)], ABS),
        ([row_of(ABS), row_of(SIN)], ABS),
        ([row_of(SIN, fits=False)], NEG),
    ],
)
def test_the_first_row_that_takes_a_call_counts(rows, expected, monkeypatch):
    monkeypatch.setattr(native_ops, "NATIVE_OPS", tuple(rows))
    graph_module = parse_fx(NEGATION)
    NativeOps(JOINT)(graph_module)
    assert [node.target for node in graph_module.graph.nodes if node.op == "call_function"] == [expected]


def test_what_another_pass_has_left_without_a_value_is_left_alone(monkeypatch):
    """Behind Inductor's passes comes a user's own, which need not say what its nodes hold."""
    monkeypatch.setattr(native_ops, "NATIVE_OPS", (row_of(ABS),))
    graph = parse_fx(NEGATION).graph
    next(iter(graph.nodes)).meta.pop("val")
    assert not NativeOps(JOINT).rewrite(graph)


def test_the_loops_are_compiled_where_there_is_a_compiler(caplog):
    """One mistake in their C++ would turn all of them off, and tests of them would be left out."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler on this machine")
    assert build.library() is not None, caplog.text


def test_the_identity_for_a_cache_says_what_the_machine_has(monkeypatch):
    result = set()
    for inner in (0, 512):
        monkeypatch.setattr(cpu_update, "most_inner", lambda inner=inner: inner)
        result |= {NativeOps(stage).identity() for stage in ("", *STAGES)}
    assert len(result) == 5  # of the rows before autograd none asks for it


def test_an_unknown_stage_is_an_error():
    with pytest.raises(PassError, match="use one of 'forward', 'joint'"):
        NativeOps("backward")


@pytest.mark.parametrize("backward", [{}, {"backward": {"precision": "fp32"}}], ids=["16 bits", "fp32"])
def test_a_training_step_runs_the_operator_in_a_typed_op_too(backward):
    rule = {"match": {"op": "aten.lstm"}, "precision": "low", **backward}
    step = TOYS["lstm"].step(amp, backend="eager", rules={"version": 1, "extends": "default", "rules": [rule]})
    step(*TOYS["lstm"].batch())
    targets = [
        node.target for program in step._choice.programs.values() for node in program.report.graph_module.graph.nodes
    ]
    assert OWN.recurrent_layer.default in targets and LSTM not in targets
