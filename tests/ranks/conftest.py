"""The processes that the tests of several ranks share: each number of them is started once."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from rank_harness import RankProcesses


def _running(size: int) -> Iterator[RankProcesses]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this torch has no gloo")
    result = RankProcesses(size)
    yield result
    result.close()


@pytest.fixture(scope="session")
def two() -> Iterator[RankProcesses]:
    """What each rank of two returned, by scenario."""
    yield from _running(2)


@pytest.fixture(scope="session")
def four() -> Iterator[RankProcesses]:
    """What each rank of four returned, by scenario."""
    yield from _running(4)
