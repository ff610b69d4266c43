"""Checksums on a CUDA device: those of the CPU."""

import pytest
from test_checksum import TYPES, values

from amp_compiler.ranks.checksum import _CHUNK, checksums


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_gpu_gives_the_same(dtype):
    inputs = values(dtype, 2 * _CHUNK + 3)
    assert checksums([inputs.cuda()]) == checksums([inputs])
