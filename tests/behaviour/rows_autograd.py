"""What concerns gradients: hooks, checkpoints, functions of one's own, no_grad, torch.func inside and around."""

from typing import Any

import torch
import torch.nn.functional as F
from table import FORWARD, TRAINED, X, at, row
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.nn.modules import module as all_modules
from torch.utils.checkpoint import checkpoint

DIFFERENTIATED = ("compile", "backend")  # by autograd outside of the graph
NEEDED = X.clone().requires_grad_()
CALLED: list[int] = []


def drained(*_: Any) -> int:
    """How often something was called since this was asked last."""
    count = len(CALLED)
    CALLED.clear()
    return count


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 6 + 0 * x


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


class Negated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class NegatedTwice(Negated):
    @staticmethod
    def backward(ctx, grad):
        return -2 * grad


row("autograd.Function", inductor=True)(lambda m, x: m.out(Doubled.apply(m.fc(x))))
row("autograd.Functions of which one is made of the other")(
    lambda m, x: m.out(Negated.apply(m.fc(x)) + 3 * NegatedTwice.apply(m.fc(x)))
)
row("spectral norm", begin=lambda m: nn.utils.parametrizations.spectral_norm(m.fc))(lambda m, x: m.out(m.fc(x)))
row("straight-through estimator by a Function", tolerance=0.3)(lambda m, x: m.out(Straight.apply(m.fc(x))))
row("detach inside")(lambda m, x: m.out(m.fc(x).detach()) + m.fc(x))


@row("no_grad inside", inductor=True)
def without(m, x):
    with torch.no_grad():
        goal = m.out(x)
    return m.fc(x) - goal


@row("no_grad inside a model that breaks", breaks=4)
def without_and_break(m, x):
    y = m.fc(x)
    if x.sum() > 1e9:
        return y
    with torch.no_grad():
        goal = m.out(y)
    return m.out(y) * goal


@row("inference_mode inside")
def inference(m, x):
    with torch.inference_mode():
        h = m.fc(x)
    return m.fc(x) + h.clone()


@row("inference_mode inside a model that breaks", breaks=5)
def inference_and_break(m, x):
    if x.sum() > 1e9:
        return x
    with torch.inference_mode():
        h = m.fc(x)
    return m.fc(x) + h.clone()


row("set_grad_enabled by an argument", calls=((X, True), (X, False), (X, True)), doors=DIFFERENTIATED, builds=2)(
    lambda m, x, on: grad_by(m, x, on)
)


def grad_by(m: Any, x: torch.Tensor, on: bool) -> torch.Tensor:
    with torch.set_grad_enabled(on):
        h = m.fc(x)
    return m.out(h)


row(
    "requires_grad that is toggled", change=lambda m, n: m.fc.weight.requires_grad_(n != 1), calls=((X,),) * 4, builds=2
)(lambda m, x: m.out(m.fc(x)))
row("gradient of the input", calls=((NEEDED,),) * 3, look=lambda m, y: taken(NEEDED), doors=DIFFERENTIATED)(
    lambda m, x: m.out(m.fc(x))
)


def taken(tensor: torch.Tensor) -> Any:
    grad, tensor.grad = tensor.grad, None
    return grad


# Hooks


def hooked(work: Any) -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.fc(x)
        work(m, h)
        return m.out(h)

    return forward


def keep(m: Any, h: torch.Tensor) -> None:
    h.retain_grad()
    m.kept = h


row("hook on a tensor", inductor=True, breaks={"compile": 2, "step": 4, "backend": 2})(
    hooked(lambda m, h: h.register_hook(lambda gradient: 2 * gradient))
)
row("retain_grad", look=lambda m, y: m.kept.grad, doors=DIFFERENTIATED, builds=2, broken="compile backend")(
    hooked(keep)
)
row("hook before a node", breaks=4)(hooked(lambda m, h: h.grad_fn.register_prehook(lambda o: tuple(2 * g for g in o))))
row("hook on several gradients", {"seen": []}, settles=False, breaks=4)(
    hooked(lambda m, h: register_multi_grad_hook([h], lambda g: m.seen.append(1)))
)
row(
    "hook on a parameter",
    change=at(1, lambda m: m.fc.weight.register_hook(lambda gradient: 3 * gradient)),
    step_breaks=3,
)(lambda m, x: m.out(m.fc(x)))
row(
    "hook behind the gradient of a parameter",
    {"seen": []},
    change=at(1, lambda m: m.fc.bias.register_post_accumulate_grad_hook(lambda p: m.seen.append(1))),
    settles=False,
    step_breaks=3,
)(lambda m, x: m.out(m.fc(x)))
row("forward hook", begin=lambda m: m.fc.register_forward_hook(lambda module, args, y: y * 3), inductor=True)(
    lambda m, x: m.out(m.fc(x))
)
row(
    "forward hook that is hung up later",
    change=at(1, lambda m: m.fc.register_forward_hook(lambda module, args, y: y * 3)),
    builds=2,
)(lambda m, x: m.out(m.fc(x)))
row(
    "forward hook on the model itself",
    change=at(1, lambda m: m.register_forward_hook(lambda module, args, y: y * 3)),
    builds=2,
    broken="backend",
)(lambda m, x: m.out(m.fc(x)))
row(
    "backward hook on a module",
    change=at(
        1, lambda m: m.fc.register_full_backward_hook(lambda module, i, o: tuple(g if g is None else 3 * g for g in i))
    ),
    calls=((NEEDED,),) * 3,
    look=lambda m, y: taken(NEEDED),
    doors=DIFFERENTIATED,
    builds=3,
    broken="compile backend",
)(lambda m, x: m.out(m.fc(x)))


def everywhere(kind: str, hook: Any) -> Any:
    """Hung up for the second call, and gone before the third."""
    handles: list[Any] = []

    def change(model: Any, number: int) -> None:
        if number == 1 and len(handles) < 1:
            handles.append(getattr(all_modules, f"register_module_{kind}")(hook))
        while number == 2 and handles:
            handles.pop().remove()

    return change


row(
    "forward hook on all modules",
    change=everywhere("forward_hook", lambda module, args, y: y * 3 if type(module) is nn.Linear else None),
    builds=2,
    today={"backend": "result is wrong"},
)(lambda m, x: m.out(m.fc(x)))
row(
    "backward hook on all modules",
    change=everywhere("full_backward_hook", lambda module, grads, _: tuple(g if g is None else 3 * g for g in grads)),
    doors=("compile",),
    builds=3,
    broken="compile",
)(lambda m, x: m.out(m.fc(x)))


def tripled() -> Any:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: 3 * tensor)


def saving(around: Any) -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.fc(x)
        with around():
            h = torch.exp(h)
        return m.out(h)

    return forward


row("hooks for saved tensors in forward", breaks={"compile": 2, "step": 4, "backend": 2})(saving(tripled))
row("hooks for saved tensors around a call", around=tripled, around_both=True, doors=("step",), step_breaks=2)(
    lambda m, x: m.out(m.fc(x).tanh())
)


# Checkpoints


@torch.library.custom_op("amp_behaviour::watched", mutates_args=())
def watched(x: torch.Tensor) -> torch.Tensor:
    CALLED.append(1)
    return x.clone()


watched.register_fake(torch.empty_like)
watched.register_autograd(lambda ctx, grad: grad)

WAYS = {"module": lambda m: m.inner, "closure": lambda m: lambda x: m.inner(x)}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return F.gelu(watched(self.fc(x)))


class Checkpointed(nn.Module):
    way, options = "module", {"use_reentrant": False}

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.inner, self.out = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(checkpoint(WAYS[self.way](self), self.fc(x), **self.options))


for way in WAYS:
    row(f"checkpoint of a {way}", look=drained, inductor=way == "module")(
        type("Checkpoint", (Checkpointed,), {"way": way})
    )
row("checkpoint, reentrant", look=drained)(type("Checkpoint", (Checkpointed,), {"options": {"use_reentrant": True}}))
row("checkpoint, reentrant, of what requires no gradient", builds=5, broken="compile step backend")(
    lambda m, x: m.out(x) + checkpoint(m.fc, x, use_reentrant=True)
)
row("checkpoint with dropout inside", autocast=True)(
    lambda m, x: m.out(checkpoint(lambda h: F.dropout(m.fc(h), 0.5), x, use_reentrant=False))
)
row("checkpoint without gradients", doors=("inference",))(type("Checkpoint", (Checkpointed,), {}))


# torch.func


def dual(f: Any, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS = {
    "jvp": lambda f, x: torch.func.jvp(lambda t: f(t).sin(), (x,), (torch.ones_like(x),))[1],
    "grad": lambda f, x: torch.func.grad(lambda t: f(t).float().sin().sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(lambda t: f(t).sin())(x[0]),
    "vmap": lambda f, x: torch.func.vmap(lambda t: f(t).tanh())(x),
    "hessian": lambda f, x: torch.func.hessian(lambda t: f(t).float().sin().sum())(x[0]),
    "forward_ad": lambda f, x: dual(lambda t: f(t).sin(), x),
}
for name, transform in TRANSFORMS.items():
    row(f"torch.func inside: {name}")(lambda m, x, transform=transform: transform(m.fc, x))
    # Its numbers are those of autocast, which knows no rules; said once.
    row(
        f"torch.func around: {name}",
        use=transform,
        doors=FORWARD,
        autocast=True,
        builds=1 if name == "forward_ad" else 0,
        broken="inference compile" if name == "forward_ad" else "inference compile backend",
    )(lambda m, x: torch.tanh(m.fc(x)))
row(
    "torch.func.functional_call",
    use=lambda m, x: torch.func.functional_call(m, {k: 2 * v for k, v in m.named_parameters()}, (x,)),
    doors=DIFFERENTIATED,
)(lambda m, x: m.out(m.fc(x)))
row("autograd.grad inside", calls=((X,),) * 3, breaks=5)(lambda m, x: penalty(m, x))


def penalty(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    y = m.out(m.fc(x).tanh())
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope


row("double backward around", use=lambda m, x: penalty_around(m, x), doors=DIFFERENTIATED)(
    lambda m, x: m.out(m.fc(x).tanh())
)


def penalty_around(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    y = m(x)
    if not torch.is_grad_enabled():
        return y
    (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    return y + slope


row(
    "parameters in a list",
    {"gains": [nn.Parameter(torch.ones(4))]},
    doors=DIFFERENTIATED,
    look=lambda m, y: taken(m.gains[0]),
)(lambda m, x: m.fc(x) * m.gains[0])
row("tied weights", begin=lambda m: setattr(m.out, "weight", m.fc.weight), inductor=True)(lambda m, x: m.out(m.fc(x)))


@row("sparse gradients", calls=((torch.tensor([[1, 2, 2], [0, 5, 1]]),),) * 3, doors=DIFFERENTIATED)
class Sparse(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))


row(
    "weights written behind autograd's back",
    change=lambda m, n: m.fc.weight.data.mul_(1 + n),
    doors=(*TRAINED, "inference"),
)(lambda m, x: m.out(m.fc(x)))


@row(
    "buffer written behind autograd's back",
    change=lambda m, n: m.gain.data.fill_(1.0 + 2 * n),
    doors=(*TRAINED, "inference"),
)
class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("gain", torch.ones(4))

    def forward(self, x):
        return self.fc(x) * self.gain
