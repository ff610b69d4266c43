"""What is read of the machine code of the update's kernels; needs no GPU."""

import os

import pytest


def test_no_kernel_spills_and_more_than_half_of_a_multiprocessors_threads_run(bench):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has taken the compiler's place")
    check, adam = bench["update_kernels"].code_rows(["bf16"])
    assert check["spilled"] == adam["spilled"] == 0
    assert check["threads"] == 2048 and adam["threads"] >= 1152
    assert (check["bytes"], adam["bytes"]) == (2, 28)  # one pass for check and norm
    # Four elements of a thread at once: of 16-bit columns, the gradients and the copies, these are 8 bytes.
    assert check["loads of 16 bytes"] == 0 and check["loads of 8 bytes"] == 4
    assert adam["loads of 16 bytes"] == adam["stores of 16 bytes"] == 3 * 2 and adam["shared"] == 0
    assert adam["loads of 8 bytes"] == adam["stores of 8 bytes"] == 2
