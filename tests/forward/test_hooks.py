"""Hooks on tensors, parameters and modules: each is run as in an eager call, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as all_modules

import amp_compiler as amp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Hooked(nn.Module):
    """Does something to a tensor in the middle."""

    def __init__(self, work: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc, self.out, self.work = nn.Linear(4, 4), nn.Linear(4, 4), work
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        self.work(self, h)
        return self.out(h)


def doubled(model: Hooked, h: torch.Tensor) -> None:
    h.register_hook(lambda gradient: 2 * gradient)


def kept(model: Hooked, h: torch.Tensor) -> None:
    h.retain_grad()
    model.kept = h


def behind_node(model: Hooked, h: torch.Tensor) -> None:
    h.grad_fn.register_hook(lambda inputs, outputs: tuple(one if one is None else 2 * one for one in inputs))


def before_node(model: Hooked, h: torch.Tensor) -> None:
    h.grad_fn.register_prehook(lambda outputs: tuple(2 * one for one in outputs))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("work", [doubled, kept, behind_node, before_node])
def test_a_hook_in_forward_runs_between_pieces(work: Callable[..., Any]) -> None:
    model = Hooked(work)
    twin = copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    compiled(X).sum().backward()
    twin(X).sum().backward()
    close(model.fc.weight.grad, twin.fc.weight.grad)
    assert compiled.execution != "as one graph" and len(compiled._subgraphs().last) == 2
    if work is kept:
        close(model.kept.grad, twin.kept.grad)


def test_explain_names_the_line_of_the_hook() -> None:
    with pytest.raises(amp.CaptureError, match=r"test_hooks\.py:\d+: forward calls register_hook"):
        amp.explain(Hooked(doubled), (X,))


def test_hooks_on_parameters_run() -> None:
    model, seen = nn.Linear(4, 4), []
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    model.weight.register_hook(lambda gradient: 3 * gradient)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    compiled(X).sum().backward()
    close(model.weight.grad, 3 * X.sum(0).expand(4, 4))
    close(seen[0], torch.full((4,), 3.0))
    assert compiled.execution == "as one graph"


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_global_forward_hooks_are_traced_while_they_are_there(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    before = compiled(X)

    def more(module: nn.Module, *args: Any) -> Any:
        return args[-1][0] + 1 if kind == "forward_pre_hook" else args[-1] + 1

    handle = getattr(all_modules, f"register_module_{kind}")(
        lambda module, *args: more(module, *args) if isinstance(module, nn.Linear) else None
    )
    try:
        close(compiled(X), model(X))
    finally:
        handle.remove()
    assert torch.equal(compiled(X), before) and compiled.compilations == 2


@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook", "every module"])
def test_backward_hooks_on_modules_run_in_pieces(kind: str) -> None:
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), []

    def tripled(module: nn.Module, *gradients: Any) -> Any:
        calls.append(module)
        return tuple(3 * gradient for gradient in gradients[0]) if module is model[1] else None

    compiled = amp.compile(model, dtype="bf16", backend="eager")
    compiled(X).sum().backward()
    plain = model[0].weight.grad.clone()
    register = (
        all_modules.register_module_full_backward_hook
        if kind == "every module"
        else getattr(model[1], f"register_{kind}")
    )
    handle = register(tripled)
    try:
        model.zero_grad()
        compiled(X).sum().backward()
    finally:
        handle.remove()
    close(model[0].weight.grad, 3 * plain)
    assert compiled.execution != "as one graph" and calls.count(model[1]) == 1
    model.zero_grad()
    compiled(X).sum().backward()
    assert torch.equal(model[0].weight.grad, plain) and compiled.execution == "as one graph"


def test_what_a_forward_hook_does_in_python_is_done_at_every_call() -> None:
    model, calls = nn.Sequential(nn.Linear(4, 4)), []
    model[0].register_forward_pre_hook(lambda module, args: calls.append(len(args)))
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for _ in range(3):
        compiled(X)
    assert calls == [1, 1, 1]


class Saving(nn.Module):
    """Sets hooks for what is saved in the middle; `around` says which."""

    def __init__(self, around: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out, self.around = nn.Linear(4, 4), nn.Linear(4, 4), around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        with self.around():
            h = torch.exp(h)
        return self.out(h)


def tripled() -> Any:
    """What it does to a gradient shows whether it ran."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: 3 * tensor)


@pytest.mark.parametrize("around", [tripled, save_on_cpu])
def test_hooks_for_saved_tensors_in_forward(around: Callable[[], Any]) -> None:
    model, twin = Saving(around), Saving(around)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for _ in range(2):
        compiled(X).sum().backward()
        twin(X).sum().backward()
    assert compiled.execution != "as one graph"
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        close(ours.grad, theirs.grad)
    with torch.no_grad():
        assert amp.explain(model, (X,)).casts  # without a backward nothing is lost
    with pytest.raises(amp.CaptureError, match=r"test_hooks\.py:\d+: forward sets hooks for saved tensors"):
        amp.explain(model, (X,))


SEEN: list[float] = []


def hooked_loss(kind: str) -> Callable[..., Any]:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if kind == "tensor":
            y.register_hook(lambda gradient: 2 * gradient)
        if kind == "node":
            y.grad_fn.register_prehook(lambda outputs: tuple(2 * one for one in outputs))
        if kind == "several":
            register_multi_grad_hook([y], lambda gradients: SEEN.append(gradients[0].sum().item()))
        return y.sum()

    return loss_fn


@pytest.mark.parametrize("kind", ["tensor", "node", "several"])
def test_hooks_in_the_loss_of_a_step_run(kind: str) -> None:
    model, twin = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, twin))
    loss_fn = hooked_loss(kind)
    step = amp.training_step(model, loss_fn, ours, dtype="bf16", backend="eager")
    SEEN.clear()
    for _ in range(2):
        step(X)
        theirs.zero_grad()
        loss_fn(twin, X).backward()
        theirs.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        close(mine, other)
    assert ([12.0] * 4 if kind == "several" else []) == SEEN


@pytest.mark.parametrize("first", [False, True])
def test_hooks_for_saved_tensors_around_a_step(first: bool) -> None:
    """In whichever call they stand around it."""
    model, twin = (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    ours, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, twin))
    step = amp.training_step(model, lambda m, x: m(x).sum(), ours, dtype="bf16", backend="eager")
    for around in (first, not first):
        theirs.zero_grad()
        with tripled() if around else torch.enable_grad():
            step(X)
            twin(X).sum().backward()
        theirs.step()
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            close(mine, other)
    assert "hooks for saved tensors" in step.execution


def test_hooks_for_saved_tensors_around_a_call() -> None:
    """Autograd stands outside of the graph: they run."""
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), []
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    for _ in range(2):
        with saved_tensors_hooks(lambda tensor: seen.append(1) or tensor, lambda tensor: tensor):
            compiled(X).sum().backward()
    assert seen and compiled.execution == "as one graph"
