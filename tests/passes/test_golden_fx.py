"""Golden text of the passes on FX: each case is a small graph, printed before and after the pass.

The graphs are traced here from torch functions, so that they carry real fake tensors; the text of both sides stands in
`tests/golden/<pass>/<case>.txt`. `AMP_REGENERATE=1 pytest tests/test_golden_fx.py` writes them anew: read the diff.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.fx.graph import rename_placeholder
from amp_compiler.fx.meta import MATH
from amp_compiler.ops.loss_scale import StaticLossScale
from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.base import Pass
from amp_compiler.passes.device.multiply_convolutions import MultiplyConvolutions
from amp_compiler.passes.precision.legalize import Legalize
from amp_compiler.passes.precision.type_backward import BACKWARD, TypeBackward
from amp_compiler.passes.precision.widen_math import WidenMath
from amp_compiler.passes.step.differentiate import Differentiate
from amp_compiler.passes.step.fold_loss_scale import FoldLossScale
from amp_compiler.passes.step.fuse_update import FuseUpdate
from amp_compiler.passes.step.simplify_casts import SimplifyCasts
from amp_compiler.passes.step.trace_update import StateTensor, TracedUpdate
from amp_compiler.passes.step.update_group import UpdateGroup
from amp_compiler.policy.loader import load_rules

GOLDEN = Path(__file__).parents[1] / "golden"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
aten = torch.ops.aten


def trace(function: Callable[..., Any], *dtypes: torch.dtype, shape: tuple[int, ...] = (4, 4)) -> fx.GraphModule:
    return trace_shapes(function, *((shape, dtype) for dtype in dtypes))


def trace_shapes(function: Callable[..., Any], *forms: tuple[tuple[int, ...], torch.dtype]) -> fx.GraphModule:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype) for shape, dtype in forms]
    traced = make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*inputs)
    for node, name in zip(traced.graph.find_nodes(op="placeholder"), "abcd", strict=False):
        rename_placeholder(node, name)
    traced.recompile()
    return traced


def printed(graph_module: fx.GraphModule) -> str:
    text = graph_module.print_readable(print_output=False)
    lines = [re.sub(r";  [\w, =]+ = None", "", line).rstrip() for line in text.splitlines()]
    kept = [line for line in lines if line and not line.strip().startswith("#") and not line.startswith("class")]
    phases = {node.name: node.meta["amp_phase"] for node in graph_module.graph.nodes if "amp_phase" in node.meta}
    marked = []
    for line in kept:
        name = re.match(r"\s*(\w+)", line)
        phase = phases.get(name[1]) if name else None
        marked.append(line + (f"  # {phase}" if phase else ""))
    return "\n".join(marked) + "\n"


def differentiated(function: Callable[..., Any], wrt: tuple[str, ...], *dtypes: torch.dtype) -> fx.GraphModule:
    return Differentiate(wrt)(trace(function, *dtypes)).subject


def folded(function: Callable[..., Any], wrt: tuple[str, ...], *dtypes: torch.dtype) -> fx.GraphModule:
    return FoldLossScale()(differentiated(function, wrt, *dtypes)).subject


def mean_loss(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return ((w * x).mean(),)


def sum_of_halves(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (aten.to.dtype(aten.to.dtype(w, BF16) * x, F32).sum(),)


def marked(
    gradient: torch.dtype, function: Callable[..., Any], *dtypes: torch.dtype, op: Any = aten.mm.default
) -> fx.GraphModule:
    """The trace with the nodes of one op marked, and with its casts as a plan places them."""
    traced = trace(function, *dtypes)
    for node in traced.graph.nodes:
        node.meta.update({BACKWARD: gradient} if node.target is op else {})
        node.meta.update({"amp_cast": "placed"} if node.target is aten.to.dtype else {})
    return traced


def computing(function: Callable[..., Any], *dtypes: torch.dtype) -> fx.GraphModule:
    """The trace with every node marked by a rule with `math: fp32`."""
    traced = trace(function, *dtypes)
    for node in traced.graph.nodes:
        node.meta.update({MATH: "my.yaml:3"} if node.op == "call_function" else {})
    return traced


def low_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
    return (aten.to.dtype(aten.mm(aten.relu(a), aten.to.dtype(b, BF16)), F32).sum(),)


def typed(function: Callable[..., Any], *dtypes: torch.dtype) -> fx.GraphModule:
    return TYPE_BACKWARD(marked(F32, function, *dtypes)).subject


def convolved(pixels: int, kernel: int, *options: Any, dtype: torch.dtype = BF16) -> fx.GraphModule:
    """Two images of 8 channels, convolved to 16."""
    forms = ((2, 8, pixels, pixels), dtype), ((16, 8, kernel, kernel), dtype), ((16,), dtype)
    return trace_shapes(lambda a, b, c: (aten.conv2d(a, b, c, *options),), *forms)


TYPE_BACKWARD = TypeBackward(load_rules("default").ops)
LEGALIZE = Legalize(load_rules("default").ops)
WIDEN_MATH = WidenMath(load_rules("default").ops)
GROUP = UpdateGroup("sgd", ("a",), (), (("momentum_buffer", True), ("lows", False)), 5, (False, False), True)
UPDATE = FuseUpdate((GROUP,), ("a",), ("a",), 1, (), StaticLossScale(8.0), clip_norm=1.0)


def running_mean(masters: Any, grads: Any, states: Any, rates: Any) -> Any:
    """An optimizer's own code, with its writes."""
    weight, mean = masters[0].clone(), states[0].clone()
    mean.lerp_(grads[0], 0.1)
    weight.sub_(mean * rates[0])
    return [weight], [mean]


MEAN = StateTensor("mean", 0, (4, 4), (4, 1), F32)
TRACED = FuseUpdate(
    (TracedUpdate("Mean", ("a",), ("b",), (MEAN,), 1, running_mean),), ("b",), ("a",), 1, (), StaticLossScale(8.0)
)
CASES: dict[str, tuple[Pass[fx.GraphModule], Callable[[], fx.GraphModule], bool]] = {
    "legalize/fp16_linear_on_a_cpu": (LEGALIZE, lambda: trace(lambda a, b: (aten.linear(a, b),), F16, F16), True),
    "legalize/shared_operand_is_widened_once": (LEGALIZE, lambda: trace(lambda a: (aten.mm(a, a),), F16), True),
    "legalize/bf16_linear_is_left_alone": (
        LEGALIZE,
        lambda: trace(lambda a, b: (aten.linear(a, b),), BF16, BF16),
        False,
    ),
    "legalize/fp16_add_is_left_alone": (LEGALIZE, lambda: trace(lambda a, b: (a + b,), F16, F16), False),
    "multiply_convolutions/pixels_are_patches_of_1_x_1": (
        MultiplyConvolutions(),
        lambda: convolved(32, 1, [2, 1]),
        True,
    ),
    "multiply_convolutions/few_pixels": (MultiplyConvolutions(), lambda: convolved(4, 3, [1, 1], [1, 1]), True),
    "multiply_convolutions/many_pixels_are_left_alone": (
        MultiplyConvolutions(),
        lambda: convolved(5, 3, [1, 1], [1, 1]),
        False,
    ),
    "multiply_convolutions/fp32_is_left_alone": (MultiplyConvolutions(), lambda: convolved(4, 1, dtype=F32), False),
    "differentiate/mean_of_a_product": (Differentiate(("a",)), lambda: trace(mean_loss, F32, F32), True),
    "differentiate/the_adjoint_of_a_cast_is_the_cast_back": (
        Differentiate(("a",)),
        lambda: trace(sum_of_halves, F32, BF16),
        True,
    ),
    "differentiate/what_the_loss_does_not_depend_on_has_none": (
        Differentiate(("a", "b")),
        lambda: trace(lambda a, b: ((a * a).sum(), b + 1), F32, F32),
        True,
    ),
    "differentiate/a_typed_op_brings_its_own_types": (
        Differentiate(("a", "b")),
        lambda: typed(low_product, BF16, F32),
        True,
    ),
    "type_backward/fp32_gradients_of_a_low_product": (TYPE_BACKWARD, lambda: marked(F32, low_product, BF16, F32), True),
    "type_backward/a_cast_of_its_own_for_weights_kept_low": (
        TypeBackward(load_rules("default").ops, past_weights=False),
        lambda: marked(F32, low_product, BF16, F32),
        True,
    ),
    "type_backward/low_gradients_of_an_fp32_product": (
        TYPE_BACKWARD,
        lambda: marked(BF16, lambda a, b: (aten.mm(aten.to.dtype(a, F32), b),), BF16, F32),
        True,
    ),
    "type_backward/neighbours_hand_over_in_fp32": (
        TYPE_BACKWARD,
        lambda: marked(F32, lambda a, b: (aten.mm(aten.mm(a, b), b),), BF16, BF16),
        True,
    ),
    "type_backward/what_has_the_type_is_left_alone": (
        TYPE_BACKWARD,
        lambda: marked(BF16, lambda a, b: (aten.mm(a, b),), BF16, BF16),
        False,
    ),
    "widen_math/casts_around_each_node_of_its_own": (
        WIDEN_MATH,
        lambda: computing(lambda a, b: (aten.gelu(a), aten.exp(a) * b), BF16, BF16),
        True,
    ),
    "widen_math/products_and_sums_are_left_alone": (
        WIDEN_MATH,
        lambda: computing(lambda a, b: (aten.mm(a, b) + aten.relu(a).t(),), BF16, BF16),
        False,
    ),
    "fold_loss_scale/the_seed_takes_the_scale_and_the_mean": (
        FoldLossScale(),
        lambda: differentiated(mean_loss, ("a",), F32, F32),
        True,
    ),
    "fold_loss_scale/nothing_to_seed": (
        FoldLossScale(),
        lambda: differentiated(lambda a, b: ((b * b).sum(),), ("a",), F32, F32),
        False,
    ),
    "simplify_casts/up_and_down_again": (
        SimplifyCasts(),
        lambda: trace(lambda a: (aten.to.dtype(aten.to.dtype(a, F32), BF16) + 1,), BF16),
        True,
    ),
    "simplify_casts/down_and_up_rounds_and_stays": (
        SimplifyCasts(),
        lambda: trace(lambda a: (aten.to.dtype(aten.to.dtype(a, BF16), F32),), F32),
        False,
    ),
    "simplify_casts/twice_is_once": (
        SimplifyCasts(),
        lambda: trace(lambda a: (aten.to.dtype(a, BF16) * aten.to.dtype(a, BF16),), F32),
        True,
    ),
    "simplify_casts/an_upcast_is_repeated_in_the_backward": (
        SimplifyCasts(),
        lambda: differentiated(lambda a, b: (aten.to.dtype(b, F32).mul(a).sum(),), ("a",), F32, BF16),
        True,
    ),
    "fuse_update/an_optimizers_own_code_and_a_16_bit_copy": (
        TRACED,
        lambda: folded(lambda a, b: ((b * b).sum(),), ("b",), F32, BF16),
        True,
    ),
    "fuse_update/sgd_with_clipping": (UPDATE, lambda: folded(mean_loss, ("a",), F32, F32), True),
}


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str) -> None:
    run, make, changes = CASES[case]
    given = make()
    before = printed(given)
    result = run(given)
    assert result.modified is changes
    found = f"{before}---\n{printed(result.subject)}"
    path = GOLDEN / f"{case}.txt"
    if os.environ.get("AMP_REGENERATE"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def test_every_pass_on_fx_has_golden_text() -> None:
    covered = {case.partition("/")[0] for case in CASES}
    on_fx = {name for name in PASSES if "fx" in str(find_pass(name).__orig_bases__)}
    assert covered == on_fx
    assert {
        str(path.relative_to(GOLDEN).with_suffix("")) for name in covered for path in (GOLDEN / name).iterdir()
    } == set(CASES)
