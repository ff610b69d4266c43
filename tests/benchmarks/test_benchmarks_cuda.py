"""Benchmarks on a GPU, on stand-ins: sizes, bursts, groups of variants, what is left out, kernels by class."""

import contextlib
import json

import pytest
import torch

AUTOCAST, COMPILED, OURS = "autocast", "torch.compile", "amp_compiler"
MODES = [COMPILED, f"{COMPILED} reduce-overhead", f"{COMPILED} max-autotune"]


def test_masks_of_transformers_are_not_read_for_it(bench):
    cases, size = bench["cases"], bench["models"].CUDA_SIZES["bert"]
    rows = size.batch * size.tokens
    blocks = size.layers * (2 * rows * (4 + 2 * size.widening) * size.hidden**2 + 4 * rows * size.tokens * size.hidden)
    head = 2 * rows * size.hidden * (size.hidden + size.vocab)
    assert cases.matmul_flops("bert", "gemm", backward=False, device="cuda") == blocks + head


@pytest.fixture
def on_cuda(bench, monkeypatch):
    """The benchmark of training steps above a machine with a stand-in for a GPU; what processes did, in order."""
    log = []

    class Process(contextlib.AbstractContextManager):
        """The process of a variant: one of them is too slow, and each later burst takes 1 ms more."""

        def __init__(self, make, arguments, device, prepare, cache, settings=None, wait=True):
            assert device == "cuda" and (wait or (prepare is None) == (arguments[0] == AUTOCAST))
            self.name, self.seconds = arguments[0], 0.0
            log.append(("begin", self.name))

        def __exit__(self, *error):
            log.append(("end", self.name))

        def wait(self, until):
            if self.name.endswith("max-autotune"):
                raise SystemExit(f"{self.name}: its first call was not done in time")
            return 1.0

        def memory(self):
            return bench["processes"].Memory(2, 1)

        def burst(self, steps):
            log.append((self.name, steps))
            self.seconds += 1.0
            return self.seconds

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a stand-in")
    monkeypatch.setattr(bench["comparison"], "Process", Process)
    return log


def test_training_steps_on_a_gpu(bench, on_cuda, tmp_path, capsys):
    path = tmp_path / "r.json"
    options = ["--device", "cuda", "--models", bench["cases"].TINY, "--together", "2", "--json", str(path)]
    assert bench["train_step"].TRAINING.main(options) == 1  # one was too slow
    assert [name for what, name in on_cuda if what == "begin"] == ["bf16", OURS, *MODES[:2], AUTOCAST, MODES[2]]
    assert (OURS, 12) in on_cuda
    result, printed = json.loads(path.read_text(encoding="utf-8")), capsys.readouterr().out
    assert result["settings"]["together"] == 2 and result["versions"]["triton"] and result["gpu"] == "a stand-in"
    assert [(row["bound"], row["variant"]) for row in result["rows"]] == [
        ("gemm", variant) for variant in (OURS, *MODES[:2], AUTOCAST)
    ]
    assert all(row["peak_bytes"] == 3 and "warm_call_s" not in row for row in result["rows"])
    assert f"{MODES[2]}: its first call was not done in time" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 130
