"""One compiled step of each kind, beside the same step run node by node."""

import pytest
import torch
from toys import TOYS, relative

import amp_compiler as amp

STEPS = 3
QUICK = ("accumulate",)  # gradients added up under a loss scale; for convolutions see tests/forward/test_compile.py
pytestmark = pytest.mark.compiles


def parameters_of(step):
    groups = [group for optimizer in step._optimizers for group in optimizer.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def trained(name, backend):
    """Losses, gradients of the first update, and how far the parameters moved."""
    toy = TOYS[name]
    step = toy.step(amp, backend=backend)
    parameters = parameters_of(step)
    before = [parameter.detach().clone() for parameter in parameters]
    torch.manual_seed(1)
    losses, gradients = [], None
    for _ in range(STEPS * toy.options.get("accumulate", 1)):
        losses.append(step(*toy.batch()))
        gradients = gradients or {key: value.clone() for key, value in step.gradients().items()}
    moved = [parameter.detach() - old for parameter, old in zip(parameters, before, strict=True)]
    return step, torch.stack(losses), gradients, torch.cat([one.flatten() for one in moved])


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in TOYS])
def test_a_compiled_step_trains_as_the_one_that_runs_node_by_node(name):
    """A sum in another order may round to the next number of BF16, and Adam makes whole steps of small gradients."""
    step, losses, gradients, moved = trained(name, "inductor")
    other, wanted_losses, wanted, wanted_moved = trained(name, "eager")
    torch.testing.assert_close(losses, wanted_losses, rtol=1e-2, atol=0)
    assert gradients.keys() == wanted.keys() and len(gradients) > 2
    for key, gradient in gradients.items():
        assert relative(gradient, wanted[key]) < 2e-2, key
    assert float(step.grad_norm) == pytest.approx(float(other.grad_norm), rel=2e-2)
    assert relative(moved, wanted_moved) < 0.1
    assert torch.equal(step.skipped_steps, other.skipped_steps) and torch.equal(step.loss_scale, other.loss_scale)
    assert int(step.skipped_steps) < STEPS
    assert step.plan == other.plan
