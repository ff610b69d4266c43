"""Patches of images and the way back for gradients, against torch's `unfold`, and its `fold` in FP64.

Elements that are moved are compared to the bit. Sums are as well where FP32 has them exactly: bf16 integers up to 8.
"""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_compiler.errors import LoweringError
from amp_compiler.ops import images as operators
from amp_compiler.ops.images import fold_patches, patches

BF16 = torch.bfloat16
QUICK = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # all examples of a test take one path
)  # fmt: skip
PLAIN = ((2, 3, 5, 6), [3, 2], [2, 1], [1, 0], [1, 2])  # sizes, kernel, stride, padding, dilation: all of them differ
CASES = {
    "all different": PLAIN,
    "one pixel": ((1, 1, 1, 1), [1, 1], [1, 1], [0, 0], [1, 1]),
    "pixels in no patch": ((1, 2, 7, 8), [1, 2], [3, 4], [0, 0], [1, 1]),
    "patches in the padding alone": ((2, 2, 1, 2), [2, 2], [1, 1], [4, 3], [1, 1]),
    "wide and low": ((3, 5, 1, 40), [1, 5], [1, 2], [0, 6], [1, 3]),
    "many channels": ((2, 130, 3, 3), [3, 3], [1, 1], [1, 1], [1, 1]),
}


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def path(request, monkeypatch):
    """Runs the test with the loops and without."""
    if not request.param:
        monkeypatch.setattr(operators, "can_run", lambda tensor: False)
    elif not operators.can_run(torch.ones(1, dtype=BF16)):
        pytest.skip("no C++ compiler on this machine")


def named(test):
    """A property is tried on the named cases too."""
    for geometry in CASES.values():
        test = example(geometry=geometry, lay=torch.Tensor.contiguous)(test)
    return test


@st.composite
def geometries(draw):
    """Sizes of images with a kernel, stride, padding and dilation by which there is at least one patch."""
    sizes = tuple(draw(st.integers(1, most)) for most in (3, 4, 7, 7))
    kernel, stride, dilation = ([draw(st.integers(1, 3)) for _ in range(2)] for _ in range(3))
    padding = [draw(st.integers(0, 3)) for _ in range(2)]
    reach = [dilation[dim] * (kernel[dim] - 1) + 1 for dim in (0, 1)]
    assume(all(sizes[2 + dim] + 2 * padding[dim] >= reach[dim] for dim in (0, 1)))
    return sizes, kernel, stride, padding, dilation


@st.composite
def layouts(draw):
    """How images lie in memory: contiguous, channels last, or every `step`-th element of any order of dimensions."""
    kind = draw(st.sampled_from(["contiguous", "channels last", "one image for all", "sliced"]))
    order, steps = draw(st.permutations(range(4))), [draw(st.integers(1, 3)) for _ in range(4)]

    def lay(values):
        if kind == "contiguous":
            return values.contiguous()
        if kind == "channels last":
            return values.contiguous(memory_format=torch.channels_last)
        if kind == "one image for all":
            return values[:1].expand_as(values)
        stored = torch.full([values.shape[dim] * steps[dim] + 1 for dim in order], torch.nan, dtype=values.dtype)
        lying = stored.permute([order.index(dim) for dim in range(4)])
        lying = lying[tuple(slice(1, None, step) for step in steps)]
        return lying.copy_(values)

    return lay


def images(sizes):
    return torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(BF16)


def rows_like(geometry, exact=False):
    """A gradient of the patches; of integers with `exact`."""
    shape = unfolded(images(geometry[0]), *geometry[1:]).shape
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(-8, 9, shape, generator=generator) if exact else torch.randn(shape, generator=generator)
    return values.to(BF16)


def unfolded(x, kernel, stride, padding, dilation):
    result = F.unfold(x.double(), kernel, dilation, padding, stride)  # [batch, elements, places]
    return torch.cat([one.t() for one in result]).to(x.dtype)


def folded(rows, sizes, kernel, stride, padding, dilation):
    """The sums in FP64."""
    split = torch.stack([one.t() for one in rows.double().chunk(sizes[0])])
    return F.fold(split, sizes[2:], kernel, dilation, padding, stride)


def assert_same_bits(mine, theirs):
    assert mine.dtype == theirs.dtype == BF16
    assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


def assert_folds(rows, geometry):
    """One rounding to bf16 of an FP32 sum of at most as many terms as a patch has elements."""
    sizes, kernel = geometry[0], geometry[1]
    result, exact = fold_patches(rows, list(sizes), *geometry[1:]), folded(rows, *geometry)
    summation = kernel[0] * kernel[1] * 2.0**-24 * folded(rows.abs(), *geometry)
    assert result.dtype == BF16 and result.shape == sizes
    assert bool(((result.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1.01 * summation).all())


@QUICK
@named
@given(geometry=geometries(), lay=layouts())
def test_patches_are_those_of_unfold_and_gradients_the_sums_in_fp32_rounded_once(path, geometry, lay):
    x, rows = lay(images(geometry[0])), rows_like(geometry, exact=True)
    assert_same_bits(patches(x, *geometry[1:]), unfolded(x, *geometry[1:]))
    assert_folds(rows_like(geometry), geometry)
    expected = folded(rows, *geometry).to(BF16)
    assert torch.equal(fold_patches(rows, list(geometry[0]), *geometry[1:]), expected)


@QUICK
@given(geometry=geometries(), lay=layouts())
def test_autograd_folds(geometry, lay):
    x, rows = lay(images(geometry[0])).requires_grad_(), rows_like(geometry)
    (result,) = torch.autograd.grad(patches(x, *geometry[1:]), x, rows)
    assert_same_bits(result, fold_patches(rows, list(geometry[0]), *geometry[1:]))


@pytest.mark.parametrize("lie", ["columns", "gaps", "one for all"])
def test_a_gradient_may_lie_in_memory_as_it_likes(path, lie):
    rows = rows_like(PLAIN)
    strided = {
        "columns": rows.t().contiguous().t(),
        "gaps": torch.stack([rows, rows * torch.nan], dim=2)[..., 0],
        "one for all": rows[:1, :1].expand_as(rows),
    }[lie]
    assert not strided.is_contiguous()
    settings_ = (list(PLAIN[0]), *PLAIN[1:])
    assert_same_bits(fold_patches(strided, *settings_), fold_patches(strided.contiguous(), *settings_))


def test_infinities_and_nan_reach_the_pixels_of_their_patch_alone(path):
    sizes, *options = CASES["many channels"]
    rows = torch.zeros(18, 130 * 9, dtype=BF16)
    rows[0, 5 * 9 + 4], rows[4, 7 * 9 + 4] = torch.inf, torch.nan  # the middle of the patches of (0, 0) and (1, 1)
    result = fold_patches(rows, list(sizes), *options)
    assert result[0, 5, 0, 0] == torch.inf and bool(result[0, 7, 1, 1].isnan())
    assert int((result != 0).sum()) == 2


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_bits(threads):
    before, geometry = torch.get_num_threads(), CASES["many channels"]
    rows, x = rows_like(geometry), images(geometry[0])
    expected = patches(x, *geometry[1:]), fold_patches(rows, list(geometry[0]), *geometry[1:])
    torch.set_num_threads(threads)
    try:
        assert_same_bits(patches(x, *geometry[1:]), expected[0])
        assert_same_bits(fold_patches(rows, list(geometry[0]), *geometry[1:]), expected[1])
    finally:
        torch.set_num_threads(before)


@QUICK
@given(geometry=geometries(), lay=layouts())
def test_fake_results_are_like_the_real_ones(path, geometry, lay):
    x, rows = lay(images(geometry[0])), rows_like(geometry)
    real = patches(x, *geometry[1:]), fold_patches(rows, list(geometry[0]), *geometry[1:])
    with FakeTensorMode() as mode:
        fakes = mode.from_tensor(x), mode.from_tensor(rows)
        fake = patches(fakes[0], *geometry[1:]), fold_patches(fakes[1], list(geometry[0]), *geometry[1:])
    for result, expected in zip(fake, real, strict=True):
        assert (result.shape, result.stride(), result.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert real[1].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", CASES)
def test_opcheck(case):
    """Of what both ways to compute share: schema, gradient, fake results."""
    sizes, *options = CASES[case]
    operators = torch.ops.amp_compiler
    for x in (images(sizes), images(sizes).contiguous(memory_format=torch.channels_last)):
        torch.library.opcheck(operators.patches.default, (x.requires_grad_(), *options))
    torch.library.opcheck(operators.fold_patches.default, (rows_like(CASES[case]), list(sizes), *options))


def test_no_images_have_no_patches(path):
    sizes, *options = PLAIN
    x = torch.empty(0, *sizes[1:], dtype=BF16, requires_grad=True)
    built = patches(x, *options)
    assert built.shape == (0, 18)
    (result,) = torch.autograd.grad(built, x, torch.ones_like(built))
    assert result.shape == x.shape and result.dtype == BF16


def test_gradients_of_another_shape_are_refused(path):
    gradient = torch.ones(2, 9, dtype=torch.bfloat16)
    with pytest.raises(LoweringError, match=r"have the shape \[81, 72\], not \[2, 9\]"):
        fold_patches(gradient, [1, 8, 9, 9], [3, 3], [1, 1], [1, 1], [1, 1])


def test_a_kernel_larger_than_the_image_is_refused():
    with pytest.raises(LoweringError, match="does not fit"):
        patches(torch.ones(1, 1, 2, 2, dtype=torch.bfloat16), [3, 3], [1, 1], [0, 0], [1, 1])
