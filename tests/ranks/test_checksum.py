"""Checksums of tensors: every bit and every place counts, and nothing else."""

import pytest
import torch

from amp_compiler.ranks.checksum import _CHUNK, checksums

TYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64,
    torch.uint8, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip

TURNED = [*range(63, -1, -1)], [1, 0, *range(2, 64)]


def values(dtype, count=64):
    result = torch.randn(count, generator=torch.Generator().manual_seed(0)) * 100
    result[:2] = torch.tensor([-50.0, 20.0])  # which differ in every type
    return (result > 0) if dtype is torch.bool else result.abs().to(dtype) if dtype is torch.uint8 else result.to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_bit_and_every_place_counts(dtype):
    inputs = values(dtype)
    raw = inputs.view(torch.uint8)
    others = [raw.view(64, -1)[order].view(-1).view(dtype) for order in TURNED]
    for place in (0, 1, len(raw) // 2, len(raw) - 1):
        for bit in (0,) if dtype is torch.bool else (0, 7):
            changed = raw.clone()
            changed[place] ^= 1 << bit
            others.append(changed.view(dtype))
    sums = checksums([inputs, inputs.clone(), *others])
    assert sums[0] == sums[1] and len({*sums}) == len(others) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_a_plain_sum_misses_is_seen(dtype):
    inputs = values(dtype)
    signs = inputs.clone()
    signs[[3, 9]] *= -1
    swapped = inputs[[1, 0, *range(2, 64)]]
    mirrored = swapped[[*range(62), 63, 62]]
    assert len({*checksums([inputs, signs, swapped, mirrored, -inputs])}) == 5


def test_chunks_and_strides_are_one_row_of_elements():
    long = values(torch.float32, 2 * _CHUNK + 3)
    swapped = long.clone()
    swapped[[5, _CHUNK + 5]] = long[[_CHUNK + 5, 5]]
    exchanged = torch.cat([long[_CHUNK : 2 * _CHUNK], long[:_CHUNK], long[2 * _CHUNK :]])
    assert len({*checksums([long, swapped, exchanged])}) == 3
    square = long[:64].view(8, 8)
    image = long[:96].view(2, 3, 4, 4)
    conjugate = torch.complex(long[:4], long[4:8])
    for one in (square.t(), image.to(memory_format=torch.channels_last), long[:64:2], conjugate.conj()):
        strided, plain = checksums([one, one.clone(memory_format=torch.contiguous_format).resolve_conj()])
        assert strided == plain
    assert checksums([]) == [] and checksums([torch.zeros(0), torch.zeros(())])[1] == checksums([torch.zeros(1)])[0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_gives_the_same(dtype):
    inputs = values(dtype, 2 * _CHUNK + 3)
    assert checksums([inputs.cuda()]) == checksums([inputs])
