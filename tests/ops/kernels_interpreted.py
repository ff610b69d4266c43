"""The Triton kernels against the reference, bit for bit, under Triton's interpreter; `test_kernels.py` runs this file.

It needs TRITON_INTERPRET=1 before Triton is imported. The interpreter differs from the device in two things, which are
put right here: its fma rounds twice, and its conversion from fp32 to bf16 drops bits where the device rounds. Triton
3.6's takes an array of one element for a number, which NumPy 2.5 no longer does.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreting import convert_as_devices_do
from triton.runtime import interpreter
from update_arguments import EVERY, NAMES, update_arguments

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda import triton_kernels
from amp_compiler.ops.cuda import update as kernels
from amp_compiler.ops.cuda.pointer_tables import TableCache
from amp_compiler.ops.update import operators as fused_update
from amp_compiler.ops.update.operators import FUSED
from amp_compiler.ops.update.rounding import Storage

assert fused_update
OPS = torch.ops.amp_compiler
BLOCK = kernels.BLOCK
SIZES = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLAGS = (False, True)


def crossed(*columns):
    """All combinations of values; quick is every second one, in which each pair of values of two columns is met."""
    places = itertools.product(*(range(len(values)) for values in columns))
    marks = [[pytest.mark.slow] * (sum(place) % 2) for place in places]
    return [pytest.param(*values, marks=one) for values, one in zip(itertools.product(*columns), marks, strict=True)]


def round_once(x, y, z):
    """fp32 fma: the fp64 sum rounded to odd keeps what the last rounding needs (Boldo & Melquiond 2008)."""
    product, addend = x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    return np.where((error != 0) & even & np.isfinite(total), np.nextafter(total, toward), total).astype(np.float32)


@pytest.fixture(autouse=True)
def device_arithmetic(monkeypatch):
    convert_as_devices_do(monkeypatch)

    def fma(self, x, y, z):
        with np.errstate(all="ignore"):
            return interpreter.TensorHandle(round_once(x.data, y.data, z.data), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    with np.errstate(all="ignore"):
        yield


def tensors(sizes, dtypes, make=torch.randn):
    return [make(size).to(dtype) for size, dtype in zip(sizes, itertools.cycle(dtypes), strict=False)]


def copies(value):
    return [copies(item) for item in value] if isinstance(value, (list, tuple)) else clone(value)


def clone(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def assert_same_bits(first, second):
    for a, b in zip(first, second, strict=True):
        if isinstance(a, (list, tuple)):
            assert_same_bits(a, b)
        elif isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype and a.stride() == b.stride()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(torch.signbit(a[a == 0]), torch.signbit(b[b == 0]))


def by_kernel(name, arguments):
    """What runs on a device when the operator of that name is called there."""
    ((optimizer, low),) = ((one, low) for one in FUSED for low in FLAGS if one.operator(low) == name)
    kernels.update(optimizer, optimizer.bound(low, arguments))


def assert_both_agree(name, arguments):
    """Give the same arguments to the kernels and to the CPU operator; they must leave the same bits behind."""
    expected, given_ = copies(arguments), copies(arguments)
    getattr(OPS, name)(*expected)
    by_kernel(name, given_)
    assert_same_bits(expected, given_)
    return given_


def extras(weights, low_dtype, mode):
    if mode is None:
        return [weight.to(low_dtype) for weight in weights] if low_dtype else []
    return [weight * 2**-9 for weight in weights] if mode == Storage.KAHAN else []


def adam_arguments(sizes=SIZES, low_dtype=None, weight=torch.float32, moment=torch.float32, **options):
    amsgrad, mode = options.get("amsgrad", False), options.get("mode")
    weights = tensors(sizes, [weight])
    largest = tensors(sizes, [moment], torch.rand) if amsgrad else []
    extra = extras(weights, low_dtype, mode)
    steps = [torch.tensor(float(i * i)) for i in range(len(sizes))]
    rng = [] if mode is None else [torch.tensor([2**40 + 17, 5])]
    rest = [0.999, 1e-8, options.get("decay", 0.1), options.get("l1", 0.0)]
    hyper = torch.tensor([1e-2, options.get("beta1", 0.9), *rest], dtype=torch.float64)
    grads = tensors(sizes, options.get("grads", FLOATS))
    moments = [tensors(sizes, [moment]), tensors(sizes, [moment], torch.rand), largest]
    flags = [amsgrad, options.get("maximize", False), options.get("decoupled", True)]
    scalars = [hyper, torch.tensor(0.37), torch.tensor(options.get("skip", 0.0))]
    return [weights, grads, *moments, extra, steps, *rng, *scalars, *([] if mode is None else [int(mode)]), *flags]


def sgd_arguments(sizes=SIZES, low_dtype=None, weight=torch.float32, moment=torch.float32, **options):
    mode, momentum = options.get("mode"), options.get("momentum", 0.9)
    weights = tensors(sizes, [weight])
    extra = extras(weights, low_dtype, mode)
    rng = [] if mode is None else [torch.tensor([-3, 2**33 + 1])]
    rest = [options.get("dampening", 0.0), options.get("decay", 0.0), options.get("l1", 0.0)]
    hyper = torch.tensor([1e-2, momentum, *rest], dtype=torch.float64)
    buffers = tensors(sizes, [moment]) if momentum else []
    scalars = [hyper, torch.tensor(0.37), torch.tensor(options.get("skip", 0.0))]
    flags = [options.get("nesterov", False), options.get("maximize", False)]
    started = torch.tensor(options.get("started", 1.0))
    grads = tensors(sizes, FLOATS)
    return [weights, grads, buffers, extra, started, *rng, *scalars, *([] if mode is None else [int(mode)]), *flags]


@pytest.mark.parametrize("decoupled", FLAGS)
@pytest.mark.parametrize(("beta1", "decay"), [(0.3, 0.0), (0.5, 0.1), (0.0, 0.1)])
def test_adam_with_other_numbers(beta1, decay, decoupled):
    assert_both_agree("adam_update", adam_arguments((5, 0, BLOCK + 3), beta1=beta1, decay=decay, decoupled=decoupled))


MOMENTA = ((0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True))


@pytest.mark.parametrize(("kind", "decay", "started"), crossed(MOMENTA, (0.0, 0.1), (0.0, 1.0)))
def test_sgd(kind, decay, started):
    momentum, dampening, nesterov = kind
    options = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    assert_both_agree(
        "sgd_update",
        sgd_arguments(decay=decay, maximize=bool(decay), started=started, low_dtype=torch.float16, **options),
    )


def test_no_decay_leaves_an_infinite_weight_as_it_is():
    for name, make, options in (
        ("adam_update", adam_arguments, {"decoupled": False}),
        ("sgd_update", sgd_arguments, {}),
    ):
        arguments = make((4,), decay=0.0, **options)
        arguments[0][0][1] = float("inf")
        assert assert_both_agree(name, arguments)[0][0][1].isinf()


@pytest.mark.parametrize(("mode", "decay", "maximize"), crossed((None, *Storage), (0.0, 0.1), FLAGS))
def test_l1_decay(mode, decay, maximize):
    weight, suffix = (torch.float32, "") if mode is None else (torch.bfloat16, "_low")
    options = {"weight": weight, "mode": mode, "decay": decay, "maximize": maximize, "l1": 0.02}
    cases = [(f"sgd_update{suffix}", sgd_arguments, {})]
    cases += [(f"adam_update{suffix}", adam_arguments, {"decoupled": decoupled}) for decoupled in FLAGS]
    for name, make, more in cases:
        arguments = make((0, 5, BLOCK + 3), **options, **more)
        arguments[0][1][:] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-30])
        changed = assert_both_agree(name, arguments)
        assert changed[0][2].isfinite().all() and not changed[0][1][:2].isnan().any()


@pytest.mark.parametrize(("mode", "weight", "moment"), crossed(tuple(Storage), (torch.float16, torch.bfloat16), FLOATS))
def test_weights_without_masters(mode, weight, moment):
    sizes = (0, 1, 6, BLOCK, 2 * BLOCK + 9)
    assert_both_agree("adam_update_low", adam_arguments(sizes, weight=weight, moment=moment, mode=mode, amsgrad=True))
    assert_both_agree("sgd_update_low", sgd_arguments(sizes, weight=weight, moment=moment, mode=mode, decay=0.1))


def test_stochastic_rounding_of_small_and_special_values():
    weight = torch.cat([torch.logspace(-9, 4.8, 2 * BLOCK), torch.tensor([0.0, -0.0, 65504.0, float("nan")])])
    weight = torch.cat([weight, -weight]).half()
    grads = [torch.randn_like(weight, dtype=torch.float32) * weight.float().abs()]
    scalars = [torch.tensor([1e-2, 0, 0, 0, 0], dtype=torch.float64), torch.tensor(1.0), torch.tensor(0.0)]
    state = [[], [], torch.tensor(0.0), torch.tensor([1, 2])]
    assert_both_agree("sgd_update_low", [[weight], grads, *state, *scalars, int(Storage.STOCHASTIC), False, False])


@pytest.mark.parametrize("mode", list(Storage))
@pytest.mark.parametrize(("dtype", "pull"), [(torch.float16, 65504.0), (torch.bfloat16, 0.002 * 3.39e38)])
def test_what_outgrows_its_type_is_clipped(dtype, pull, mode):
    largest = torch.finfo(dtype).max
    for name, make in (("adam_update_low", adam_arguments), ("sgd_update_low", sgd_arguments)):
        arguments = make((BLOCK + 1,), weight=dtype, moment=dtype, mode=mode, momentum=1.0, beta1=0.0)
        arguments[0][0][:4] = torch.tensor([largest, -largest, largest, 1.0])
        arguments[1][0] = torch.randn(BLOCK + 1)
        arguments[1][0][:4] = torch.tensor([-pull, pull, float("nan"), float("inf")])
        arguments[2][0][:2] = torch.tensor([-largest, largest])
        changed = assert_both_agree(name, arguments)
        if name == "sgd_update_low":
            assert changed[2][0][:2].tolist() == [-largest, largest]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", [None, *Storage])
def test_a_skipped_step_changes_nothing(bad, mode):
    weight = torch.float32 if mode is None else torch.bfloat16
    suffix = "" if mode is None else "_low"
    for name, make in (("adam_update", adam_arguments), ("sgd_update", sgd_arguments)):
        arguments = make((3, BLOCK + 1), weight=weight, mode=mode, skip=1.0, low_dtype=torch.float16, amsgrad=True)
        arguments[1][1][:] = bad
        before = copies(arguments)
        by_kernel(name + suffix, arguments)
        assert_same_bits(before, arguments)


PLACES = (None, 0, 1, kernels.CHECK_BLOCK - 1, kernels.CHECK_BLOCK, 2 * kernels.CHECK_BLOCK)


@pytest.mark.parametrize(("place", "bad"), crossed(PLACES, (float("nan"), float("inf"), -float("inf"))))
def test_grad_check(place, bad):
    sizes = (0, 1, kernels.CHECK_BLOCK - 1, kernels.CHECK_BLOCK, 2 * kernels.CHECK_BLOCK + 1, 5, 7)
    grads = tensors(sizes, FLOATS)
    if place is not None:
        grads[4][place] = bad
    inv_scale = torch.tensor(1 / 64)
    norm, nonfinite, flags = kernels.grad_check(grads, inv_scale)
    expected_norm, expected_nonfinite, expected_flags = OPS.grad_check(grads, inv_scale)
    assert torch.equal(nonfinite, expected_nonfinite) and torch.equal(flags, expected_flags)
    assert flags.tolist() == [0, 0, 0, 0, int(place is not None), 0, 0]
    torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0, equal_nan=True)
    again = kernels.grad_check(grads, inv_scale)
    torch.testing.assert_close(again[0], norm, rtol=0, atol=0, equal_nan=True)


def test_an_overflowing_norm_is_no_bad_gradient_and_nothing_is_an_input_too():
    norm, nonfinite, flags = kernels.grad_check([torch.full((10,), 1e30)], torch.tensor(1.0))
    assert norm.isinf() and nonfinite == 0 and flags.tolist() == [0]
    norm, nonfinite, flags = kernels.grad_check([], torch.tensor(1.0))
    assert norm == 0 and nonfinite == 0 and flags.shape == (0,)
    assert_both_agree("adam_update", adam_arguments(()))
    assert_both_agree("sgd_update", sgd_arguments(()))


def test_unaligned_storage():
    arguments = adam_arguments((BLOCK + 5, 2 * BLOCK))
    for column in (0, 1, 2, 3):
        arguments[column] = [torch.cat([tensor[:1], tensor])[1:] for tensor in arguments[column]]
    expected = copies(arguments)
    assert arguments[0][0].data_ptr() % 16
    by_kernel("adam_update", arguments)
    OPS.adam_update(*expected)
    assert_same_bits(copies(arguments), expected)


def test_memory_formats():
    weight = torch.randn(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(4, 3, 5, 5)
    hyper = torch.tensor([0.1, 0.9, 0.0, 0.1, 0.0], dtype=torch.float64)
    scalars = [torch.tensor(1.0), hyper, torch.tensor(1.0), torch.tensor(0.0), False, False]
    assert_both_agree("sgd_update", [[weight], [grad], [torch.randn_like(weight)], [], *scalars])
    low = weight.bfloat16()
    assert low.stride() == weight.stride()
    scalars = [torch.tensor(1.0), torch.tensor([1, 2]), *scalars[1:4], int(Storage.STOCHASTIC), False, False]
    assert_both_agree("sgd_update_low", [[low], [grad], [torch.randn_like(low)], [], *scalars])


def test_offsets_beyond_32_bits():
    """A row that claims 2**32 + 5 elements, of which only the last block is worked on; its memory is a small buffer."""
    size = 2**32 + 5
    chunk = size // BLOCK
    arguments = sgd_arguments((size - chunk * BLOCK,))
    expected = copies(arguments)
    columns = [arguments[1], arguments[0], [], arguments[2]]
    group = TableCache().groups(columns, torch.device("cpu"), BLOCK)[0]
    rows = group.rows.clone()
    rows[0, 0] = size
    for column, tensor in ((2, arguments[1][0]), (3, arguments[0][0]), (5, arguments[2][0])):
        rows[0, column] -= chunk * BLOCK * tensor.element_size()
    hyper, coef, skip = arguments[5:8]
    options = kernels._group_options(group, Storage.NEAREST) | {"NESTEROV": False, "MAXIMIZE": False}
    triton_kernels.sgd_kernel[(1,)](rows, torch.tensor([chunk]), hyper, coef, skip, arguments[4], None, **options)
    OPS.sgd_update(*expected)
    assert_same_bits(arguments, expected)


def test_one_unaligned_tensor_leaves_the_others_aligned():
    cache, device = TableCache(), torch.device("cpu")
    base = torch.randn(20)
    grads = [torch.randn(8), base[1:9], base[4:12], torch.randn(8).half(), torch.randn(20).half()[8:13]]
    groups = cache.groups([grads], device, 4)
    found = {(group.types[0], group.aligned): group.rows[:, 1].tolist() for group in groups}
    half, single = torch.float16, torch.float32
    assert found == {(single, True): [0, 2], (single, False): [1], (half, True): [3, 4]}


def test_tables_are_kept_for_the_same_tensors_only():
    cache, device = TableCache(), torch.device("cpu")
    grads = [torch.randn(5), torch.randn(3).half()]
    first = cache.groups([grads], device, 4)
    assert [group.types for group in first] == [(torch.float32,), (torch.float16,)]
    assert first[0].blocks.tolist() == [0, 1]
    assert cache.groups([grads], device, 4) is first
    assert cache.groups([[grads[0][:4], grads[1]]], device, 4) is not first
    for size in range(1, 200):
        cache.groups([[torch.empty(size)]], device, 4)
    assert len(cache._tables) <= 64


def test_what_the_kernels_refuse():
    arguments = sgd_arguments((6,))
    arguments[2] = [torch.zeros(12)[::2]]
    with pytest.raises(LoweringError, match="strides"):
        by_kernel("sgd_update", arguments)
    arguments = sgd_arguments((6,))
    arguments[0] = [arguments[0][0].double()]
    with pytest.raises(LoweringError, match="float64"):
        by_kernel("sgd_update", arguments)
    arguments = adam_arguments((6,))
    arguments[6] = [torch.tensor(0)]
    with pytest.raises(LoweringError, match="step count"):
        by_kernel("adam_update", arguments)


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(
    sizes=st.lists(st.integers(0, 2 * BLOCK + 2), min_size=1, max_size=4),
    exponent=st.integers(-30, 30),
    options=st.fixed_dictionaries({name: st.booleans() for name in ("amsgrad", "maximize", "decoupled")}),
    decay=st.sampled_from([0.0, 1e-3, 0.5]),
    low_dtype=st.sampled_from([None, torch.float16, torch.bfloat16]),
)
def test_adam_on_any_sizes_and_magnitudes(sizes, exponent, options, decay, low_dtype):
    """Every flag, storage and gradients of each type are met by `test_every_fused_optimizer`."""
    arguments = adam_arguments(sizes, grads=[torch.float32], decay=decay, low_dtype=low_dtype, **options)
    arguments[1] = [grad * 2.0**exponent for grad in arguments[1]]
    assert_both_agree("adam_update", arguments)


def with_a_storage():
    """Every optimizer with masters and, in turn, with one storage; the others are slow."""
    for place, ((one, chosen), name) in enumerate(zip(EVERY, NAMES, strict=True)):
        yield pytest.param(one, chosen, None, id=name)
        for number, mode in enumerate(Storage):
            marks = [pytest.mark.slow] * (number != place % len(Storage))
            yield pytest.param(one, chosen, mode, marks=marks, id=f"{name}-{mode.name}")


@pytest.mark.parametrize(("one", "chosen", "mode"), with_a_storage())
def test_every_fused_optimizer(one, chosen, mode):
    """With nothing but its description."""
    weight = torch.float32 if mode is None else torch.bfloat16
    given_ = update_arguments(one, chosen, (0, 1, 7, BLOCK - 1, BLOCK + 1), mode=mode, weight=weight, more=0.1)
    assert_both_agree(one.operator(low=mode is not None), given_)
