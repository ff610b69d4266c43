"""What ONNX says of types: element types in the project's terms, and what an op takes and gives by `onnx.defs`."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.model.contrib import contrib_schemas

LIST_OPS = frozenset(
    {
        "SequenceConstruct", "SequenceEmpty", "SequenceInsert", "SequenceErase", "SequenceAt", "SequenceLength",
        "SplitToSequence", "ConcatFromSequence",
    }
)  # fmt: skip
"""The ops of sequences of tensors, which hold what was put into them in one type."""
_WRITTEN_AS = {"Clip": "Where", "SoftmaxCrossEntropyLoss": "NegativeLogLikelihoodLoss"}
"""Ops that a runtime writes out by ONNX's own definition of them, whose types come later in this op of it."""
FLOAT8 = ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ")
_BY_NAME = {
    "FLOAT": DType.FLOAT32, "DOUBLE": DType.FLOAT64, "FLOAT16": DType.FLOAT16, "BFLOAT16": DType.BFLOAT16,
    "INT8": DType.INT8, "INT16": DType.INT16, "INT32": DType.INT32, "INT64": DType.INT64,
    "UINT8": DType.UINT8, "UINT16": DType.UINT16, "UINT32": DType.UINT32, "UINT64": DType.UINT64,
    "BOOL": DType.BOOL, "COMPLEX64": DType.COMPLEX64, "COMPLEX128": DType.COMPLEX128,
    **dict.fromkeys(FLOAT8, DType.FLOAT8),
}  # fmt: skip
_TO_IR = {
    dtype: ir.DataType[name] for name, dtype in _BY_NAME.items() if name in ("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16")
}


def neutral_type(element: int) -> DType:
    """The element type of an ONNX type number (`onnx.TensorProto.DataType`).

    Example:
        >>> neutral_type(onnx.TensorProto.FLOAT).short
        'fp32'
    """
    try:
        name = ir.DataType(element).name
    except ValueError:
        return DType.OTHER
    return _BY_NAME.get(name, DType.OTHER)


def ir_type(dtype: DType) -> ir.DataType:
    """The `onnx_ir` type of FP64, FP32, FP16 or BF16."""
    return _TO_IR[dtype]


def canonical_domain(domain: str) -> str:
    """The name of a domain: `ai.onnx` is the default one, which is written empty."""
    return "" if domain == "ai.onnx" else domain


def canonical_op(domain: str, op_type: str) -> str:
    """The neutral name of an op: `onnx.Gemm`, and `domain.Op` for other domains."""
    return f"{canonical_domain(domain) or 'onnx'}.{op_type}"


@dataclass(frozen=True)
class Formal:
    """One formal input or output.

    Args:
        name: as in the schema; `inputs.2` for the third of a variadic one.
        variable: name of its type variable, or its type where it has but one.
        allowed: the element types of tensors that it may have.
    """

    name: str
    variable: str
    allowed: frozenset[DType]


@dataclass(frozen=True)
class Signature:
    """What one version of an op takes and gives, read from its schema."""

    inputs: tuple[tuple[str, str, bool], ...]  # name, type variable, variadic
    outputs: tuple[tuple[str, str, bool], ...]
    types: dict[str, frozenset[DType]]

    def input(self, index: int) -> Formal | None:
        """The formal input at a position; `None` beyond the last."""
        return self._formal(self.inputs, index)

    def output(self, index: int) -> Formal | None:
        """The formal output at a position; `None` beyond the last."""
        return self._formal(self.outputs, index)

    def _formal(self, formals: tuple[tuple[str, str, bool], ...], index: int) -> Formal | None:
        if not formals:
            return None
        name, variable, variadic = formals[min(index, len(formals) - 1)]
        if variadic:
            name = f"{name}.{index - len(formals) + 1}"
        elif index >= len(formals):
            return None
        return Formal(name, variable, self.types[variable])


@functools.lru_cache(maxsize=4096)
def signature_of(domain: str, op_type: str, version: int) -> Signature | None:
    """The signature of an op in one opset version; `None` where neither onnx nor ONNX Runtime know it.

    Args:
        domain: canonical domain.
        op_type: name of the op.
        version: opset version of the domain.
    """
    try:
        schema: onnx.defs.OpSchema | None = onnx.defs.get_schema(op_type, version, domain)
    except onnx.defs.SchemaError:
        schema = contrib_schemas().get((domain, op_type))
    if schema is None:
        return None
    constraints = {entry.type_param_str: entry.allowed_type_strs for entry in schema.type_constraints}
    types: dict[str, frozenset[DType]] = {}
    for put in (*schema.inputs, *schema.outputs):
        types[put.type_str] = frozenset(map(_parse, constraints.get(put.type_str, [put.type_str])))
    inner = signature_of("", _WRITTEN_AS[op_type], version) if not domain and op_type in _WRITTEN_AS else None
    if inner is not None:
        types["T"] &= inner.types["T"]
    variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
    return Signature(
        tuple((put.name, put.type_str, put.option == variadic) for put in schema.inputs),
        tuple((put.name, put.type_str, put.option == variadic) for put in schema.outputs),
        types,
    )


@functools.lru_cache(maxsize=4096)
def first_version(domain: str, op_type: str, version: int, slot: int, low: DType) -> int | None:
    """The first opset version after `version` in which input `slot` of an op may have the low type; `None`: in none."""
    for later in range(version + 1, (onnx.defs.onnx_opset_version() if domain == "" else version) + 1):
        signature = signature_of(domain, op_type, later)
        formal = signature.input(slot) if signature is not None else None
        if formal is not None and low in formal.allowed:
            return later
    return None


@functools.cache
def _parse(text: str) -> DType:
    """`tensor(float16)` as a type, as a sequence of such is one; optionals and strings are `OTHER`."""
    if text.startswith("seq(tensor("):
        text = text[len("seq(") : -1]
    if not text.startswith("tensor("):
        return DType.OTHER
    name = text[len("tensor(") : -1].upper()
    return _BY_NAME.get(name, DType.OTHER)
