"""Gradients of torch's modules and of statistics in BF16, compiled against node by node: they are as exact."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import amp_compiler as amp
from amp_compiler.errors import AmpError

TWICE_ROUNDED = 2 * 2.0**-8
SHORT = "group_norm"
DRAWS = 4  # of weights and inputs, where one draw is worse
INPUTS = 3  # of each module; what follows are mostly other shapes


class Low(nn.Module):
    """A module that is given 16-bit data, as behind a linear layer, and a loss that asks for all of its results."""

    def __init__(self, module: nn.Module, low: torch.dtype | None) -> None:
        super().__init__()
        self.module, self.low = module, low

    def forward(self, args, kwargs):
        """The sum of all results, each element weighed by a number of its own."""
        inputs = pytree.tree_map(self._narrow, (args, kwargs))
        result = [one for one in pytree.tree_leaves(self.module(*inputs[0], **inputs[1])) if is_float(one)]
        return sum(
            (one.to(self._wide()) * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum() for one in result
        )

    def _narrow(self, leaf):
        return leaf.to(self.low) if self.low is not None and is_float(leaf) else leaf

    def _wide(self):
        return torch.float64 if self.low is None else torch.float32


def as_leaf(built: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return built.detach().requires_grad_(like.requires_grad)


def rounded(inputs):
    """With numbers that BF16 holds: a compiler need not round what it is given inside of a fused loop."""
    return pytree.tree_map(lambda x: as_leaf(x.bfloat16().float(), x) if is_float(x) else x, inputs)


def is_float(leaf) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def gradients(model, call, inputs):
    """Of a call's result by all parameters and floating-point inputs."""
    leaves, spec = pytree.tree_flatten(inputs)
    leaves = [leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_float(leaf) else leaf for leaf in leaves]
    wanted = [p for p in model.parameters() if p.requires_grad] + [x for x in leaves if is_float(x) and x.requires_grad]
    torch.manual_seed(0)
    loss = call(*pytree.tree_unflatten(leaves, spec))
    return torch.autograd.grad(loss, wanted, allow_unused=True) if wanted and loss.requires_grad else ()


def distance(built, exact, scale) -> float:
    return float((built.double() - exact.double()).abs().max()) / scale


def errors(module: nn.Module, inputs, low: torch.dtype) -> dict[int, tuple[float, float]]:
    """How far from FP64 each gradient is, as a share of its largest element: node by node, and compiled."""
    result = {}
    for backend in ("eager", "inductor"):
        model = Low(copy.deepcopy(module), low)
        compiled = amp.compile(model, dtype="bf16", backend=backend)
        with torch._inductor.config.patch(fallback_random=True):
            result[backend] = gradients(model, compiled, inputs)
    exact = Low(copy.deepcopy(module).double(), None)
    try:
        reference = gradients(
            exact, exact, pytree.tree_map(lambda x: as_leaf(x.double(), x) if is_float(x) else x, inputs)
        )
    except RuntimeError:  # not in FP64
        reference = result["eager"]
    built = {}
    for number, (eager, compiled, wanted) in enumerate(zip(*result.values(), reference, strict=True)):
        assert (eager is None) == (compiled is None), f"gradient {number} is missing"
        if eager is not None and eager.numel() and wanted is not None and eager.isfinite().all():
            scale = max(float(wanted.abs().max()), 1e-30)
            built[number] = distance(eager, wanted, scale), distance(compiled, wanted, scale)
    return built


def worse(draws: list[dict[int, tuple[float, float]]]) -> dict[int, str]:
    """The gradients that are farther off compiled than node by node, in the mean, by more than two roundings."""
    result = {}
    for number in draws[0]:
        eager, built = (sum(draw[number][which] for draw in draws) / len(draws) for which in (0, 1))
        if not built <= eager + TWICE_ROUNDED:
            result[number] = f"{built:.2e} off, {eager:.2e} node by node"
    return result


def drawn(info, number: int, seed: int):
    """A module with the inputs of one case; weights and inputs come from the seed."""
    torch.manual_seed(seed)
    one = cases(info)[number]
    module = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).train()
    return module, rounded((one.forward_input.args, one.forward_input.kwargs))


def type_taken(module: nn.Module, inputs) -> torch.dtype | None:
    """The type of data that torch itself takes: FP32 where it refuses 16 bits, as recurrent layers do; or none."""
    try:
        gradients(plain := Low(copy.deepcopy(module), torch.float32), plain, inputs)
    except RuntimeError:
        return None  # it has no FP32 backward by itself
    try:
        gradients(plain := Low(copy.deepcopy(module), torch.bfloat16), plain, inputs)
    except (NotImplementedError, ValueError):
        return torch.float32
    except RuntimeError:
        pass  # types that do not fit each other, which a plan makes fit
    return torch.bfloat16


def cases(info):
    result = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=True)
    return [one for one in result if one.forward_input is not None][:INPUTS]


SHARES = 16  # of the modules, each a slow test


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("share", range(SHARES))
def test_compiled_gradients_are_as_exact_as_eager_ones(share):
    from torch.testing._internal.common_modules import module_db  # here: it takes a second or two to import

    infos = [info for info in module_db if "Lazy" not in info.name]
    message = {}
    for info in infos[share::SHARES]:
        message |= too_far_off(info)
    assert not message


def too_far_off(info) -> dict[str, str]:
    message, refused = {}, {}
    for number, one in enumerate(cases(info)):
        module, inputs = drawn(info, number, number)
        low = type_taken(module, inputs)
        if low is None:
            continue
        try:
            draws = [errors(module, inputs, low)]
            if worse(draws):  # of few numbers one may be rounded badly by chance, here or there
                draws += [errors(*drawn(info, number, number + more), low) for more in range(1, DRAWS)]
        except AmpError as error:
            refused[number] = str(error)[:200]
            continue
        if result := worse(draws):
            message[f"{info.name} {number} {one.desc}"] = str(result)
    print(info.name, "refused:", refused)
    return message


# ---- statistics: variances, norms, sums, normalisations

IMAGES, HEADS = (4, 8, 8, 8), (4, 8, 8, 8)


def scale(x: Tensor) -> Tensor:
    """Of eight channels, made of the data, so that its gradient shows in theirs."""
    return x.flatten()[:8]


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "var": lambda x: x.var(-1),
    "std_mean": lambda x: sum(torch.std_mean(x, (0, -1))),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, -1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: (1 + 0.01 * x).cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "prod": lambda x: (1 + 0.01 * x).prod(-1),
    "softmax": lambda x: x.softmax(-1) * x,
    "log_softmax": lambda x: x.log_softmax(-1),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(HEADS)] * 3),
    "causal_attention": lambda x: F.scaled_dot_product_attention(*[x.view(HEADS)] * 3, is_causal=True),
    "rms_norm": lambda x: F.rms_norm(x, (64,)),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x[:16], x[16:], dim=-1),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.arange(32)),
    "local_response_norm": lambda x: F.local_response_norm(x.view(IMAGES), 5),
    "instance_norm": lambda x: F.instance_norm(x.view(IMAGES)),
    "group_norm": lambda x: F.group_norm(x.view(IMAGES), 2, scale(x)),
    "batch_norm": lambda x: F.batch_norm(x.view(IMAGES), None, None, scale(x), training=True),
    "layer_norm": lambda x: F.layer_norm(x, (64,)),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x.view(IMAGES), 1),
    "by_hand": lambda x: (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt(),
}


class Behind(nn.Module):
    """A statistic behind a linear layer that is nearly the identity."""

    def __init__(self, statistic: Callable[[Tensor], Tensor], mean: float) -> None:
        super().__init__()
        self.linear, self.statistic = nn.Linear(64, 64), statistic
        with torch.no_grad():
            self.linear.weight.copy_((torch.eye(64) + 0.02 * torch.randn(64, 64)).bfloat16())
            self.linear.bias.fill_(mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.statistic(self.linear(x))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == SHORT else pytest.mark.slow) for name in STATISTICS]
)
@pytest.mark.compiles
def test_compiled_statistics_are_as_exact_as_eager_ones(name: str) -> None:
    for mean in (0.0, 3.0):  # values far from zero: what a variance loses when it is rounded
        torch.manual_seed(0)
        model, x = Behind(STATISTICS[name], mean), torch.randn(32, 64).bfloat16().float().requires_grad_()
        assert not worse([errors(model, ((x,), {}), torch.float32)]), mean


def test_logcumsumexp_of_large_numbers_keeps_its_gradient() -> None:
    """In BF16 torch's own, under autocast too, is 1 for all that it is of."""
    torch.manual_seed(0)
    model = Low(Behind(lambda x: x.logcumsumexp(0), 900.0), torch.float32)
    nn.init.eye_(model.module.linear.weight)
    x = (4.0 * torch.randint(-3, 4, (6, 64))).requires_grad_()  # BF16 holds what the layer makes of it
    exact, result = (
        gradients(model, call, ((x,), {})) for call in (model, amp.compile(model, dtype="bf16", backend="eager"))
    )
    assert max(distance(one, other, float(other.abs().max())) for one, other in zip(result, exact, strict=True)) < 0.02
