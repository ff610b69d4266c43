"""What runs the parts of a step that was cut: kernels where they take them, a compiler for the rest."""

import pytest
import torch
from fx_reader import parse_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_compiler.backends import inductor
from amp_compiler.backends.step_runner import kernels_for, run_cut_step
from amp_compiler.fx.graph import is_single_number
from amp_compiler.ops.update.operators import CHECK, COMMIT, OPERATORS
from amp_compiler.passes.step.cut_step import BEFORE, CutStep

GATHERS = """
in x: fp32[4]
in inverse: fp32[]
in buffer: i64[]
in total: fp32[4]  # state=sum/w/0
raised: i64[] = aten.add.Tensor(buffer, 1)
add: fp32[4] = aten.add.Tensor(total, x)
copy_ = aten.copy_.default(total, add)
check: (fp32[], fp32[], u8[1]) = amp_compiler.grad_check.default([add], inverse)
norm: fp32[] = getitem(check, 0)
nonfinite: fp32[] = getitem(check, 1)
commit = amp_compiler.commit.default(nonfinite, [buffer], [raised])
double: fp32[] = aten.mul.Tensor(norm, 2)
return double, add
"""
UPDATES = """
in w: fp32[4]
in x: fp32[4]
in inverse: fp32[]
in started: fp32[]
in hyper: fp64[5]
mul: fp32[4] = aten.mul.Tensor(w, x)
check: (fp32[], fp32[], u8[1]) = amp_compiler.grad_check.default([mul], inverse)
norm: fp32[] = getitem(check, 0)
nonfinite: fp32[] = getitem(check, 1)
coef: fp32[] = aten.mul.Tensor(inverse, norm)
update = amp_compiler.sgd_update.default([w], [mul], [], [], started, hyper, coef, nonfinite, False, False)
return norm, mul
"""


def on(device, text):
    return parse_fx(text.strip() if device == "cpu" else _on_cuda(text))


def _on_cuda(text):
    lines = []
    for line in text.strip().splitlines():
        head, equals, tail = line.partition(" = ")
        name, colon, types = head.partition(": ")
        lines.append(f"{name}{colon}{types.replace(']', ']@cuda')}{equals}{tail}")
    return "\n".join(lines)


@pytest.mark.parametrize("text", [GATHERS, UPDATES], ids=["gathers", "updates"])
def test_kernels_check_commit_and_update_on_a_gpu(text):
    kernels = kernels_for(on("cuda", text))
    assert {CHECK, COMMIT, *OPERATORS.values()} == set(kernels)


def test_on_a_cpu_a_compiler_checks_gradients_that_are_only_gathered():
    assert kernels_for(on("cpu", GATHERS)) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_numbers_behind_the_check_are_compiled_on_a_gpu(device):
    """Each of them would be a launch; on a CPU a call is faster than going into compiled code."""
    step, built = on(device, UPDATES), []

    def build(subgraph, inputs):
        built.append(subgraph)
        return subgraph.forward

    cut = CutStep((CHECK, *OPERATORS.values()))(step).subject
    examples = [node.meta["val"] for node in cut.graph.find_nodes(op="placeholder")]
    run_cut_step(cut, examples, build, {})
    subgraphs = [getattr(cut, BEFORE)] if device == "cpu" else [getattr(cut, BEFORE), cut.behind_check]
    assert built == subgraphs


def test_numbers_on_a_gpu_are_one_kernel():
    step = on("cuda", GATHERS)
    cut = CutStep((CHECK, COMMIT))(step).subject
    assert inductor._options(cut.behind_check, False)["combo_kernels"] is True
    assert "combo_kernels" not in inductor._options(getattr(cut, BEFORE), False)
    assert "combo_kernels" not in inductor._options(CutStep((CHECK, COMMIT))(on("cpu", GATHERS)).subject, False)


def test_nothing_is_asked_of_a_symbolic_size():
    """Asking would put a bound on it, and an unknown one has no answer."""
    environment = ShapeEnv()
    unknown = environment.create_unbacked_symint()
    with FakeTensorMode(shape_env=environment):
        assert not is_single_number(torch.empty(unknown, device="cuda"))
        assert is_single_number(torch.empty((), device="cuda")) and not is_single_number(torch.empty(2, 1))
    assert not environment.guards
