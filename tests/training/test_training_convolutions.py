"""Training steps of a small CNN on a CPU whose convolutions became products, against the same steps run eagerly."""

import copy

import pytest
import torch
import torch.nn.functional as F
from test_training_products import assert_same_gradients_after, deferred
from torch import nn
from toys import classes, eager_step, relative

import amp_compiler as amp
from amp_compiler.ops.cpu import update as cpu_update

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, 5, 3, 8, 8, generator=GENERATOR)
Y = torch.randint(0, 10, (6, 5), generator=GENERATOR)
# 5 images of 4 x 4 pixels are too many for the 32 channels of the first; of the others, 5 of 2 x 2 are few.
CONVERTED = ["pointwise.weight", "few.weight"]
WEIGHTS = [*CONVERTED, "head.weight"]
STEPS = 5
LAYOUTS = [torch.contiguous_format, torch.channels_last]

pytestmark = pytest.mark.skipif(
    cpu_update.most_inner() < 20, reason="no C++ compiler, or a processor that does not multiply BF16 itself"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32)
        self.pointwise, self.few = nn.Conv2d(32, 64, 1, stride=2), nn.Conv2d(64, 96, 3, padding=1)
        self.head = nn.Linear(384, 10)

    def forward(self, x):
        return self.result_and_map(x)[0]

    def result_and_map(self, x):
        result = self.few(F.relu(self.pointwise(F.relu(self.norm(self.first(x))))))
        return self.head(F.relu(result).flatten(1)), result


def loss_and_map(model, x, y):
    result, built = model.result_and_map(x)
    return F.cross_entropy(result, y), built


def make(backend="inductor", layout=torch.contiguous_format, loss_of=classes, **options):
    model = Net().to(memory_format=layout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)  # small gradients move a weight by little
    return model, optimizer, eager_step(model, loss_of, optimizer, backend=backend, **options)


def whole(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients])


def assert_right_gradients(step, eager):
    """Of each parameter: a sum in another order may round to the next bf16 number, 2e-2 is five of them."""
    mine, theirs = step.gradients(), eager.gradients()
    assert list(mine) == list(theirs)
    for name, gradient in mine.items():
        assert gradient.dtype == torch.float32 and gradient.shape == theirs[name].shape
        assert relative(gradient, theirs[name]) < 2e-2, name
    assert float(step.grad_norm) == pytest.approx(float(whole(mine.values()).norm()), rel=1e-3)
    assert float(step.grad_norm) == pytest.approx(float(eager.grad_norm), rel=1e-2)


def assert_same_training(**options):
    """Run a compiled step and an eager one side by side; the compiled one's model, optimizer and step."""
    options["loss_of"] = loss_and_map
    (model, optimizer, step), (other, _, eager) = make(**options), make("eager", **options)
    initial = [parameter.detach().clone() for parameter in model.parameters()]
    for number in range(STEPS):
        (loss, mine), (expected, theirs) = step(X[number], Y[number]), eager(X[number], Y[number])
        assert float(loss) == pytest.approx(float(expected), rel=1e-2)
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
        if number == 0:
            assert_right_gradients(step, eager)
    moved, expected = (
        whole([now.detach() - before for now, before in zip(one.parameters(), initial, strict=True)])
        for one in (model, other)
    )
    assert float(expected.norm()) > 0.1 and relative(moved, expected) < 2e-2
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()), rtol=1e-2, atol=1e-3)
    assert deferred(eager) == []
    return model, optimizer, step


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_training_with_converted_convolutions_is_that_of_the_eager_backend_and_goes_on(layout, compiler):
    """States have the shapes and the layout of the weights, not those of the products."""
    model, optimizer, step = assert_same_training(layout=layout)
    assert {"pointwise.weight", "head.weight"} <= set(deferred(step))
    assert layout is torch.channels_last or deferred(step) == WEIGHTS
    gradients, initial = step.gradients(), Net().state_dict()
    assert float(step.grad_norm) == pytest.approx(float(whole(gradients.values()).norm()), rel=1e-3)
    for name, parameter in model.named_parameters():
        assert model.state_dict()[name].shape == initial[name].shape == gradients[name].shape
        for average in (optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")):
            assert average.shape == parameter.shape and average.stride() == parameter.stride() and bool(average.any())
    other, again, resumed = make(layout=layout, loss_of=loss_and_map)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(step.state_dict())
    assert torch.equal(step(X[STEPS], Y[STEPS])[0], resumed(X[STEPS], Y[STEPS])[0])
    assert deferred(resumed) == deferred(step) and torch.equal(step.grad_norm, resumed.grad_norm)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_weights_that_become_channels_last_after_the_first_step_are_trained_on(compiler):
    """Their gradients are then made whole, and count in the norm as before."""
    model, _, step = make()
    other, _, eager = make("eager")
    for number in range(3):
        if number == 1:
            model.to(memory_format=torch.channels_last)
        step(X[number], Y[number])
        eager(X[number], Y[number])
        whole_norm = float(whole(step.gradients().values()).norm())
        assert float(step.grad_norm) == pytest.approx(whole_norm, rel=1e-3)
        assert float(step.grad_norm) == pytest.approx(float(eager.grad_norm), rel=1e-2)
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=1e-2, atol=2e-3)


def hidden_and_loss(model, x):
    hidden = model[0](x.float())
    return model[1](hidden).square().mean(), hidden


def test_a_batch_or_a_result_that_the_user_may_write_into_is_no_factor(compiler):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 64, 1), nn.Conv2d(64, 96, 1))
    step = eager_step(model, hidden_and_loss, backend="inductor")
    batch = torch.randn(4, 32, 2, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    _, hidden = step(batch)
    for written in (batch, hidden):
        assert_same_gradients_after(written, step)


def gradients_of(model, run, x, y):
    F.cross_entropy(run(x).float(), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_users_own_backward_through_a_compiled_model_is_that_of_autocast(layout, compiler):
    """The same roundings, but for sums in another order that round to the next bf16 number: 2e-2 is five of them."""
    model, other = Net().to(memory_format=layout), Net().to(memory_format=layout)

    def autocast(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return other(x)

    compiled = amp.compile(model, dtype="bf16", backend="inductor")
    mine, theirs = gradients_of(model, compiled, X[0], Y[0]), gradients_of(other, autocast, X[0], Y[0])
    for name, gradient in mine.items():
        assert gradient.shape == theirs[name].shape and gradient.dtype == torch.float32
        assert relative(gradient, theirs[name]) < 2e-2, name
    targets = [str(node.target) for node in compiled.graph_module.graph.nodes]
    assert [targets.count(f"aten.{op}") for op in ("conv2d.default", "linear.default")] == [1, 3]
