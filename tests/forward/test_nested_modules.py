"""Models and optimizers around which something stands: compiled already, scripted, wrapped by other libraries."""

import pytest
import torch
from torch import nn
from toys import eager_step, mean_square

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
BF16_ERROR = 2e-2  # a few roundings of 2**-9 each


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def with_amp(model: nn.Sequential) -> nn.Module:
    model[0] = amp.compile(model[0], dtype="bf16", backend="eager")
    return model


SCRIPTED = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def wrong(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    with torch.no_grad():
        return bool((actual.double() - expected.double()).norm() > 2 * BF16_ERROR * expected.double().norm())


@SCRIPTED
def test_a_scripted_model_is_refused():
    for alone in (torch.jit.script(nn.Linear(8, 8)), torch.jit.trace(nn.Linear(8, 8), X)):
        for call in (amp.compile, lambda one: amp.explain(one, X)):
            with pytest.raises(amp.AmpError, match="the model is scripted or traced"):
                call(alone)


def test_the_outer_plan_decides_for_a_compiled_module_inside():
    model = with_amp(plain())
    compiled = amp.compile(model, rules={"version": 1, "extends": "default", "deny": ["matmul"]}, backend="eager")
    reference = plain()
    assert torch.equal(compiled(X), reference(X)) and compiled.plan.low_nodes == 0
    assert not torch.equal(model[0](X), reference[0](X))  # by itself it runs as it was compiled


def test_hooks_of_a_module_behind_a_compiled_one_are_seen():
    model = with_amp(plain())
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    before = compiled(X)
    model[0].original.register_forward_hook(lambda module, args, result: result * 0)
    assert not torch.equal(compiled(X), before)
    assert torch.equal(compiled(X), compiled(X * 3))


@pytest.mark.parametrize("around", ["amp", "torch"])
@pytest.mark.parametrize("kind", ["forward_hook", "full_backward_pre_hook"])
def test_what_wraps_a_whole_model_is_taken_off_and_its_hooks_are_not_lost(around, kind):
    model = plain()
    wrapped = amp.compile(model, backend="eager") if around == "amp" else torch.compile(model, backend="eager")
    handle = getattr(wrapped, f"register_{kind}")(lambda *_: None)
    for call in (
        lambda: amp.compile(wrapped, backend="eager"),
        lambda: eager_step(wrapped, mean_square, torch.optim.SGD(model.parameters(), 0.1)),
    ):
        with pytest.raises(amp.AmpError, match="hooks of its own that would be lost; put that on the Sequential"):
            call()
    handle.remove()
    compiled = amp.compile(wrapped, dtype="bf16", backend="eager")
    assert compiled.original is model and not wrong(compiled(X), model(X))
    assert list(compiled.state_dict()) == list(model.state_dict())
    if around == "amp":
        wrapped.forward = lambda x: 2 * x
        with pytest.raises(amp.AmpError, match="a forward of its own that would be lost"):
            amp.compile(wrapped, backend="eager")


def test_a_parallel_model_of_one_device_is_what_is_in_it_and_over_several_it_is_named():
    model = nn.DataParallel(plain())
    assert amp.compile(model, dtype="bf16", backend="eager").original is model.module
    step = eager_step(model, mean_square)
    step(X)
    assert step.model is model.module
    model.device_ids = [0, 1]
    with pytest.raises(amp.AmpError, match=r"DataParallel.*amp\.compile\(model\.module\)"):
        amp.compile(model, dtype="bf16", backend="eager")
    with pytest.raises(amp.AmpError, match=r"DataParallel.*model\.module"):
        eager_step(model, mean_square)


# ---- optimizers and nests of models that other libraries have put something around


class LightningLike(torch.optim.Optimizer):
    """As Lightning does it: class and `__dict__` are those of an optimizer, and `.optimizer` is the real one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__ = {k: v for k, v in optimizer.__dict__.items() if k not in ("step", "__del__")}
        self._optimizer = optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def step(self, closure=None, **kwargs):
        raise AssertionError("the training step makes the update itself")


def accelerated(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    import accelerate

    return accelerate.Accelerator(cpu=True).prepare(optimizer)


def trained(wrap) -> list[torch.Tensor]:
    model = plain()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = eager_step(model, mean_square, wrap(optimizer), clip_norm=1.0)
    losses = [step(X) for _ in range(3)]
    assert len(optimizer.state) == 4  # the state is that of the real optimizer
    return [*losses, *model.parameters()]


@pytest.mark.usefixtures("own_accelerate")
@pytest.mark.parametrize("wrap", [LightningLike, accelerated])
def test_a_wrapped_optimizer_is_unwrapped(wrap):
    assert all(map(torch.equal, trained(wrap), trained(lambda optimizer: optimizer)))


def test_compiled_models_in_a_nest_are_unwrapped():
    """As those that are the whole model are."""
    model, other = plain(), amp.compile(nn.Linear(8, 8), dtype="bf16")
    nest = {"net": torch.compile(model, backend="eager"), "other": other}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = eager_step(nest, lambda nest, x: nest["other"](nest["net"](x)).square().mean(), optimizer)
    before = model[0].weight.detach().clone()
    step(X)
    assert type(step.model["net"]) is nn.Sequential and type(step.model["other"]) is nn.Linear
    assert not torch.equal(before, model[0].weight)
    assert type(eager_step(other, mean_square).model) is nn.Linear
