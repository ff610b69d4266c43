"""The op table against torch and onnx themselves: names, argument names, promotion and exactness."""

import collections
import dataclasses
from itertools import islice

import onnx.defs
import pytest
import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from amp_compiler.errors import RuleError
from amp_compiler.onnx.model.contrib import contrib_schemas
from amp_compiler.policy.op_table import op_table, parse_op_table
from amp_compiler.policy.reduction_size import SIZES

TABLE = op_table()
ATEN = sorted(name.removeprefix("aten.") for name in TABLE.ops if name.startswith("aten."))
SINCE_2_14 = {"linalg_matrix_sqrth"}
X = torch.linspace(-2.0, 3.0, 24).reshape(2, 3, 4)


def schemas():
    """ATen schemas by canonical name."""
    result = collections.defaultdict(list)
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::"):
            name = schema.name.removeprefix("aten::")
            result[name[:-1] if name.endswith("_") and not name.endswith("__") else name].append(schema)
    return result


SCHEMAS = schemas()


def test_every_aten_op_exists_in_torch():
    missing = [name for name in ATEN if name not in SCHEMAS and name not in SINCE_2_14]
    # Other versions of torch may lack a few of the names that the table was written with.
    assert len(missing) <= (0 if torch.__version__.startswith("2.13") else 20), missing


def test_coverage():
    assert len(ATEN) >= 900
    assert len(TABLE.families) >= 25
    used = {info.family for info in TABLE.ops.values()}
    assert used | {"unknown"} == set(TABLE.families)
    assert all(len(about) > 10 and "\n" not in about for about in TABLE.families.values())


def test_every_onnx_op_is_in_the_table():
    takes_floats = {
        schema.name
        for schema in onnx.defs.get_all_schemas()
        if schema.domain == "" and any("tensor(float)" in put.types for put in (*schema.inputs, *schema.outputs))
    }
    assert {f"onnx.{name}" for name in takes_floats} <= set(TABLE.ops)
    own = {name.removeprefix("onnx.") for name in TABLE.ops if name.startswith("onnx.")}
    assert all(onnx.defs.has(name) or ("", name) in contrib_schemas() for name in own)


def test_slots_are_names_of_schema_arguments():
    """Some ops of a family may lack a slot that it gives to all; one that no op of it has is a mistake."""
    by_family = collections.defaultdict(set)
    for name, info in TABLE.ops.items():
        short = name.split(".", 1)[1]
        if name.startswith("aten."):
            known = {argument.name for schema in SCHEMAS[short] for argument in schema.arguments}
        else:
            domain, _, op = name.removeprefix("onnx.").rpartition(".")
            contrib = contrib_schemas().get((domain, op))
            schema = contrib or onnx.defs.get_schema(op, domain)
            known = {put.name for put in schema.inputs}
        by_family[info.family] |= known
        if info.keep and name.startswith("onnx."):
            assert info.keep <= known, name
    for name, info in TABLE.ops.items():
        assert info.keep | info.any | info.indices <= by_family[info.family], name


def test_emulation_is_asked_for_known_devices_and_types():
    for info in TABLE.ops.values():
        assert info.emulate <= {"cpu.fp16", "cpu.bf16", "plain_cpu.bf16", "cuda.fp16", "cuda.bf16"}


PRODUCTS = ("matmul", "convolution", "attention", "recurrent")


def test_products_are_emulated_on_a_cpu_in_fp16_and_without_kernels_in_bf16():
    products = [info for info in TABLE.ops.values() if info.family in PRODUCTS]
    assert all(info.emulate == {"cpu.fp16", "plain_cpu.bf16"} for info in products)
    plain = TABLE.for_plain_cpu()
    assert all({"cpu.fp16", "cpu.bf16"} <= plain.info(info.name).emulate for info in products)
    assert plain.info("aten.rrelu") == TABLE.info("aten.rrelu")


# ---- promotes: with (bf16, fp32) operands the op itself computes in FP32

CALLS = {
    "rsub": lambda a, b: torch.rsub(a, b),
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "addcdiv": lambda a, b: torch.addcdiv(a, b, b),
    "outer": lambda a, b: torch.outer(a.flatten(), b.flatten()),
    "ger": lambda a, b: torch.ger(a.flatten(), b.flatten()),
    "kron": lambda a, b: torch.kron(a, b),
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "equal": lambda a, b: torch.tensor(torch.equal(a, b)),
    **{
        name: lambda a, b, name=name: getattr(torch, name)([a, b])
        for name in ("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "row_stack")
    },
    "column_stack": lambda a, b: torch.column_stack([a, b]),
    "_stack": lambda a, b: torch.ops.aten._stack([a, b]),
    "block_diag": lambda a, b: torch.block_diag(a[0], b[0]),
}
PROMOTING = sorted(name.removeprefix("aten.") for name, info in TABLE.ops.items() if info.promotes)


def call(name, first, second):
    result = CALLS[name] if name in CALLS else getattr(torch.ops.aten, name)
    return result(first, second)


@pytest.mark.parametrize("name", PROMOTING)
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_promoting_ops_take_mixed_types(name, low):
    first, second = X.abs() + 0.5, X.flip(0).abs() + 1.0
    for mixed, wide in (((first.to(low), second), (first.to(low).float(), second)), ((first, second.to(low)), None)):
        result = call(name, *mixed)
        assert result.dtype in (torch.float32, torch.bool)
        if wide is not None:
            torch.testing.assert_close(result, call(name, *wide), rtol=0, atol=0)


def test_ops_that_do_not_promote_are_not_marked():
    for name in ("lerp", "linear", "prelu", "index_put", "scatter_add", "heaviside", "cross", "isclose", "dot"):
        assert not TABLE.info(f"aten.{name}").promotes


# ---- exact: op(round(x)) == round(op(x)), to the bit


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rounding_commutes_with_exact_ops(low):
    """Of torch's own list of ops those that the table calls exact, but for one that reads memory as it lies."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    seen = set()
    for op in op_db:
        names = op.aten_name, op.name.replace(".", "_"), op.name.rpartition(".")[2]
        exact = any(TABLE.info(f"aten.{name}").exact for name in names) and low in op.supported_dtypes("cpu")
        skipped = not exact or op.name == "as_strided" or "empty" in op.name  # which has no values
        for sample in () if skipped else islice(op.sample_inputs("cpu", torch.float32), 4):
            inputs = sample.input, sample.args, sample.kwargs
            first, others, named = tree_map(lambda one: one.to(low) if is_fp32(one) else one, inputs)
            result, wanted = op(first, *others, **named), op(inputs[0], *inputs[1], **inputs[2])
            for one, other in zip(tree_leaves(result), tree_leaves(wanted), strict=True):
                if is_fp32(other):
                    torch.testing.assert_close(one, other.to(low), rtol=0, atol=0, equal_nan=True, msg=op.name)
            seen.add(op.name)
    assert len(seen) > 100


def is_fp32(value):
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def test_families_of_views_and_movement_are_exact_and_arithmetic_is_not():
    inexact = {
        "add", "mul", "sum", "gelu", "max", "topk", "sort", "clamp", "dropout", "avg_pool2d", "index_put", "scatter",
    }  # fmt: skip
    assert not any(TABLE.info(f"aten.{name}").exact for name in inexact)
    views = [info for info in TABLE.ops.values() if info.family in ("view", "movement", "index")]
    assert len(views) > 100
    assert all(info.exact for info in views)


# ---- kernels that compute in FP32 by themselves


ONCE = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "rsub": lambda x, y: torch.rsub(x, y),
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: torch.relu(x),
    "transpose": lambda x, y: x.transpose(1, 2),
    "expand": lambda x, y: y.expand(5, 2, 3, 4),
    "cat": lambda x, y: torch.cat([x, y.expand_as(x)]),
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked_fill": lambda x, y: x.masked_fill(x > 1, 0.5),
    "constant_pad_nd": lambda x, y: F.pad(x, (1, 1)),
}


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", ONCE)
def test_what_accumulates_is_fp32_arithmetic_to_the_bit_both_ways(name, low):
    """The result and the gradients of the 16-bit kernel are those of FP32 arithmetic, rounded once at the end."""
    if name != "constant_pad_nd":
        assert TABLE.info(f"aten.{name}").accumulates == {"all"}
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 3, 4, generator=generator).to(low), torch.randn(4, generator=generator).to(low)

    def numbers(wide):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, y)]
        result = ONCE[name](*[leaf.float() if wide else leaf for leaf in leaves]).to(low)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(low)
        return result, *torch.autograd.grad(result, leaves, weights, allow_unused=True)

    for one, other in zip(numbers(wide=False), numbers(wide=True), strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_products_accumulate_and_what_rounds_on_the_way_does_not():
    for name in ("linear", "conv2d", "scaled_dot_product_attention", "lstm"):
        assert TABLE.info(f"aten.{name}").accumulates_on("cuda")
    for name in ("mul", "gelu", "softmax", "layer_norm", "batch_norm", "mean", "embedding", "unfold", "max_pool2d"):
        assert not TABLE.info(f"aten.{name}").accumulates_on("cpu")


# ---- mistakes in a table

WORDS = {"moves": {"", "shape", "place", "index"}, "sums": {"", *SIZES}, "fp8": {"", "product", "convolution"}}


def test_every_field_has_its_type_and_its_words():
    for info in TABLE.ops.values():
        for field in dataclasses.fields(info)[2:]:
            value = getattr(info, field.name)
            assert type(value) is type(field.default), (info.name, field.name)
            assert not isinstance(value, frozenset) or all(type(word) is str for word in value), (info.name, field.name)
            assert value in WORDS.get(field.name, [value]), (info.name, field.name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\n", "damaged: 'families'"),
        ("families: {a: {aten: [x]}}\n", "in the family 'a': 'about'"),
        ("families: {a: {about: text, aten: [x], exakt: true}}\n", "'exakt'"),
        ("families: {a: {about: text, aten: [x]}, b: {about: text, aten: [x]}}\n", "'aten.x' is in 'a' too"),
        ("families: {a: {about: text, aten: [x], special: {aten.y: {}}}}\n", "which 'a' does not hold"),
        ("families: {a: {about: text, aten: [x], exact: 1}}\n", "'exact' is 1, which is not a bool"),
    ],
)
def test_wrong_tables(text, message):
    with pytest.raises(RuleError, match=message) as caught:
        parse_op_table(text, "table.yaml")
    assert caught.value.line == 1
