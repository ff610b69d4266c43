"""What the tests of a CUDA device use, as far as it can be tried without one."""

from __future__ import annotations

import torch
from training_gpu import one_order_of_sums


def test_sums_have_one_order_where_torchs_test_modules_were_imported(monkeypatch):
    """These forbid to set flags, for the whole process: on a GPU nothing else would then run."""
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    cudnn = torch.backends.cudnn
    before = cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32
    with one_order_of_sums():
        assert cudnn.deterministic and (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32) == before
    assert not cudnn.deterministic and (cudnn.enabled, cudnn.benchmark, cudnn.allow_tf32) == before
