"""`mode=`: what a compiler tries before it settles for a kernel."""

import pytest
import torch
from torch import nn
from toys import mlp, squares

import amp_compiler as amp
from amp_compiler.backends import BACKENDS, inductor
from amp_compiler.errors import AmpError
from amp_compiler.fx.torch_private import inductor as torch_inductor

TUNED = {"max_autotune": True, "coordinate_descent_tuning": True}


def step_of(model, **options):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return amp.training_step(model, squares, optimizer, **{"dtype": "bf16", **options})


CALLS = {"step": step_of, "compile": lambda model, **options: amp.compile(model, dtype="bf16", **options)}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("mode", "hint"),
    [
        ("max-autotun", "did you mean 'max-autotune'?"),
        ("max-autotune-no-cudagraphs", "did you mean 'max-autotune'?"),
        ("fastest", "use one of 'default', 'max-autotune'"),
        ("reduce-overhead", "a training step is one CUDA graph in every mode"),
        (None, "use one of 'default', 'max-autotune'"),
    ],
)
def test_an_unknown_mode_is_an_error(call, mode, hint):
    with pytest.raises(AmpError, match="is not known to backend 'inductor'") as error:
        call(nn.Linear(4, 4), mode=mode)
    assert hint in str(error.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_backend_that_compiles_nothing_has_the_default_alone(call):
    assert call(nn.Linear(4, 4), mode="default", backend="eager") is not None
    with pytest.raises(AmpError, match=r"'max-autotune' is not known to backend 'eager'; .*backend='inductor'"):
        call(nn.Linear(4, 4), mode="max-autotune", backend="eager")


def test_the_names_are_those_of_this_torch():
    """An option that Inductor does not know would be left out without a word."""
    assert inductor._TUNING == TUNED
    assert all(torch_inductor.inductor_option(name) is not None for name in TUNED)
    theirs = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    assert theirs == TUNED, "what torch.compile's mode sets beside CUDA graphs"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", ["default", "max-autotune"])
def test_every_graph_is_compiled_in_the_mode(call, mode, monkeypatch):
    """The options are part of the key under which Inductor keeps what it compiled."""
    requested = []

    def compiled(graph_module, inputs, options, *rest):
        requested.append({name: options.get(name, False) for name in TUNED})
        return BACKENDS["eager"].build(graph_module, inputs, False)

    monkeypatch.setattr(torch_inductor, "compile_with_inductor", compiled)
    torch.manual_seed(0)
    result = CALLS[call](mlp(), mode=mode)
    result(torch.randn(6, 8), torch.randn(6, 4)) if call == "step" else result(torch.randn(6, 8))
    assert requested and all(one == (TUNED if mode != "default" else dict.fromkeys(TUNED, False)) for one in requested)


@pytest.mark.compiles
def test_torch_compile_takes_it_as_an_option():
    model = nn.Linear(8, 4)
    x = torch.randn(2, 8)
    expected = amp.compile(model, dtype="bf16", backend="eager")(x)
    options = {"dtype": "bf16", "mode": "max-autotune"}
    torch.testing.assert_close(torch.compile(model, backend="amp_compiler", options=options)(x), expected)
