"""`math: fp32`: FP32 arithmetic between 16-bit inputs and outputs, against the same by hand in eager torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from toys import classes, sgd_step

import amp_compiler as amp
from amp_compiler.errors import RuleError
from amp_compiler.fx.graph import CAST, canonical_op
from amp_compiler.fx.meta import Key
from amp_compiler.passes.precision.widen_math import WidenMath
from amp_compiler.policy.loader import load_rules

pytestmark = pytest.mark.usefixtures("bf16_kernels")

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": F16}


def rules(*more: dict[str, Any], **actions: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": {}, **({"precision": "low", "math": "fp32"} | actions)}, *more]}


class Op(nn.Module):
    """One op on an input and, where it has one, a weight."""

    def __init__(self, run: Callable[..., Any], weight: tuple[int, ...] | None) -> None:
        super().__init__()
        self.run = run
        generator = torch.Generator().manual_seed(1)
        self.weight = None if weight is None else nn.Parameter(torch.randn(weight, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x) if self.weight is None else self.run(x, self.weight)


SHAPE = (4, 6, 8, 8)
OPS: dict[str, tuple[Callable[..., Any], tuple[int, ...] | None]] = {
    "gelu": (F.gelu, None),
    "softmax": (lambda x: torch.softmax(x, -1), None),
    "log_softmax": (lambda x: torch.log_softmax(x, 1), None),
    "exp": (torch.exp, None),
    "mean": (lambda x: x.mean((2, 3)), None),
    "cumsum": (lambda x: x.cumsum(-1), None),
    "avg_pool": (lambda x: F.avg_pool2d(x, 2), None),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 1), None),
    "scale": (lambda x, w: x * w, (8,)),
    "divide": (lambda x, w: x / (w.square() + 1), (8,)),
    "index": (lambda x: x[:, [0, 0, 2]], None),
    "embedding": (lambda x, w: F.embedding((x[..., 0, 0].abs() * 2).long().clamp(max=6), w), (7, 5)),
    "group_norm": (lambda x: F.group_norm(x, 3), None),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), None),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), None),
}
SINGLE = [name for name in OPS if name not in ("divide",)]  # the others are more than one op each


def by_hand(name: str, x: torch.Tensor, weight: torch.Tensor | None, low: torch.dtype) -> torch.Tensor:
    """The op in FP32 on operands as the low type holds them, its result rounded."""
    run, _ = OPS[name]
    operands = [operand.to(low).float() for operand in (x, weight) if operand is not None]
    return run(*operands).to(low).float()


class Several(nn.Module):
    """Ops side by side: one graph."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names, self.ops = names, nn.ModuleList(Op(*OPS[name]) for name in names)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [op(x) for op, x in zip(self.ops, inputs, strict=True)]


def numbers(model: Several, run: Callable[..., Any]) -> list[list[torch.Tensor]]:
    """Of each op the result, and the gradients of the input and the weight."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(SHAPE, generator=generator).requires_grad_() for _ in model.names]
    result = []
    for name, op, x, built in zip(model.names, model.ops, inputs, run(*inputs), strict=True):
        coefficients = torch.randn(built.shape, generator=torch.Generator().manual_seed(2)).to(BF16).float()
        wanted = [x] if name != "embedding" else []
        wanted += [op.weight] if op.weight is not None else []
        result.append([built.detach(), *torch.autograd.grad((built * coefficients).sum(), wanted, retain_graph=True)])
    return result


def computed(model: Several, low: torch.dtype) -> list[list[torch.Tensor]]:
    """The same by hand."""

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        return [by_hand(*one, low) for one in zip(model.names, inputs, [op.weight for op in model.ops], strict=True)]

    return numbers(model, run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_computes_in_fp32_to_the_bit(dtype: str) -> None:
    model = Several(SINGLE)
    result = numbers(model, amp.compile(model, rules=rules(), dtype=dtype, backend="eager"))
    for name, mine, expected in zip(SINGLE, result, computed(model, DTYPES[dtype]), strict=True):
        assert all(map(torch.equal, mine, expected)), name


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["softmax", pytest.param("batch_norm", marks=pytest.mark.slow)])
def test_inductor_computes_in_fp32(name: str) -> None:
    """What compiled code sums in another order may be rounded to the neighbour: one unit in the last place of BF16."""
    model = Several([name])
    (result,) = numbers(model, amp.compile(model, rules=rules(), dtype="bf16", backend="inductor"))
    (expected,) = computed(model, BF16)
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(one, one.to(BF16).float()), "a 16-bit number, inside and outside"
        assert float((one == other).float().mean()) > 0.98
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.norm(self.linear(x).view(-1, 16))))


def graph_of(model: nn.Module, requested: Any, *inputs: torch.Tensor, **options: Any) -> Any:
    compiled = amp.compile(model, rules=requested, backend="eager", **({"dtype": "bf16"} | options))
    compiled(*inputs)
    return compiled.graph_module.graph


def test_fp32_values_stay_with_their_node_and_products_get_no_casts() -> None:
    graph = graph_of(Chain(), rules(), torch.randn(3, 8))
    wide = [node for node in graph.nodes if node.op == "call_function" and node.meta["val"].dtype is F32]
    computing = {canonical_op(node.target): node for node in wide if node.target is not CAST}
    assert set(computing) == {"aten.layer_norm", "aten.gelu"}
    for node in computing.values():
        (rounded,) = node.users
        assert rounded.target is CAST and rounded.args[1] is BF16
        source = node.args[0]
        assert source.target is CAST and list(source.users) == [node], "an upcast of its own"
        assert source.args[0].meta["val"].dtype is BF16


def test_views_and_what_is_exact_need_nothing_without_gradients() -> None:
    class Moves(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(torch.relu(x.transpose(2, 3)), 2)[:, [0, 0]]

    model = Moves().eval()
    with torch.no_grad():
        graph = graph_of(model, rules(), torch.randn(SHAPE))
    assert F32 not in {
        node.meta["val"].dtype for node in graph.nodes if canonical_op(node.target) in ("aten.max_pool2d", "aten.index")
    }
    graph = graph_of(Moves(), rules(), torch.randn(SHAPE, requires_grad=True))
    wide = {canonical_op(n.target) for n in graph.nodes if n.target is not CAST and n.meta.get("val") is not None
            and n.op == "call_function" and n.meta["val"].dtype is F32}  # fmt: skip
    assert wide == {"aten.max_pool2d", "aten.index"}, "overlapping windows and equal indices are summed backward"


def test_what_legalize_will_widen_is_left_to_it() -> None:
    graph = graph_of(nn.Linear(8, 4), rules(), torch.randn(2, 8), dtype="fp16")
    assert sum(node.target is CAST for node in graph.nodes) == 3 + 3 + 2  # the plan's, legalize's up, and down twice


# ---- gradients alone


def test_backward_math_alone() -> None:
    """The forward is what the 16-bit kernel gives; the gradients are computed in FP32 and rounded as they leave."""
    model = Several(["softmax", "gelu"])
    requested = rules(math="fp32")
    requested["rules"][0] = {"match": {}, "precision": "low", "backward": {"precision": "low", "math": "fp32"}}
    result = numbers(model, amp.compile(model, rules=requested, dtype="bf16", backend="eager"))
    for mine, expected in zip(result, computed(model, BF16), strict=True):
        assert all(map(torch.equal, mine[1:], expected[1:]))


def test_a_training_step_of_nvcaffe() -> None:
    """Everything low but the loss, FP32 arithmetic in all of it."""
    model = Chain()
    x, y = torch.randn(5, 8), torch.randint(0, 4, (5,))
    step = sgd_step(model, classes, 0.0, rules="nvcaffe", loss_scale=None)
    step(x, y)
    result = {name: gradient.clone().float() for name, gradient in step.gradients().items()}

    def low(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(BF16)

    twin = Chain()
    h = F.linear(low(x), low(twin.linear.weight), low(twin.linear.bias))
    h = low(F.layer_norm(h.float(), (16,), twin.norm.weight, twin.norm.bias))
    h = F.linear(low(F.gelu(h.float())), low(twin.head.weight), low(twin.head.bias))
    F.cross_entropy(h.float(), y).backward()
    for name, parameter in twin.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(result[name], parameter.grad, rtol=2**-7, atol=2**-8 * scale, msg=name)


# ---- what cannot be carried out


@pytest.mark.parametrize(
    ("rule", "dtype", "why"),
    [
        ({"precision": "low", "math": "bf16"}, "fp16", "the low type is fp16"),
        ({"precision": "low", "math": "fp16"}, "bf16", "the low type is bf16"),
        ({"precision": "low", "math": "fp16"}, "fp16", "compute in FP32 and round at the end"),
        ({"precision": "widest", "math": "bf16"}, "bf16", "compute in FP32 and round at the end"),
    ],
)
def test_arithmetic_that_no_kernel_has_is_refused_at_its_rule(rule: Any, dtype: str, why: str, tmp_path: Any) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "version: 1\nrules:\n  - match: {family: activation}\n"
        f"    precision: {rule['precision']}\n    math: {rule['math']}\n"
    )
    with pytest.raises(
        RuleError, match=f"math: {rule['math']}' cannot be carried out.*{why}.*write 'math: fp32'"
    ) as caught:
        amp.explain(nn.GELU(), (torch.randn(3),), rules=path, dtype=dtype)
    assert (caught.value.file, caught.value.line) == (str(path), 3)


def test_a_refinement_of_an_fp32_node_is_refused_where_it_narrows() -> None:
    requested = {"version": 1, "extends": "safe", "rules": [{"match": {"op": "aten.gelu"}, "math": "bf16"}]}
    with pytest.raises(RuleError, match=r"narrower than its data.*rules\.0") as caught:
        amp.explain(nn.GELU(), (torch.randn(3),), rules=requested, dtype="bf16")
    assert caught.value.file == "<dict>"


def test_16_bit_memory_changed_in_place_is_refused_and_fp32_memory_is_not() -> None:
    ops = load_rules("default").ops
    for dtype, marked in ((BF16, True), (F32, False)):
        traced = make_fx(lambda a: a.mul_(2.0), pre_dispatch=True)(torch.ones(4, dtype=dtype))
        for node in traced.graph.nodes:
            node.meta.update({Key.MATH: "my.yaml:7"} if node.op == "call_function" else {})
        if not marked:
            assert not WidenMath(ops)(traced).modified
            continue
        with pytest.raises(RuleError, match=r"it changes 16-bit memory in place.*match: {op: aten.mul}") as caught:
            WidenMath(ops)(traced)
        assert (caught.value.file, caught.value.line) == ("my.yaml", 7)
