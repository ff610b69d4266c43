"""The update operators on a CUDA device: the bits of the CPU reference, no synchronisation, CUDA graphs."""

import pytest
import torch
from update_arguments import BY_NAME, FLOATS, assert_same_bits, update_arguments

from amp_compiler.backends.cuda_capture import TorchGraphs
from amp_compiler.ops import exponents
from amp_compiler.ops.update import operators as fused_update
from amp_compiler.ops.update.rounding import Storage

assert fused_update and exponents
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
OPS = torch.ops.amp_compiler
SIZES = (0, 1, 2, 1023, 1024, 1025, 3079, 70001)


def move(value, device):
    if isinstance(value, (list, tuple)):
        return [move(item, device) for item in value]
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def arguments_of(name, mode=Storage.NEAREST, sizes=SIZES, skip=0.0, dtype=torch.bfloat16):
    """Arguments of an update on the CPU, with gradients of mixed types."""
    one = BY_NAME[name.partition("_")[0]]
    low = {"mode": Storage(mode), "weight": dtype} if name.endswith("_low") else {}
    return update_arguments(
        one, {"amsgrad": True, "nesterov": True, "decoupled": True}, sizes, more=0.1, skip=skip, **low
    )


CASES = [("adam_update", 0), ("sgd_update", 0)]
CASES += [(name, mode) for name in ("adam_update_low", "sgd_update_low") for mode in Storage]


@pytest.mark.parametrize(("name", "mode"), CASES)
@pytest.mark.parametrize("skip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_device_gives_the_bits_of_the_reference(name, mode, skip, dtype):
    on_cpu = arguments_of(name, mode, skip=skip, dtype=dtype)
    on_device = move(on_cpu, "cuda")
    for _ in range(2):
        getattr(OPS, name)(*on_cpu)
        getattr(OPS, name)(*on_device)
    assert_same_bits(on_cpu, on_device)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_grad_check(bad):
    grads = [torch.randn(size).to(FLOATS[i % 3]) for i, size in enumerate(SIZES)]
    if bad is not None:
        grads[4][-1] = bad
    expected = OPS.grad_check(grads, torch.tensor(0.25))
    got = OPS.grad_check(move(grads, "cuda"), torch.tensor(0.25, device="cuda"))
    torch.testing.assert_close(got[0].cpu(), expected[0], rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(got[1].cpu(), expected[1]) and torch.equal(got[2].cpu(), expected[2])


@pytest.mark.parametrize("blocks", [1, 1000, 5000, 20000])
def test_grad_check_of_many_blocks(blocks):
    """The last sum is one program, as wide as the blocks fill; 20,000 blocks are several rounds of the widest."""
    grad = torch.full((blocks * 4096,), 0.5, dtype=torch.bfloat16, device="cuda")
    grads = [grad, torch.zeros(3, device="cuda"), torch.full((2,), float("nan"), device="cuda").half()]
    one = torch.tensor(1.0, device="cuda")
    norm, nonfinite, flags = OPS.grad_check(grads[:2], one)
    assert float(norm) == pytest.approx(0.5 * grad.numel() ** 0.5, rel=1e-6) and float(nonfinite) == 0
    assert OPS.grad_check(grads, one)[2].tolist() == [0, 0, 1] and flags.tolist() == [0, 0]


@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_all_buffers_are_committed(skip):
    types = (torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float64)
    targets = [(torch.randn(size) * 9).to(dtype) for dtype in types for size in (*SIZES, ())]
    targets += [torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(12)[::2]]
    values = [(torch.randn(target.shape) * 9).to(target.dtype) for target in targets]
    on_device = move(targets, "cuda")
    OPS.commit(torch.tensor(skip), targets, values)
    OPS.commit(torch.tensor(skip, device="cuda"), on_device, move(values, "cuda"))
    assert_same_bits(targets, on_device)


def test_an_unaligned_tensor_among_aligned_ones():
    on_cpu = arguments_of("adam_update")
    on_device = move(on_cpu, "cuda")
    for column in (0, 1, 2, 5):
        on_device[column][6] = torch.cat([on_device[column][6][:1], on_device[column][6]])[1:]
    OPS.adam_update(*on_cpu), OPS.adam_update(*on_device)
    assert_same_bits(on_cpu, on_device)


def test_nothing_synchronises():
    arguments = {name: move(arguments_of(name, mode), "cuda") for name, mode in CASES}
    scale = torch.tensor(1.0, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, inputs in arguments.items():
            OPS.grad_check(inputs[1], scale)
            getattr(OPS, name)(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_replays_as_it_ran():
    """The gradients are made inside the graph, so their addresses are new when it is captured."""
    on_cpu = arguments_of("adam_update")
    on_device, warm = move(on_cpu, "cuda"), move(on_cpu, "cuda")
    sources, scale = on_device[1], torch.tensor(1.0, device="cuda")

    def step_of(arguments):
        def step(*sources):
            grads = [source * 1 for source in sources]
            norm, _, _ = OPS.grad_check(grads, scale)
            OPS.adam_update(arguments[0], grads, *arguments[2:])
            return [norm]

        return step

    graphs = TorchGraphs()
    graphs.warm_up(step_of(warm), sources)
    replay, (norm,) = graphs.capture(step_of(on_device), sources)
    for _ in range(3):
        replay()
        OPS.adam_update(*on_cpu)
    assert_same_bits(on_cpu, on_device)
    torch.testing.assert_close(norm.cpu(), OPS.grad_check(on_cpu[1], torch.tensor(1.0))[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64], ids=str)
def test_exponents_are_counted_as_on_a_cpu(dtype):
    values = (torch.randn(70001, dtype=torch.float64) * 2.0 ** torch.randint(-150, 130, (70001,))).to(dtype)
    values[:3] = torch.tensor([0.0, float("inf"), float("nan")])
    result = OPS.count_exponents([values.cuda(), values.cuda()[::2]])
    assert torch.equal(result.cpu(), OPS.count_exponents([values, values[::2]]))
