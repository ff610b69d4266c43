"""`default` gives every op in torch.autocast's lists the type that torch.autocast gives it."""

import re
from pathlib import Path

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, PrecisionGraph
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.matching import RuleMatcher
from amp_compiler.policy.rules import Context, Precision

RULES = load_rules("default")
LOW, FP32, PROMOTE = "low", "fp32", "promote"


def decide(name: str, low: DType, device: str) -> Precision:
    matcher = RuleMatcher(RULES, PrecisionGraph(device), Context(low, device))
    op = f"aten.{name}"
    assert op in RULES.ops.ops, f"{op} is not in the op table"
    decision = matcher.decide(Node("y", op, (), ()))
    assert decision is not None and decision.rule.startswith("default.yaml:") and decision.reason
    return decision.precision


def agrees(name: str, wanted: str, decided: Precision) -> bool:
    """Whether a decision is autocast's policy; an op with which rounding commutes may also follow."""
    if wanted == PROMOTE:
        return decided is Precision.WIDEST or (decided is Precision.FOLLOW and RULES.ops.info(f"aten.{name}").exact)
    return decided is {LOW: Precision.LOW, FP32: Precision.FP32}[wanted]


def canonical(name: str) -> str:
    return name.strip("_") if name.startswith("__") else name


# ---- CUDA: the lists of torch's own tests, and those in its headers

CUDA_LISTS = {
    "torch_fp16": LOW, "nn_fp16": LOW, "linalg_fp16": LOW, "methods_fp16": LOW,
    "torch_fp32": FP32, "nn_fp32": FP32, "methods_fp32": FP32, "banned": FP32,
    "torch_need_autocast_promote": PROMOTE, "torch_expect_builtin_promote": PROMOTE,
    "methods_expect_builtin_promote": PROMOTE,
}  # fmt: skip
CUDA_CASES = sorted(
    {
        (canonical(entry[0]), wanted)
        for listed, wanted in CUDA_LISTS.items()
        for entry in getattr(AutocastTestLists(torch.device("cpu")), listed)
    }
)
PLACES = [(DType.FLOAT16, "cuda"), (DType.BFLOAT16, "cuda"), (DType.FLOAT16, "cpu"), (DType.FLOAT16, "xpu")]


@pytest.mark.parametrize(("low", "device"), PLACES, ids=lambda part: getattr(part, "short", part))
def test_cuda_lists_of_the_tests(low, device):
    wrong = {name: want for name, want in CUDA_CASES if not agrees(name, want, decide(name, low, device))}
    assert not wrong
    assert len(CUDA_CASES) > 80


MACROS = {
    "AT_FORALL_LOWER_PRECISION_FP": LOW,
    "AT_FORALL_FP32": FP32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": FP32,
    "AT_FORALL_PROMOTE": PROMOTE,
}


def header_lists() -> dict[str, str]:
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    if not header.exists():
        pytest.skip("this build of torch comes without headers")
    text = header.read_text().replace("\\\n", " ")
    result = {}
    for macro, wanted in MACROS.items():
        body = re.search(rf"#define {macro}\(_\)(.*)", text)
        assert body is not None, macro
        for name in re.findall(r"_\((\w+)", body[1]):
            result[name] = wanted
    return result


def test_cuda_lists_of_the_headers():
    listed = header_lists()
    assert len(listed) > 90
    wrong = {name: want for name, want in listed.items() if not agrees(name, want, decide(name, DType.FLOAT16, "cuda"))}
    assert not wrong


# ---- CPU in bf16: what torch.autocast does, op by op, when it is run

CPU_LISTS = (
    "torch_16",
    "nn_16",
    "torch_fp32",
    "nn_fp32",
    "torch_need_autocast_promote",
    "torch_expect_builtin_promote",
)
CPU_CASES = [
    (listed, entry) for listed in CPU_LISTS for entry in getattr(AutocastCPUTestLists(torch.device("cpu")), listed)
]


def run_under_autocast(listed: str, entry: tuple) -> tuple[torch.dtype, torch.dtype]:
    """The types of the result and of the widest operand."""
    name, args, *rest = entry
    options = rest[0] if rest and isinstance(rest[0], dict) else {}
    module = torch._C._nn if listed.startswith("nn_") else torch
    # The lists hold fp16 operands beside FP32 ones for the promoting ops; autocast in bf16 leaves fp16 alone.
    arguments = torch.utils._pytree.tree_map(
        lambda item: item.bfloat16() if isinstance(item, torch.Tensor) and item.dtype is torch.float16 else item, args
    )
    with torch.autocast("cpu", torch.bfloat16):
        result = getattr(module, name)(*arguments, **options)
    first = result[0] if isinstance(result, tuple) else result
    floats = [
        item.dtype
        for item in torch.utils._pytree.tree_leaves(arguments)
        if isinstance(item, torch.Tensor) and item.is_floating_point()
    ]
    return first.dtype, torch.float32 if torch.float32 in floats else torch.bfloat16


@pytest.mark.parametrize(("listed", "entry"), CPU_CASES, ids=lambda part: part[0] if isinstance(part, tuple) else part)
def test_cpu_lists_as_they_run(listed, entry):
    name = canonical(entry[0])
    result, widest = run_under_autocast(listed, entry)
    decided = decide(name, DType.BFLOAT16, "cpu")
    if result is torch.bool:
        assert agrees(name, PROMOTE, decided)
        return
    wanted = {
        Precision.LOW: torch.bfloat16,
        Precision.FP32: torch.float32,
        Precision.WIDEST: widest,
        Precision.FOLLOW: widest,
    }[decided]
    assert result is wanted, f"autocast gives {result}, default decides {decided.value}"


def with_kernels(key: str) -> set[str]:
    """Names of the ATen ops for which torch.autocast has registered something."""
    result = set()
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        full = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
        try:
            registered = torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
        except RuntimeError:  # an op of TorchScript only
            continue
        if registered:
            result.add(schema.name.removeprefix("aten::"))
    return result


CPU_PROMOTES = {"cat", "stack", "index_copy"}


def test_every_op_on_a_cpu_list_is_low_or_fp32_or_promotes():
    listed = with_kernels("AutocastCPU")
    assert len(listed) > 100
    for name in listed:
        decided = decide(name, DType.BFLOAT16, "cpu")
        if name in CPU_PROMOTES:
            assert agrees(name, PROMOTE, decided), name
        else:
            assert decided in (Precision.LOW, Precision.FP32), name


# ---- and nothing else is low or fp32, but for these families and ops, each with its reason

BEYOND_FAMILIES = {
    "recurrent": "made of linear layers, which are low; the state in between is kept low as well, as on CUDA",
    "convolution": "other names of the listed convolutions, which a graph holds after it was lowered",
    "attention": "other names of scaled_dot_product_attention, which a graph holds after it was lowered",
    "loss": "made of log_softmax and nll_loss, or the kernel of a listed loss",
    "linalg": "there is no 16-bit kernel: autocast raises",
    "special": "there is no 16-bit kernel: autocast raises",
    "fft": "there is no bf16 kernel: autocast raises",
    "complex": "there is no complex type of 2 x bf16: autocast raises",
    "quantization": "fake quantisation in 16 bits would round twice",
    "unknown": "nothing is known of it",
}
LOGARITHMS = dict.fromkeys(("logcumsumexp", "_logcumsumexp"), "in BF16 its gradient is lost")
BEYOND = {
    **LOGARITHMS,
    "chain_matmul": "made of mm, which is low",
    "einsum": "made of bmm, which is low",
    "inner": "made of mm, which is low",
    "linalg_matmul": "another name of matmul",
    "linalg_multi_dot": "made of mm, which is low",
    "tensordot": "made of mm, which is low",
    "mkldnn_linear": "the kernel of linear",
    "_grouped_mm": "mm for several matrices at once",
    "_prelu_kernel": "the kernel of prelu",
    "_cdist_forward": "the kernel of cdist",
    "_euclidean_dist": "a part of cdist",
    "pad": "made of reflection_pad and replication_pad, by its mode",
}


CUDA_BEYOND_FAMILIES = {
    **BEYOND_FAMILIES,
    "softmax": "other names of softmax and log_softmax, and the masked ones",
    "normalization": "the kernels of layer_norm, group_norm and rms_norm",
    "distance": "made of norm or sum, which are FP32",
    "resample": "other names of the listed upsampling ops",
    "matmul": "other names of the listed products",
}
CUDA_BEYOND = {
    **LOGARITHMS,
    "_prelu_kernel": "the kernel of prelu",
    "arccos": "another name of acos",
    "arcsin": "another name of asin",
    "float_power": "a pow",
    "special_erfinv": "another name of erfinv",
    "special_expm1": "another name of expm1",
    "special_log1p": "another name of log1p",
    "special_logsumexp": "another name of logsumexp",
}


PLACES_BEYOND = {
    "AutocastCPU": (DType.BFLOAT16, "cpu", BEYOND_FAMILIES, BEYOND),
    "AutocastCUDA": (DType.FLOAT16, "cuda", CUDA_BEYOND_FAMILIES, CUDA_BEYOND),
}


@pytest.mark.parametrize("key", PLACES_BEYOND)
def test_nothing_else_is_low_or_fp32_and_every_exception_is_still_needed(key):
    """Ops for which autocast has nothing registered, in any mode."""
    low, device, families, ops = PLACES_BEYOND[key]
    listed, result = with_kernels(key), set()
    matcher = RuleMatcher(RULES, PrecisionGraph(device), Context(low, device))
    for op, info in RULES.ops.ops.items():
        namespace, name = op.split(".", 1)
        if namespace == "aten" and name not in listed and info.family not in families:
            for mode in ("constant", "reflect") if device == "cpu" else ("",):
                decision = matcher.decide(Node("y", op, (), (), {"mode": mode} if mode else {}))
                if decision.precision in (Precision.LOW, Precision.FP32):
                    result.add(name)
    assert result == set(ops) and all(ops.values()) and all(families.values())


def test_only_exact_ops_follow():
    for low, device in [*PLACES, (DType.BFLOAT16, "cpu")]:
        matcher = RuleMatcher(RULES, PrecisionGraph(device), Context(low, device))
        for op, info in RULES.ops.ops.items():
            decision = matcher.decide(Node("y", op, (), ()))
            assert decision.precision is not Precision.FOLLOW or info.exact, op
