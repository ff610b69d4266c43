"""Rules as values: what a rule matches, what it decides, and the op table it speaks of. No files, no YAML."""

from __future__ import annotations

import enum
import operator as op
import re
from dataclasses import dataclass, field

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Attr


class Precision(enum.Enum):
    """What a rule can ask of a node."""

    LOW = "low"  # run in the 16-bit type
    FP32 = "fp32"  # run in FP32
    WIDEST = "widest"  # run in the widest of its float inputs (torch.autocast's "promote")
    FOLLOW = "follow"  # whatever costs least memory traffic
    KEEP = "keep"  # untouched: inputs and outputs as captured


@dataclass(frozen=True, slots=True)
class OpInfo:
    """What the op table (`rules/ops.yaml`) says of one op.

    Args:
        name: canonical name, `aten.linear`.
        family: the family it belongs to.
        exact: rounding commutes with it (views, copies, selection, relu, max): running it in the low type on rounded
            inputs gives the rounded FP32 result, to the bit.
        promotes: the op itself takes float operands of different types and computes in the widest, with no cast.
        keep: slots whose operands stay in their captured type whatever the node's precision (running statistics,
            weights of a normalisation).
        any: slots whose element type does not matter to the result (shape-only arguments, comparisons).
        emulate: `device.dtype` pairs (`cpu.fp16`) on which the low type is emulated: FP32 arithmetic on rounded inputs.
    """

    name: str
    family: str
    exact: bool = False
    promotes: bool = False
    keep: frozenset[str] = frozenset()
    any: frozenset[str] = frozenset()
    emulate: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OpTable:
    """Every op that the project knows, by canonical name; an op that is not in it belongs to the family `unknown`."""

    ops: dict[str, OpInfo]
    families: dict[str, str]  # name -> one-line description

    def info(self, op: str) -> OpInfo:
        """The entry of `op`, or one of the family `unknown`."""
        found = self.ops.get(op)
        return found if found is not None else OpInfo(op, "unknown")


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say of one node.

    Args:
        precision: what is asked of it.
        rule: `file:line` of the rule that decided; empty where no rule did (a pin of the model, a guard).
        reason: one sentence for people.
        math: type to accumulate in, `None` for the op's own default.
        backward: precision of its gradients, `None` for the same as forward.
        backward_math: type to accumulate its gradients in.
    """

    precision: Precision
    rule: str = ""
    reason: str = ""
    math: DType | None = None
    backward: Precision | None = None
    backward_math: DType | None = None

    def __str__(self) -> str:
        asked = self.precision.value
        asked += f" math={self.math.short}" if self.math else ""
        asked += f" backward={self.backward.value}" if self.backward else ""
        asked += f" backward_math={self.backward_math.short}" if self.backward_math else ""
        return asked + (f"  by {self.rule}" if self.rule else "") + f"  ({self.reason})"


@dataclass(frozen=True, slots=True)
class Context:
    """What planning is for: the low type and the device.

    Args:
        low: the 16-bit type.
        device: `cpu`, `cuda`, …
    """

    low: DType
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A bound on a number, such as `> 8192`: an operator (`<`, `<=`, `>`, `>=`, `==`, `!=`) and the number."""

    operator: str
    bound: float

    def holds(self, number: float) -> bool:
        """True where `number` satisfies the bound."""
        return bool(_OPERATORS[self.operator](number, self.bound))


_OPERATORS = {"<": op.lt, "<=": op.le, ">": op.gt, ">=": op.ge, "==": op.eq, "!=": op.ne}


@dataclass(frozen=True, slots=True)
class Matcher:
    """The conditions of a rule; all that are given must hold, and an empty one matches every node.

    Args:
        family: names of op families.
        op: globs on the canonical op name.
        module: globs on the qualified module name (`*` crosses dots).
        module_type: globs on the class name of the module.
        node: regular expressions searched in the node name.
        attr: attribute names with the values that they must have.
        inputs: captured types; every floating-point operand must have one of them.
        reduction_size: bound on the number of elements that one output element sums over.
        absmax: bound on the calibrated largest magnitude of the node's inputs and outputs.
        phase: `forward` or `backward`.
        device: device types (`cpu`, `cuda`).
        dtype: low types for which the rule holds.
    """

    family: tuple[str, ...] = ()
    op: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    module_type: tuple[str, ...] = ()
    node: tuple[re.Pattern[str], ...] = ()
    attr: tuple[tuple[str, Attr], ...] = ()
    inputs: frozenset[DType] = frozenset()
    reduction_size: Comparison | None = None
    absmax: Comparison | None = None
    phase: str | None = None
    device: tuple[str, ...] = ()
    dtype: tuple[DType, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        where: `file:line`.
        match: its conditions.
        precision: what it asks; `None` leaves what earlier rules said (a rule that only sets `math` or `backward`).
        math: type to accumulate in.
        backward: precision of the gradients.
        backward_math: type to accumulate the gradients in.
        why: the author's reason.
    """

    where: str
    match: Matcher
    precision: Precision | None = None
    math: DType | None = None
    backward: Precision | None = None
    backward_math: DType | None = None

    def __str__(self) -> str:
        asked = self.precision.value
        asked += f" math={self.math.short}" if self.math else ""
        asked += f" backward={self.backward.value}" if self.backward else ""
        asked += f" backward_math={self.backward_math.short}" if self.backward_math else ""
        return asked + (f"  by {self.rule}" if self.rule else "") + f"  ({self.reason})"

    why: str = ""


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules in the order in which they are read; the last match wins.

    Made by `amp_compiler.policy.loader.load_rules`.

    Args:
        name: preset name or path.
        rules: every rule, those of the extended files first.
        ops: the op table.
        loss_scale: the `loss_scale` section, merged over `extends`.
        weights: the `weights` section, merged over `extends`.
    """

    name: str
    rules: tuple[Rule, ...]
    ops: OpTable
    loss_scale: dict[str, object] = field(default_factory=dict)
    weights: dict[str, object] = field(default_factory=dict)
