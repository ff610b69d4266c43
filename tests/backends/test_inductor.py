"""What the Inductor backend asks of Inductor."""

from __future__ import annotations

import pytest

from amp_compiler.backends.inductor import _CONTRACTION, _NO_SLP, _options
from amp_compiler.fx import torch_private
from amp_compiler.fx.text import parse_fx


@pytest.mark.parametrize(("kind", "guarded"), [("bf16", True), ("fp16", True), ("fp32", False), ("bf16 cuda", False)])
def test_16_bit_code_for_a_cpu_is_compiled_without_the_slp_vectorizer(kind, guarded):
    """GCC 12 makes wrong code with it where tensors of two layouts meet; what the user asks of the compiler stays."""
    dtype, _, device = kind.partition(" ")
    shape = f"{dtype}[2, 2]" + (f"@{device}" if device else "")
    graph_module = parse_fx(f"in x: {shape}\nneg: {shape} = aten.neg.default(x)\nreturn neg")
    options = _options(graph_module, round_exactly=False)
    if guarded:
        assert options[_CONTRACTION].split() == [torch_private.inductor_option(_CONTRACTION), _NO_SLP]
    else:
        assert _CONTRACTION not in options


def test_reads_stay_behind_what_makes_them():
    """torch 2.13's reordering moves a read of a max-pool's gradient before the scatter (tests/cli/test_demo.py)."""
    graph_module = parse_fx("in x: bf16[2]\nneg: bf16[2] = aten.neg.default(x)\nreturn neg")
    for exactly in (False, True):
        assert _options(graph_module, exactly)["reorder_for_peak_memory"] is False


def test_every_option_is_one_of_this_torch():
    """One that is not known would be left out without a word."""
    graph_module = parse_fx("in x: bf16[2]\nneg: bf16[2] = aten.neg.default(x)\nreturn neg")
    assert all(torch_private.inductor_option(name) is not None for name in _options(graph_module, round_exactly=True))
