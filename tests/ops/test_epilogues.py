"""Products with an activation, its gradient or sums at their end, against autograd and what cuBLASLt documents."""

from __future__ import annotations

import ctypes

import pytest
import torch
from cublaslt_stand_in import StandIn
from torch.nn import functional

from amp_compiler.ops import epilogues
from amp_compiler.ops.cuda import cublaslt
from amp_compiler.ops.epilogues import ACTIVATION, GRADIENT, WITH_SUM, bits_of, composed, mask_of

LOW = [torch.bfloat16, torch.float16]
ROWS, INNER, COLUMNS = 24, 16, 40
FORWARD = {"gelu": lambda x: functional.gelu(x, approximate="tanh"), "relu": functional.relu}
# Of what is rounded twice on one side and once on the other, see `FuseEpilogues`: two units in the last place of each.
SLACK = {dtype: 2 * torch.finfo(dtype).eps for dtype in LOW}


@pytest.fixture
def stand_in(monkeypatch):
    """A library whose every form is taken for right; trials are tested elsewhere."""
    made = StandIn()
    library = cublaslt.Cublaslt(made, "cpu")
    monkeypatch.setattr(cublaslt, "CUBLASLT", library)
    monkeypatch.setattr(library, "trusts", lambda call: trusts(library, call))
    return made


def trusts(library, call):
    try:
        return library.choices(call) > 0
    except cublaslt.Refused:
        return False


def matrix(rows, columns, dtype, lies="rows", seed=0):
    """Numbers of about 1 whose rows or columns are contiguous, or stand apart."""
    generator = torch.Generator().manual_seed(seed + rows * 1000 + columns)
    made = torch.randn(rows, columns, generator=generator).to(dtype)
    if lies == "rows":
        return made
    if lies == "columns":
        return made.t().contiguous().t()
    apart = torch.zeros(rows, columns + 24, dtype=dtype)
    apart[:, 8 : columns + 8] = made
    return apart[:, 8 : columns + 8]


def near(found, expected, beside=0.0):
    """Whether two roundings explain the difference of results near `expected`, made of values near `beside`."""
    dtype = expected.dtype
    room = SLACK[dtype] * (expected.float().abs() + beside) + SLACK[dtype] / 16
    assert found.dtype is dtype and found.shape == expected.shape
    assert ((found.float() - expected.float()).abs() <= room).all(), (found.float() - expected.float()).abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, *LOW])
@pytest.mark.parametrize("activation", FORWARD)
@pytest.mark.parametrize("biased", [True, False])
def test_the_loops_are_what_autograd_does_with_the_plain_model(activation, biased, dtype):
    x, w, v = (matrix(*sizes, dtype).requires_grad_() for sizes in ((ROWS, INNER), (COLUMNS, INNER), (8, COLUMNS)))
    bias = matrix(1, COLUMNS, dtype)[0].requires_grad_() if biased else None
    hidden = FORWARD[activation](functional.linear(x, w, bias))
    out = functional.linear(hidden, v)
    grad = matrix(ROWS, 8, dtype, seed=1)
    out.backward(grad)
    with torch.no_grad():
        made, kept = composed(ACTIVATION, x, w.t(), bias, activation)
        assert torch.equal(made, hidden)
        gradient, of_bias = composed(GRADIENT, grad, v, kept, activation, biased)
        of_weight, again = composed(WITH_SUM, gradient.t(), x, True)
        turned, once_more = composed(WITH_SUM, x.t(), gradient, False)
    assert torch.equal(of_weight, w.grad) and torch.equal(gradient @ w, x.grad)
    torch.testing.assert_close(turned.t(), w.grad)  # the sums of a product in another order
    if biased:
        assert torch.equal(of_bias, bias.grad) and torch.equal(once_more, bias.grad)
        torch.testing.assert_close(again, bias.grad)
    else:
        assert of_bias.shape == (0,)


def test_a_mask_holds_a_bit_for_each_element_and_lets_nan_through_as_torch_does():
    values = torch.tensor([[1.0, 0.0, -0.0, -1.0, float("nan"), float("inf"), 1e-30, -1e-30] * 17])
    mask = mask_of(values)
    assert mask.shape == (1, 32) and mask[0, 0] == 0b01110001 and not mask[0, 17:].any()
    expected = torch.ops.aten.threshold_backward.default(torch.ones_like(values), torch.relu(values), 0)
    assert torch.equal(bits_of(mask, values.shape[1]), expected.bool())


@pytest.mark.parametrize("operator", epilogues.OPERATORS, ids=lambda one: one.overloadpacket.__name__)
def test_the_operators_are_what_torch_wants_of_one(operator):
    left, right = matrix(ROWS, INNER, torch.bfloat16), matrix(INNER, COLUMNS, torch.bfloat16)
    cases = {
        ACTIVATION: [(right[0], "gelu"), (None, "relu")],
        GRADIENT: [(left @ right, "gelu", True), (mask_of(left @ right), "relu", False)],
        WITH_SUM: [(True,), (False,)],
    }
    for rest in cases[operator]:
        torch.library.opcheck(operator, (left, right, *rest), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("right_lies", ["rows", "columns", "apart"])
@pytest.mark.parametrize("left_lies", ["rows", "columns", "apart"])
def test_calls_mean_what_cublaslt_documents(left_lies, right_lies, dtype, stand_in):
    left, right = matrix(ROWS, INNER, dtype, left_lies), matrix(INNER, COLUMNS, dtype, right_lies)
    bias, before = matrix(1, COLUMNS, dtype)[0], (left.float() @ right.float()).abs()
    ran = []
    for activation in FORWARD:
        for given in (bias, None):
            expected, kept = composed(ACTIVATION, left, right, given, activation)
            found, aux = ACTIVATION(left, right, given, activation)
            near(found, expected, before + 4)
            if activation == "gelu":
                near(aux, kept, before)
            else:
                assert torch.equal(aux, kept)
            ran.append(f"{activation.upper()}_AUX{'_BIAS' if given is not None else ''}")
        for sums in (True, False):
            kept = matrix(ROWS, COLUMNS, dtype, seed=2)
            kept = kept if activation == "gelu" else mask_of(kept)
            expected, total = composed(GRADIENT, left, right, kept, activation, sums)
            found, of_bias = GRADIENT(left, right, kept, activation, sums)
            near(found, expected, before)
            near(of_bias, total, before.square().sum(0).sqrt() if sums else 0.0)
            ran.append(f"D{activation.upper()}{'_BGRAD' if sums else ''}")
    for of_left in (True, False):
        expected, total = composed(WITH_SUM, left, right, of_left)
        found, of_bias = WITH_SUM(left, right, of_left)
        near(found, expected)
        near(of_bias, total)
        ran.append("BGRADB" if of_left else "BGRADA")
    assert [one.epilogue for one in stand_in.ran] == ran, "each by the library, none by loops"


def test_a_form_is_asked_for_once_wherever_its_tensors_lie(stand_in):
    left, right = matrix(ROWS, INNER, torch.bfloat16), matrix(INNER, COLUMNS, torch.bfloat16)
    memory = torch.zeros(ROWS * INNER + 16, dtype=torch.bfloat16)
    start = -memory.data_ptr() % 32 // 2
    for behind, bytes_ in ((0, 32), (8, 16), (1, 2)):  # elements, and what the address is a multiple of
        moved = memory[start + behind :][: ROWS * INNER].view(ROWS, INNER).copy_(left)
        assert moved.data_ptr() & -moved.data_ptr() == bytes_ or behind == 0
        found, total = WITH_SUM(moved, right, True)
        near(found, left @ right)
        assert torch.equal(total, left.sum(1))
    assert stand_in.asked == 1 and len(stand_in.ran) == 2, "an odd address is left to loops"
    assert {one.handle for one in stand_in.ran} == {1}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(matrix(ROWS, INNER, torch.float32), matrix(INNER, COLUMNS, torch.float32), id="type"),
        pytest.param(matrix(ROWS, 12, torch.bfloat16), matrix(12, COLUMNS, torch.bfloat16), id="sizes"),
        pytest.param(matrix(2 * ROWS, INNER, torch.bfloat16).view(ROWS, 2, INNER)[:, :, ::2].flatten(1)[:, ::1],
                     matrix(INNER, COLUMNS, torch.bfloat16)[:, ::2], id="strides"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_done_by_loops(left, right, stand_in):
    found, total = WITH_SUM(left, right, False)
    assert torch.equal(found, left @ right) and torch.equal(total, right.sum(0)) and not stand_in.ran


def test_what_the_library_refuses_is_done_by_loops(stand_in):
    stand_in.refuses = ("GELU_AUX",)
    left, right = matrix(ROWS, INNER, torch.bfloat16), matrix(INNER, COLUMNS, torch.bfloat16)
    _, kept = ACTIVATION(left, right, None, "gelu")
    assert torch.equal(kept, left @ right) and not stand_in.ran
    ACTIVATION(left, right, right[0].contiguous(), "gelu")
    assert [one.epilogue for one in stand_in.ran] == ["GELU_AUX_BIAS"]


def test_what_was_not_tried_is_done_by_loops(monkeypatch):
    library = cublaslt.Cublaslt(made := StandIn(), "cpu")
    monkeypatch.setattr(cublaslt, "CUBLASLT", library)
    left, right = matrix(ROWS, INNER, torch.bfloat16), matrix(INNER, COLUMNS, torch.bfloat16)
    WITH_SUM(left, right, True)
    assert not made.ran
    call, _ = epilogues.prepared(WITH_SUM, left, right, True)
    library.choices(call)
    library.prefer(call, 1)
    WITH_SUM(left, right, True)
    assert [one.algorithm for one in made.ran] == [2]
    WITH_SUM(left.t().contiguous().t(), right, True)
    assert len(made.ran) == 1, "the same sizes in another layout are another form"


def test_flops_are_those_of_the_product():
    from torch.utils.flop_counter import FlopCounterMode

    left, right = matrix(ROWS, INNER, torch.bfloat16), matrix(INNER, COLUMNS, torch.bfloat16)
    with FlopCounterMode(display=False) as counted:
        WITH_SUM(left, right, True)
        ACTIVATION(left, right, None, "relu")
    assert counted.get_total_flops() == 2 * 2 * ROWS * INNER * COLUMNS


def test_the_library_itself_knows_every_attribute_by_number_and_size():
    """Its descriptors need no device."""
    library = cublaslt.CUBLASLT
    if not library.available():
        pytest.skip("torch has no cuBLASLt here")
    api = library._functions()
    product, written = ctypes.c_void_p(), ctypes.c_size_t()
    assert api.cublasLtMatmulDescCreate(ctypes.byref(product), cublaslt._COMPUTE_FP32, cublaslt._FP32) == 0
    values = {
        cublaslt._Descriptor.TRANSPOSE_A: ctypes.c_int32(1),
        cublaslt._Descriptor.TRANSPOSE_B: ctypes.c_int32(1),
        cublaslt._Descriptor.EPILOGUE: ctypes.c_uint32(int(cublaslt.Epilogue.GELU_GRADIENT | cublaslt.Epilogue.SUM)),
        cublaslt._Descriptor.BIAS_POINTER: ctypes.c_void_p(4096),
        cublaslt._Descriptor.AUX_POINTER: ctypes.c_void_p(8192),
        cublaslt._Descriptor.AUX_LD: ctypes.c_int64(128),
        cublaslt._Descriptor.AUX_TYPE: ctypes.c_int32(14),
        cublaslt._Descriptor.BIAS_TYPE: ctypes.c_int32(14),
    }
    assert set(values) == set(cublaslt._Descriptor)
    for attribute, value in values.items():
        library._set(product, attribute, value)
        back, size = type(value)(0), ctypes.c_size_t(ctypes.sizeof(value))
        read = api.cublasLtMatmulDescGetAttribute
        assert read(product, int(attribute), ctypes.byref(back), size, ctypes.byref(written)) == 0
        assert (back.value, written.value) == (value.value, size.value)
        with pytest.raises(cublaslt.Refused, match="invalid"):
            library._set(product, attribute, (ctypes.c_uint8 * 3)())
    layout = library._layout(cublaslt._Matrix(24, 40, 32), 14)
    for attribute, kind, expected in ((0, ctypes.c_uint32, 14), (2, ctypes.c_uint64, 24), (3, ctypes.c_uint64, 40),
                                      (4, ctypes.c_int64, 32)):  # fmt: skip
        back = kind(0)
        size = ctypes.c_size_t(ctypes.sizeof(back))
        read = api.cublasLtMatrixLayoutGetAttribute
        assert read(layout, attribute, ctypes.byref(back), size, ctypes.byref(written)) == 0
        assert back.value == expected
    preference = ctypes.c_void_p()
    assert api.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)) == 0
    for attribute, value in (
        (cublaslt._Preference.WORKSPACE, ctypes.c_uint64(cublaslt.WORKSPACE)),
        (cublaslt._Preference.REDUCTIONS, ctypes.c_uint32(cublaslt._IN_FP32)),
        *((cublaslt._Preference.ALIGNMENT_A + place, ctypes.c_uint32(16)) for place in range(4)),
    ):
        size = ctypes.c_size_t(ctypes.sizeof(value))
        assert api.cublasLtMatmulPreferenceSetAttribute(preference, int(attribute), ctypes.byref(value), size) == 0
    assert ctypes.sizeof(cublaslt._Found) == 96, "as in cublasLt.h"
