"""What the Inductor backend asks of Inductor."""

from pathlib import Path

import pytest
import torch
from fx_reader import parse_fx
from torch.fx.experimental.proxy_tensor import make_fx

import amp_compiler as amp
from amp_compiler.backends import inductor
from amp_compiler.backends.inductor import _CONTRACTION, _LAST_PASS, _NO_SLP, _options, compile_graph
from amp_compiler.fx.torch_private import inductor as torch_inductor
from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.base import LatePass
from amp_compiler.passes.pipeline import LATE


@pytest.mark.parametrize(("kind", "guarded"), [("bf16", True), ("fp16", True), ("fp32", False), ("bf16 cuda", False)])
def test_16_bit_code_for_a_cpu_is_compiled_without_the_slp_vectorizer(kind, guarded):
    """GCC 12 makes wrong code with it where tensors of two layouts meet; what the user asks of the compiler stays."""
    dtype, _, device = kind.partition(" ")
    shape = f"{dtype}[2, 2]" + (f"@{device}" if device else "")
    graph_module = parse_fx(f"in x: {shape}\nneg: {shape} = aten.neg.default(x)\nreturn neg")
    options = _options(graph_module, round_exactly=False)
    if guarded:
        assert options[_CONTRACTION].split() == [torch_inductor.inductor_option(_CONTRACTION), _NO_SLP]
    else:
        assert _CONTRACTION not in options


@pytest.mark.compiles
@pytest.mark.parametrize(
    "write",
    [
        lambda zeros, places, y: torch.ops.aten.index_put(zeros, [None, places], y, True),
        pytest.param(lambda zeros, places, y: zeros.index_add(1, places, y), marks=pytest.mark.slow),
        pytest.param(lambda zeros, places, y: zeros.scatter_add(1, places.expand(16, 32), y), marks=pytest.mark.slow),
    ],
)
def test_reads_stay_behind_what_makes_them(write):
    """torch 2.13 loses what was written in place where it fuses loops of other ranges, and where it reorders them."""

    def call(x, places, weight, t):
        low = (t @ weight).half()
        gradient = (write(torch.zeros_like(x), places, low) * 3 + low * 2).float()
        return t.t() @ (x * 2 + (x * 3)[:, places]).float(), gradient * (1 - x.float() * x.float())

    inputs = (torch.rand(16, 32).half(), torch.randperm(32), torch.rand(6, 32), torch.rand(16, 6))
    graph_module = make_fx(call)(*inputs)
    torch.testing.assert_close(compile_graph(graph_module, inputs, True)(*inputs), call(*inputs), rtol=1e-2, atol=1e-2)
    assert _options(graph_module, True)["reorder_for_peak_memory"] is False


@pytest.mark.parametrize("place", ["", "@cuda"])
def test_every_option_is_one_of_this_torch(place):
    """One that is not known would be left out without a word."""
    graph_module = parse_fx(f"in x: bf16[2]{place}\nneg: bf16[2]{place} = aten.neg.default(x)\nreturn neg")
    assert all(hasattr(torch._inductor.config, name) for name in _options(graph_module, round_exactly=True))


@pytest.fixture
def late(monkeypatch):
    """Late passes run with their contract checked, on what Inductor has really opened; those that changed something."""
    theirs, changed = torch_inductor.inductor_graph_pass, []

    def checked(one):
        def run(graph):
            if one.__self__(graph.owning_module).modified:
                changed.append(one.__self__.name)

        return run if isinstance(getattr(one, "__self__", None), LatePass) else one

    def graph_pass(identity, work, before):
        return theirs(identity, [*map(checked, work)], before)

    monkeypatch.setattr(torch_inductor, "inductor_graph_pass", graph_pass)
    return changed


POOLS = {
    "apart": [
        {"kernel_size": 2},
        {"kernel_size": (3, 2), "stride": 3, "padding": 1, "ceil_mode": True},
    ],
    "further apart": [{"kernel_size": 2, "stride": 3}],
    "overlapping": [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (3, 2), "stride": 2, "ceil_mode": True},
        {"kernel_size": 2, "dilation": 2},
    ],
}


@pytest.mark.compiles
@pytest.mark.parametrize(
    "windows", ["apart", *(pytest.param(name, marks=pytest.mark.slow) for name in ("further apart", "overlapping"))]
)
def test_the_gradient_of_a_max_pool_is_gathered_where_its_windows_lie_apart(windows):
    """In one loop, without a scatter into FP32 and its places in 64 bits; what overlaps is left to Inductor."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 9, 11).to(torch.bfloat16),)

    def gradients(*inputs):
        result = []
        for x in inputs:
            for options in POOLS[windows]:
                leaf = x.detach().requires_grad_()
                with torch.enable_grad():
                    y = torch.nn.functional.max_pool2d(leaf, **options)
                result += torch.autograd.grad(y, leaf, torch.cos(y.detach()))
        return tuple(result)

    traced = make_fx(gradients, tracing_mode="fake")(*inputs)
    with torch._inductor.config.patch({"fx_graph_cache": False, "cpp.threads": 2}):  # one thread adds without them
        run, codes = run_and_get_code(compile_graph, traced, inputs)
    results = run(*inputs)
    assert codes and ("scatter" in "".join(codes) or "atomic_add" in "".join(codes)) is (windows == "overlapping")
    for mine, theirs in zip(results, gradients(*inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=1e-6)  # ATen rounds each addition, the loop the sum


@pytest.mark.compiles
def test_an_image_is_kept_once_for_a_convolution_and_its_gradient(late):
    """Inductor would copy what it made in the traced layout: once for each of the two."""
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    inputs = (torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8, 8, 3, 3))

    def gradients(image, *weights):
        weights = [weight.detach().requires_grad_() for weight in weights]
        with torch.enable_grad():
            hidden = torch.relu(torch.conv2d(image, weights[0], padding=1))
            result = torch.conv2d(hidden, weights[1], padding=1)
        return torch.autograd.grad(result, weights, torch.cos(result.detach()))

    traced = make_fx(gradients, tracing_mode="fake")(*inputs)
    with torch._inductor.config.patch(fx_graph_cache=False):
        run, codes = run_and_get_code(compile_graph, traced, inputs)
    results = run(*inputs)
    # the first convolution's result becomes the hidden image in place, and the second's becomes its gradient
    assert "".join(codes).count("empty_strided_cpu((2, 8, 6, 6)") == 0 and late == ["keep_images_once"]
    torch.testing.assert_close(list(results), list(gradients(*inputs)), rtol=1e-5, atol=1e-4)


@pytest.mark.compiles
@pytest.mark.parametrize("fails", [1, 2])
def test_what_cannot_be_compiled_is_an_error_of_ours_in_the_first_backward_too(monkeypatch, fails):
    """The backward is compiled when it first runs: what is raised then goes through autograd to the user."""
    theirs, calls = torch._inductor.compile_fx.compile_fx_inner, []

    def breaks(*args, **kwargs):
        calls.append(None)
        if len(calls) == fails:
            raise ImportError("libgraph.so: file too short")
        return theirs(*args, **kwargs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", breaks)
    compiled = amp.compile(torch.nn.Linear(5, 3), dtype="bf16")
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, pytest.raises(amp.LoweringError, match=r"cannot compile the graph: ImportError.*file too short"):
        compiled(torch.ones(7, 5)).square().sum().backward()
    assert len(calls) == fails


def test_what_was_compiled_for_another_processor_is_not_taken(monkeypatch):
    """Of a folder of torch's that machines share: its key leaves out how many numbers a vector has."""
    graph_module = torch.fx.symbolic_trace(torch.nn.ReLU())
    keys = []
    for name in ("AVX512", "AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda name=name: name)
        keys.append(_options(graph_module, False)[_LAST_PASS].uuid())
    assert keys[0] == keys[2] != keys[1]


def identity(text):
    return _options(parse_fx(text), False)[_LAST_PASS].uuid()


CONVOLUTION = """in x: bf16[2, 4, 8, 8]
in w: bf16[4, 4, 3, 3]
made: bf16[2, 4, 6, 6] = aten.convolution.default(x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
return made
"""
ATTENTION = """in x: bf16[2, 4, 8, 8]
made: bf16[2, 4, 8, 8] = aten.scaled_dot_product_attention.default(x, x, x)
return made
"""


@pytest.mark.parametrize(
    ("text", "late"),
    [
        (ATTENTION, "attention_backward"),
        (CONVOLUTION, "keep_images_once"),
        ("in x: bf16[2]\nreturn x", None),
    ],
    ids=["attention", "convolution", "nothing"],
)
def test_late_passes_run_where_a_graph_has_something_for_them(text, late):
    known = ("attention_backward", "keep_images_once")
    result = [name for name in known if name in str(identity(text))]
    assert result == ([] if late is None else [late])


def test_late_passes_are_made_to_run_inside_of_a_compiler():
    assert all(issubclass(find_pass(name), LatePass) for name in LATE.names)
    assert set(LATE.names) == {name for name in PASSES if issubclass(find_pass(name), LatePass)}


@pytest.mark.parametrize("changed", ["backends/inductor.py", *(f"device/{name}.py" for name in LATE.names)])
def test_what_another_version_has_compiled_is_not_taken(monkeypatch, changed):
    """Whatever graph: torch's own key knows nothing of the code of ours that changes graphs inside of it."""
    text, theirs = "in x: bf16[2]\nreturn x", Path.read_bytes
    before = identity(text)
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: theirs(path) + b"#" * (str(path).replace("\\", "/").endswith(changed))
    )
    for cached in (inductor._identity, inductor.sources):
        cached.cache_clear()
    try:
        assert identity(text) != before
    finally:
        monkeypatch.undo()
        for cached in (inductor._identity, inductor.sources):
            cached.cache_clear()
    assert identity(text) == before


def test_what_is_made_anew_for_the_backward_is_in_the_name_of_a_compiled_graph():
    """Torch's own key has the code of a graph alone, without what is marked in it."""
    text = "in x: fp16[2]\nwide: fp32[2] = aten.to.dtype(x, torch.float32){mark}\nreturn wide"
    assert identity(text.format(mark="")) != identity(text.format(mark="  # recomputed"))
