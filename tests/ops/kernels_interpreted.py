"""The Triton kernels against the reference, bit for bit, under Triton's interpreter; `test_kernels.py` runs this file.

It needs TRITON_INTERPRET=1 before Triton is imported. The interpreter differs from the device in two things, which are
put right here: its fma rounds twice, and its conversion from fp32 to bf16 drops bits where the device rounds. Triton
3.6's takes an array of one element for a number, which NumPy 2.5 no longer does.
"""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import language as tl
from triton.runtime import interpreter
from update_arguments import BY_NAME, EVERY, FLOATS, LOWS, NAMES, assert_same_bits, copies, update_arguments

import amp_compiler as amp
from amp_compiler.errors import LoweringError
from amp_compiler.ops import stale_copies
from amp_compiler.ops.cuda import triton_kernels
from amp_compiler.ops.cuda import update as kernels
from amp_compiler.ops.cuda.pointer_tables import TableCache
from amp_compiler.ops.cuda.stale_copies import DeviceCopies
from amp_compiler.ops.update import operators as fused_update
from amp_compiler.ops.update.rounding import Storage
from amp_compiler.passes.step import fuse_update
from amp_compiler.training.optimizers import fused as optimizers
from amp_compiler.training.reporting.scale_watch import LateFlag

assert fused_update
OPS = torch.ops.amp_compiler
BLOCK = kernels.BLOCK
SIZES = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)
FLAGS = (False, True)


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
    truncate, in_python = interpreter.InterpreterBuilder.cast_impl, interpreter._patch_lang_tensor

    def cast(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).bfloat16().view(torch.int16).numpy()
            return interpreter.TensorHandle(rounded.view(np.uint16), tl.bfloat16)
        return truncate(self, src, dst_type)

    def numbers_in_python(tensor, scope):
        in_python(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    def fma(self, x, y, z):
        with np.errstate(all="ignore"):
            return interpreter.TensorHandle(round_once(x.data, y.data, z.data), z.dtype.scalar)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", numbers_in_python)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fp_trunc", cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)
    monkeypatch.setattr(kernels, "TABLES", TableCache())
    with np.errstate(all="ignore"):
        yield


def given_to(name, sizes=SIZES, **options):
    """The arguments of an update by the name of its operator, and what is to be set of its flags."""
    one, low = BY_NAME[name.partition("_")[0]], name.endswith("_low")
    flags = {flag: options.pop(flag) for flag in one.flags if flag in options}
    if low:
        options = {"mode": Storage.NEAREST, "weight": torch.bfloat16, **options}
    return update_arguments(one, flags, sizes, **options)


def by_kernel(name, arguments):
    """What runs on a device when the operator of that name is called there."""
    one = BY_NAME[name.partition("_")[0]]
    kernels.update(one, one.bound(name.endswith("_low"), arguments))


def assert_both_agree(name, arguments):
    """Give the same arguments to the kernels and to the CPU operator; they must leave the same bits behind."""
    expected, given_ = copies(arguments), copies(arguments)
    getattr(OPS, name)(*expected)
    by_kernel(name, given_)
    assert_same_bits(expected, given_)
    return given_


def with_a_storage():
    """Every optimizer with masters and, in turn, with one storage, in turn of each type; the others are slow."""
    for place, ((one, flags), name) in enumerate(zip(EVERY, NAMES, strict=True)):
        yield pytest.param(one, flags, {}, id=name)
        for number, mode in enumerate(Storage):
            marks = [pytest.mark.slow] * (number != place % len(Storage))
            types = {"weight": LOWS[place // 3 % 2], "moment": FLOATS[(number + place // 3) % 3]}
            yield pytest.param(one, flags, {"mode": mode, **types}, marks=marks, id=f"{name}-{mode.name}")


@pytest.mark.parametrize(("one", "flags", "storage"), list(with_a_storage()))
def test_every_fused_optimizer(one, flags, storage):
    """With nothing but its description."""
    given_ = update_arguments(one, flags, (0, 1, 7, BLOCK - 1, BLOCK + 1), more=0.1, **storage)
    assert_both_agree(one.operator(low=bool(storage)), given_)


NUMBERS = [
    ("adam_update", {"beta1": 0.3, "weight_decay": 0.0}),
    ("adam_update", {"beta1": 0.5, "more": 0.1, "decoupled": True}),
    ("adam_update", {"beta1": 0.0, "more": 0.1}),
    ("adam_update_low", {"beta1": 0.5, "l1_decay": 0.02, "weight_decay": 0.0}),
    ("sgd_update", {"l1_decay": 0.02}),
    ("sgd_update", {"momentum": 0.9, "started": 0.0}),
    ("sgd_update", {"momentum": 0.9, "more": 0.3, "started": 0.0, "maximize": True}),
    ("sgd_update", {"momentum": 0.9, "nesterov": True}),
    ("sgd_update_low", {"l1_decay": 0.02, "mode": Storage.KAHAN}),
    ("sgd_update_low", {"momentum": 0.9, "weight_decay": 0.1, "mode": Storage.STOCHASTIC}),
]


@pytest.mark.parametrize(("name", "numbers"), NUMBERS, ids=str)
def test_other_numbers_and_odd_weights(name, numbers):
    arguments = given_to(name, (0, 5, BLOCK + 3), **numbers)
    arguments[0][1][:] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), 1e-30])
    changed = assert_both_agree(name, arguments)
    assert changed[0][2].isfinite().all() and not changed[0][1][[0, 1, 4]].isnan().any()
    if not numbers.get("more") and not numbers.get("weight_decay"):  # no decay leaves an infinite weight as it is
        assert changed[0][1][2:4].isinf().all()


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
    for name in ("adam_update_low", "sgd_update_low"):
        arguments = given_to(name, (BLOCK + 1,), weight=dtype, moment=dtype, mode=mode, momentum=1.0, beta1=0.0)
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
    options = {} if mode is None else {"mode": mode}
    for name in ("adam_update", "sgd_update") if mode is None else ("adam_update_low", "sgd_update_low"):
        arguments = given_to(name, (3, BLOCK + 1), skip=1.0, more=0.1, **options)
        arguments[1][1][:] = bad
        before = copies(arguments)
        by_kernel(name, arguments)
        assert_same_bits(before, arguments)


PLACES = (None, 0, 1, kernels.CHECK_BLOCK - 1, kernels.CHECK_BLOCK, 2 * kernels.CHECK_BLOCK)


@pytest.mark.parametrize(
    ("place", "bad"), list(zip(PLACES, [float("nan"), float("inf"), -float("inf")] * 2, strict=True))
)
def test_grad_check(place, bad):
    sizes = (0, 1, kernels.CHECK_BLOCK - 1, kernels.CHECK_BLOCK, 2 * kernels.CHECK_BLOCK + 1, 5, 7)
    grads = [torch.randn(size).to(kind) for size, kind in zip(sizes, itertools.cycle(FLOATS), strict=False)]
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
    for name in ("adam_update", "sgd_update"):
        assert_both_agree(name, given_to(name, ()))


def test_unaligned_storage():
    arguments = given_to("adam_update", (BLOCK + 5, 2 * BLOCK), amsgrad=True)
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
    arguments = given_to("sgd_update", (size - chunk * BLOCK,), momentum=0.9)
    expected = copies(arguments)
    columns = [arguments[1], arguments[0], [], arguments[2]]
    group = TableCache().groups(columns, torch.device("cpu"), BLOCK)[0]
    rows = group.rows.clone()
    rows[0, 0] = size
    for column, tensor in ((2, arguments[1][0]), (3, arguments[0][0]), (5, arguments[2][0])):
        rows[0, column] -= chunk * BLOCK * tensor.element_size()
    hyper, coef, skip = arguments[5:8]
    options = kernels._group_options(group, Storage.NEAREST) | {"NESTEROV": False, "MAXIMIZE": False, "TAKES": False}
    options |= kernels._OPTIONS
    triton_kernels.sgd_kernel[(1,)](rows, torch.tensor([chunk]), hyper, coef, skip, arguments[4], None, None, **options)
    OPS.sgd_update(*expected)
    assert_same_bits(arguments, expected)


def test_one_unaligned_tensor_leaves_the_others_aligned():
    cache, device = TableCache(), torch.device("cpu")
    base = torch.randn(20)
    grads = [torch.randn(8), base[1:9], base[4:12], torch.randn(8).half(), torch.randn(20).half()[8:13]]
    groups = cache.groups([grads], device, 4)
    result = {(group.types[0], group.aligned): group.rows[:, 1].tolist() for group in groups}
    half, single = torch.float16, torch.float32
    assert result == {(single, True): [0, 2], (single, False): [1], (half, True): [3, 4]}


def test_what_the_kernels_refuse():
    arguments = given_to("sgd_update", (6,), momentum=0.9)
    arguments[2] = [torch.zeros(12)[::2]]
    with pytest.raises(LoweringError, match="strides"):
        by_kernel("sgd_update", arguments)
    arguments = given_to("sgd_update", (6,), momentum=0.9)
    arguments[0] = [arguments[0][0].double()]
    with pytest.raises(LoweringError, match="float64"):
        by_kernel("sgd_update", arguments)
    arguments = given_to("adam_update", (6,))
    arguments[6] = [torch.tensor(0)]
    with pytest.raises(LoweringError, match="step count"):
        by_kernel("adam_update", arguments)


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(
    case=st.sampled_from(EVERY),
    sizes=st.lists(st.integers(0, 2 * BLOCK + 2), min_size=1, max_size=4),
    exponent=st.integers(-30, 30),
    more=st.sampled_from([0.0, 1e-3, 0.5]),
)
def test_any_sizes_and_magnitudes(case, sizes, exponent, more):
    arguments = update_arguments(*case, sizes, more=more)
    arguments[1] = [grad.float() * 2.0**exponent for grad in arguments[1]]
    assert_both_agree(case[0].operator(low=False), arguments)


# ---- copies of weights in 16 bits that are compared with them

COPIED = [(3,), (1024,), (1025,), (100, 77), (64, 65, 3, 3)]


def pair(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight.view(-1)[:3] = torch.tensor([float("nan"), float("inf"), 1e30])
    return weight, weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("takes", [False, True])
def test_what_differs_is_brought_together(dtype, takes):
    pairs = [pair(shape, dtype) for shape in COPIED]
    copies = DeviceCopies(pairs, takes)
    before = [(weight.clone(), low.clone()) for weight, low in pairs]
    for turn in range(3):
        copies.follow(turn)
    for (weight, low), (old, old_low) in zip(pairs, before, strict=True):
        assert torch.equal(weight.view(torch.int32), old.view(torch.int32))
        assert torch.equal(low.view(torch.int16), old_low.view(torch.int16))
    for place in (1, 3, 4):
        weight, low = pairs[place]
        (low if takes else weight).mul_(-1)
    copies.follow(3)
    for place, (weight, low) in enumerate(pairs):
        assert torch.equal(weight.to(dtype).nan_to_num(5.0), low.nan_to_num(5.0)), place
        sign = -1 if place in (1, 3, 4) else 1
        wanted = before[place][1].float() if takes and sign < 0 else before[place][0]
        assert torch.equal(weight.nan_to_num(5.0), (wanted * sign).nan_to_num(5.0)), place


def test_every_element_is_looked_at_in_turn():
    weight, low = pair((100, 77), torch.bfloat16)
    copies = DeviceCopies([(weight, low)], False)
    weight[99, 76] = 7.0
    for turn in range(-(-7700 // 1024)):
        copies.follow(turn)
    assert float(low[99, 76]) == 7.0


class Here:
    """A flag that has arrived when it is asked for."""

    def start(self, flag):
        self.flag = bool(flag)

    def done(self):
        return True

    def value(self):
        return self.flag


@pytest.fixture
def step_by_kernels(monkeypatch):
    """A training step on a CPU whose update is the kernels', as on a GPU."""
    for module in (fuse_update, optimizers):
        monkeypatch.setattr(module, "new_stale", lambda sizes, device: kernels.new_stale(sizes, torch.device("cuda")))
    monkeypatch.setattr(fused_update.reference, "update", lambda optimizer, args, sqrt: kernels.update(optimizer, args))
    monkeypatch.setattr(stale_copies.CopyWatch, "look", lambda self, turn=0: [])  # what it misses

    def build(dtype="bf16", half=False, **options):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 4))
        model = model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]) if half else model
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        step = amp.training_step(model, lambda m, x: m(x).float().square().mean(), optimizer, dtype=dtype,
                                 backend="eager", **options)  # fmt: skip
        step._hidden._late = LateFlag(Here())
        return model, optimizer, step

    return build


def names(caplog):
    said = [one.getMessage() for one in caplog.records]
    return [one.partition("'")[2].partition("'")[0] for one in said if "version counter" in one]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_names_what_its_update_has_found(step_by_kernels, dtype, half, caplog):
    model, _, step = step_by_kernels(dtype, half)
    x = torch.randn(16, 8).to(model[0].weight.dtype)
    for _ in range(3):
        step(x)
    assert not names(caplog)
    for weight, value in ((model[2].weight, 3.0), (model[0].weight, -3.0)):
        weight.data[0, 1] = value
        step(x), step(x)
        assert abs(float(weight[0, 1].detach()) - value) < 0.2
    assert names(caplog) == ["2.weight"]
    step.state_dict()
    assert names(caplog) == ["2.weight"]


def test_writes_that_are_known_are_not_told_of(step_by_kernels, caplog):
    model, optimizer, step = step_by_kernels("fp16", accumulate=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x, saved = torch.randn(16, 8), copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def train(times=3, scale=1.0, rows=16):
        for _ in range(2 * times):
            step(x[:rows] * scale)

    train()
    train(1, float("inf"))
    schedule.step()
    train()
    train(2, rows=8), train(2), train(1, rows=8)
    with torch.no_grad():
        model[0].weight.mul_(-1.0)
    train()
    model.load_state_dict(saved[0]), optimizer.load_state_dict(saved[1])
    train()
    step.load_state_dict(step.state_dict())
    model[0].weight.data = model[0].weight.data.clone()
    train()
    model[2].weight.requires_grad_(False)
    train()
    with torch.no_grad():
        model[2].weight[0, 0] += 1.0
    model[2].weight.requires_grad_(True)
    train()
    step(x)
    step.flush()
    train()
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        train()
    step.state_dict()
    assert not names(caplog)
