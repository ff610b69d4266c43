"""Max-pooling with the places of its pixels in one byte, against ATen's in FP32, and its backward against FP64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pooling_cases import CASES, EACH, LAID_OUT, LAYOUTS, PATHS, TYPED, TYPES, images, on

ATEN, OWN = torch.ops.aten, torch.ops.amp_compiler
POOL, POOL_BACKWARD = ATEN.max_pool2d_with_indices.default, ATEN.max_pool2d_with_indices_backward.default


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def path(request):
    """Runs the test with the loops and without."""
    with on(request.param):
        yield


def indices_of(offsets, width, kernel, stride, padding, dilation):
    """What ATen notes, from the places in the windows."""
    down, across = (torch.arange(offsets.shape[2 + dim]) * stride[dim] - padding[dim] for dim in (0, 1))
    rows = down[:, None] + offsets.long() // kernel[1] * dilation[0]
    return rows * width + across + offsets.long() % kernel[1] * dilation[1]


def assert_pools(x, *arguments):
    """The same values, NaN included, from the same places."""
    largest, offsets = OWN.max_pool(x, *arguments)
    expected, indices = POOL(x.float(), *arguments)
    assert largest.dtype == x.dtype and offsets.dtype == torch.int8
    torch.testing.assert_close(largest.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices_of(offsets, x.shape[3], *arguments[:4]), indices)
    return offsets, indices


def assert_backward(x, offsets, indices, *arguments):
    """A sum in FP32 that is rounded once; exact for small integers."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randint(-8, 9, offsets.shape, generator=generator).to(x.dtype)
    usual = torch.randn(offsets.shape, generator=generator).to(x.dtype)
    for gradient, rtol, atol in ((exact, 0, 0), (usual, torch.finfo(x.dtype).eps, 1e-6)):
        for given_ in (gradient, gradient.contiguous(memory_format=torch.channels_last)):
            found = OWN.max_pool_backward(given_, offsets, list(x.shape), *arguments[:4])
            expected = POOL_BACKWARD(gradient.double(), x.double(), *arguments, indices)
            torch.testing.assert_close(found, expected.to(x.dtype), rtol=rtol, atol=atol)
            last = not offsets.is_contiguous()
            assert found.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@TYPED
@LAID_OUT
@EACH
@pytest.mark.parametrize("channels", [1, 3, 64, 70])
def test_results_and_gradients_are_those_of_aten(path, channels, case, layout, dtype):
    x = images((2, channels, 9, 8), dtype, layout)
    found = assert_pools(x, *CASES[case])
    assert_backward(x, *found, *CASES[case])


@st.composite
def geometries(draw):
    """Sizes of images and settings by which there is a window, and each has a pixel."""
    sizes = tuple(draw(st.integers(1, most)) for most in (3, 4, 9, 9))
    kernel, stride, dilation = ([draw(st.integers(1, 3)) for _ in range(2)] for _ in range(3))
    reach = [dilation[dim] * (kernel[dim] - 1) + 1 for dim in (0, 1)]
    padding = [draw(st.integers(0, kernel[dim] // 2)) for dim in (0, 1)]
    assume(all(sizes[2 + dim] + 2 * padding[dim] >= reach[dim] for dim in (0, 1)))
    assume(all(sizes[2 + dim] > (dilation[dim] - 1) * bool(padding[dim]) for dim in (0, 1)))
    return sizes, (kernel, stride, padding, dilation, draw(st.booleans()))


@PATHS
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(geometry=geometries(), dtype=st.sampled_from(list(TYPES)), layout=st.sampled_from(list(LAYOUTS)))
def test_any_small_images(native, geometry, dtype, layout):
    sizes, arguments = geometry
    x = images(sizes, TYPES[dtype], LAYOUTS[layout])
    with on(native):
        found = assert_pools(x, *arguments)
        assert_backward(x, *found, *arguments)


@pytest.mark.parametrize("lie", ["gaps", "one for all", "columns"])
def test_images_may_lie_in_memory_as_they_like(path, lie):
    x = images((2, 3, 9, 8))
    strided = {
        "gaps": torch.stack([x, x + 1], dim=4)[..., 0],
        "one for all": x[:1, :1].expand_as(x),
        "columns": x.transpose(2, 3).contiguous().transpose(2, 3),
    }[lie]
    assert not strided.is_contiguous()
    assert_pools(strided, *CASES["overlapping"])


def test_a_window_without_pixels_has_the_least_value_and_passes_nothing_on(path):
    """The two rows of a window lie above and below an image of one row."""
    arguments = ([2, 2], [1, 1], [1, 0], [2, 1], False)
    x = torch.zeros(1, 70, 1, 4)
    for _ in range(2):
        largest, offsets = OWN.max_pool(x, *arguments)
        assert torch.equal(largest, POOL(x, *arguments)[0]) and bool((largest == -torch.inf).all())
        assert not OWN.max_pool_backward(torch.ones(1, 70, 1, 3), offsets, [1, 70, 1, 4], *arguments[:4]).any()


@LAID_OUT
def test_results_keep_the_layout_of_the_images(path, layout):
    x = images((2, 5, 9, 8), layout=layout)
    for made in OWN.max_pool(x, *CASES["overlapping"]):
        assert made.is_contiguous(memory_format=layout) and not made[:, :2].is_contiguous()


@LAID_OUT
@EACH
def test_opcheck(path, case, layout):
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    for channels in (1, 3):
        x = images((2, channels, 9, 8), layout=layout)
        offsets = OWN.max_pool(x, *CASES[case])[1]
        torch.library.opcheck(OWN.max_pool.default, (x, *CASES[case]), **checks)
        given_ = (torch.ones(offsets.shape), offsets, list(x.shape), *CASES[case][:4])
        torch.library.opcheck(OWN.max_pool_backward.default, given_, **checks)


def test_no_images_have_no_pixels(path):
    largest, offsets = OWN.max_pool(torch.ones(0, 3, 4, 4), *CASES["halves"])
    assert largest.shape == offsets.shape == (0, 3, 2, 2)
    assert OWN.max_pool_backward(largest, offsets, [0, 3, 4, 4], *CASES["halves"][:4]).shape == (0, 3, 4, 4)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same(threads):
    before, x = torch.get_num_threads(), images((3, 70, 9, 8), torch.bfloat16, torch.channels_last)
    torch.set_num_threads(threads)
    try:
        found = assert_pools(x, *CASES["overlapping"])
        assert_backward(x, *found, *CASES["overlapping"])
    finally:
        torch.set_num_threads(before)
