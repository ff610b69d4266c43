"""Training steps of a small CNN on a CPU whose convolutions read one memory layout, against the same steps run eagerly.

GCC 12 and its SLP vectorizer make NaN of such a step (`_NO_SLP` in `backends/inductor.py`): tiles of 16-bit numbers,
which Inductor transposes where layouts meet, are read before they are written.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import amp_compiler as amp
from amp_compiler.cli.demo import SmallCnn

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(3, 32, 1, 8, 8, generator=GENERATOR)
Y = torch.randint(0, 10, (3, 32), generator=GENERATOR)
# A pixel or a pooling that rounds to the other side of another moves a gradient as a whole: up to 0.055 was measured.
# BF16 itself is 0.1 to 0.2 away from FP32 here.
NEAR = 6e-2
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def loss_and_maps(model, x, y):
    """Also the feature maps of the first block, and what the pooling makes of the last."""
    first = model.features[:3](x)
    pooled = model.features[3:-1](first)
    return F.cross_entropy(model.head(pooled.flatten(1)), y), (first, pooled)


def make(backend, layout, loss_of=loss_and_maps):
    torch.manual_seed(0)
    model = SmallCnn(batch_norm=True, width=32).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # the weights stay alike
    return amp.training_step(model, loss_of, optimizer, dtype="bf16", backend=backend)


def relative(found, exact):
    """Of the L2 norms."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# tests/backends/test_inductor.py holds the option of the compiler, test_training_convolutions.py a result's layout.
@pytest.fixture(scope="module", params=[pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS])
def steps(request):
    """A compiled step and an eager one."""
    return [make(backend, LAYOUTS[request.param]) for backend in ("inductor", "eager")]


@pytest.mark.compiles
def test_gradients_are_those_of_the_eager_backend(steps):
    mine, theirs = steps
    for x, y in zip(X, Y, strict=True):
        losses = [step(x, y)[0] for step in steps]
        for (name, gradient), expected in zip(mine.gradients().items(), theirs.gradients().values(), strict=True):
            assert bool(gradient.isfinite().all()), name
            assert relative(gradient, expected) < NEAR, name
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-2)


@pytest.mark.compiles
def test_results_keep_their_layouts(steps):
    found, expected = (step(X[0], Y[0])[1] for step in steps)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dim() == 4 and mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape and mine.stride() == theirs.stride()
        assert relative(mine, theirs) < 2e-2


def loss_of_both(model, x, y):
    """The same images through the same weights, twice."""
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)


def test_convolutions_may_share_images_and_weights(compiler):
    mine, theirs = (make(backend, torch.contiguous_format, loss_of_both) for backend in ("inductor", "eager"))
    assert float(mine(X[0], Y[0])) == pytest.approx(float(theirs(X[0], Y[0])), rel=1e-2)
    for (name, gradient), expected in zip(mine.gradients().items(), theirs.gradients().values(), strict=True):
        assert relative(gradient, expected) < NEAR, name
