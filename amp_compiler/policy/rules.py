"""Rules as values: what a rule matches, what it decides, and the op table it speaks of. No files, no YAML."""

from __future__ import annotations

import enum
import operator as op
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, PrecisionGraph
from amp_compiler.policy.marks import Mark

UNKNOWN = "unknown"  # the family of an op that the table does not hold
PLAIN_CPU = "plain_cpu"  # in the pairs of `emulate`: a CPU for which torch has no fast BF16 kernels


class Precision(enum.Enum):
    """What a rule can ask of a node."""

    LOW = "low"  # run in the 16-bit type
    FP32 = "fp32"  # run in FP32
    WIDEST = "widest"  # run in the widest of its float inputs (torch.autocast's "promote")
    BETWEEN = "between"  # run low between nodes that do, where nothing in FP32 stands above; else in FP32
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
            `plain_cpu` is a CPU for which torch has no fast BF16 kernels.
        accumulates: devices (`all`, `onnx`) whose 16-bit kernels compute in FP32 inside, forward and backward, and
            round once, at the end: `math: fp32` adds nothing there.
        moves: what it does with elements where it computes none: `shape` (a view: same memory, another shape), `place`
            (copies to other places), `index` (picks by index or mask); empty for an op that computes.
        sums: how the elements that one output element sums over are counted, a key of `reduction_size.SIZES`; empty
            where nothing is summed, or nobody knows.
        factors: its operands are factors of a long product: an element that the low type makes zero does not count.
        carries: it hands the magnitude of its operands on to what reads it.
        casts: an explicit cast, which the model itself asks for.
        quantized: a part of quantised arithmetic, which is left intact.
        masks: slots that may hold a mask: numbers far below all others, which stand for minus infinity.
        squashes: it makes numbers between fixed bounds, such as probabilities, of any.
        probabilities: slots that may hold probabilities, of which it takes the logarithm.
        plain: it computes element by element, moves elements or adds them up: what it makes of numbers that are known
            to every bit (positions, sizes, inputs of the model) is as well known as they are.
        positions: it counts: a float result is a row of positions.
        steps: a small change of an operand may change its result by a whole step: comparisons, rounding.
        periodic: what counts of its operands is the absolute error: sine and cosine.
        indices: slots whose numbers become sizes, indices or coordinates.
        fp8: how it is computed of FP8 operands, `product` or `convolution`; empty where it is not.
    """

    name: str
    family: str
    exact: bool = False
    promotes: bool = False
    keep: frozenset[str] = frozenset()
    any: frozenset[str] = frozenset()
    emulate: frozenset[str] = frozenset()
    accumulates: frozenset[str] = frozenset()
    moves: str = ""
    sums: str = ""
    factors: bool = False
    carries: bool = False
    casts: bool = False
    quantized: bool = False
    masks: frozenset[str] = frozenset()
    squashes: bool = False
    probabilities: frozenset[str] = frozenset()
    plain: bool = False
    positions: bool = False
    steps: bool = False
    periodic: bool = False
    indices: frozenset[str] = frozenset()
    fp8: str = ""

    def accumulates_on(self, device: str) -> bool:
        """True where the kernels of a device compute in FP32 by themselves.

        Args:
            device: device type (`cpu`, `cuda`, …; `onnx` for an ONNX model).
        """
        return "all" in self.accumulates or device in self.accumulates


@dataclass(frozen=True, slots=True)
class OpTable:
    """Every op that the project knows, by canonical name; an op that is not in it belongs to the family `unknown`."""

    ops: dict[str, OpInfo]
    families: dict[str, str]  # name -> one-line description

    def info(self, op: str) -> OpInfo:
        """The entry of `op`, or one of the family `unknown`."""
        known = self.ops.get(op)
        return known if known is not None else OpInfo(op, UNKNOWN)

    def without_kept(self, family: str) -> OpTable:
        """The table in which no operand of a family's ops stays as captured: all take the type of the data.

        Kernels of CUDA, which some ops lack for parameters of another type, are there then.

        Args:
            family: the family.
        """
        nothing: frozenset[str] = frozenset()
        changed = {
            name: replace(
                info,
                keep=nothing,
                emulate=frozenset(pair for pair in info.emulate if not pair.startswith("cuda.")),
                # Kernels of 16-bit statistics, which they update, are not to be surrounded by casts.
                accumulates=frozenset({"all"}) if "running_mean" in info.keep else info.accumulates,
            )
            for name, info in self.ops.items()
            if info.family == family
        }
        return OpTable({**self.ops, **changed}, self.families)

    def for_plain_cpu(self) -> OpTable:
        """The table of a CPU that is a `plain_cpu` in the pairs of `emulate`: what they say of it holds for `cpu`."""
        ops = dict(self.ops)
        for name, info in self.ops.items():
            kinds = [pair.removeprefix(PLAIN_CPU) for pair in info.emulate if pair.startswith(PLAIN_CPU)]
            if kinds:
                ops[name] = replace(info, emulate=info.emulate | {f"cpu{kind}" for kind in kinds})
        return OpTable(ops, self.families)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the rules say of one node.

    Args:
        precision: what is asked of it.
        rule: `file:line` of the rule that decided; empty where no rule did (a pin of the model, a guard).
        reason: one sentence for people.
        math: type that it computes in, `None` for the op's own default.
        backward: precision of its gradients, `None` for the same as forward.
        backward_math: type that its gradients are computed in.
        math_rule: `file:line` of the rule that said `math`.
        refusal: what to do instead, where the rule refuses the node; else empty.
    """

    precision: Precision
    rule: str = ""
    reason: str = ""
    math: DType | Fp8 | None = None
    backward: Precision | None = None
    backward_math: DType | Fp8 | None = None
    math_rule: str = ""
    refusal: str = ""

    def __str__(self) -> str:
        words = "refused" if self.refusal else self.precision.value
        words += f" math={self.math.short}" if self.math else ""
        words += f" backward={self.backward.value}" if self.backward else ""
        words += f" backward_math={self.backward_math.short}" if self.backward_math else ""
        return words + (f"  by {self.rule}" if self.rule else "") + f"  ({self.reason})"


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
class View:
    """What a condition may look at beside the node itself.

    Args:
        graph: the graph that the node is of.
        ops: the op table.
        ranges: calibrated largest magnitude by value name.
        outputs: names of the values that the graph returns.
    """

    graph: PrecisionGraph
    ops: OpTable
    ranges: Mapping[str, float]
    outputs: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Kind:
    """A key that may stand under `match:`. All of them are in `amp_compiler.policy.matchers`.

    Args:
        key: in a rule file.
        about: one line for the schema.
        form: type of what stands there, as pydantic takes it.
        possible: whether nodes of an op may match at all, by what is the same for all of them.
        holds: whether one node matches, by what differs from node to node.
        item: what one item of a list stands for; the item itself without.
        read: what all that stands there stands for; a tuple of the items without.
        refusal: what is wrong with what stands there, and the hint, where its form tells; else pydantic says it.
        contextual: it asks what is planned for, which is the same for all nodes of a graph.
        by_part: it holds for all nodes of one op and one part alike.
        name_of: the field of a node with the name that it is about, if it is about one.
    """

    key: str
    about: str
    form: Any
    possible: Callable[[Any, OpInfo, Context], bool] | None = None
    holds: Callable[[Any, Node, View], bool] | None = None
    item: Callable[[str, OpTable, Mark], Any] | None = None
    read: Callable[[Any], Any] | None = None
    refusal: Callable[[Any], tuple[str, str] | None] | None = None
    contextual: bool = False
    by_part: bool = False
    name_of: str = ""

    def __repr__(self) -> str:
        """The same in every process, as a journal needs it: functions have addresses."""
        return f"Kind({self.key!r})"

    def __deepcopy__(self, memo: Any) -> Kind:
        return self


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a rule.

    Args:
        kind: the key of `match:` that it stands under.
        wanted: what the rule asks for, as it was read.
    """

    kind: Kind
    wanted: Any

    def possible(self, info: OpInfo, context: Context) -> bool:
        """Whether nodes of an op may match at all."""
        return self.kind.possible is None or self.kind.possible(self.wanted, info, context)

    def holds(self, node: Node, view: View) -> bool:
        """Whether one node matches."""
        return self.kind.holds is None or self.kind.holds(self.wanted, node, view)


@dataclass(frozen=True, slots=True)
class Matcher:
    """The conditions of a rule; all of them must hold, and an empty one matches every node."""

    conditions: tuple[Condition, ...] = ()

    def get(self, key: str) -> Any:
        """What the rule asks for under a key of `match:`; an empty tuple where it says nothing.

        Example:
            >>> from amp_compiler.policy.matchers import MATCHERS
            >>> Matcher((Condition(MATCHERS["op"], ("aten.conv*",)),)).get("op")
            ('aten.conv*',)
        """
        return next((condition.wanted for condition in self.conditions if condition.kind.key == key), ())


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Args:
        where: `file:line`.
        match: its conditions.
        precision: what it asks; `None` leaves what earlier rules said (a rule that only sets `math` or `backward`).
        math: type to compute in.
        backward: precision of the gradients.
        backward_math: type to compute the gradients in.
        why: the author's reason.
        refusal: what to do instead of what the rule refuses; empty for a rule that refuses nothing.
        text: the rule as its author wrote it, on one line; empty for a rule of a preset.
        own: it stands in a file of the user's, not in a preset.
    """

    where: str
    match: Matcher
    precision: Precision | None = None
    math: DType | Fp8 | None = None
    backward: Precision | None = None
    backward_math: DType | Fp8 | None = None
    why: str = ""
    refusal: str = ""
    text: str = ""
    own: bool = False


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
        keep: the `keep` section, merged over `extends`: what stays as captured whatever the rules say.
        reduce: the `reduce` section, merged over `extends`: how gradients are summed over processes.
        buffers: when a forward writes its buffers: `always` or `skip_nonfinite`.
    """

    name: str
    rules: tuple[Rule, ...]
    ops: OpTable
    loss_scale: dict[str, object] = field(default_factory=dict)
    weights: dict[str, object] = field(default_factory=dict)
    keep: dict[str, bool] = field(default_factory=dict)
    reduce: dict[str, object] = field(default_factory=dict)
    buffers: str = "always"

    def __repr__(self) -> str:
        return f"RuleSet({self.name!r}, {len(self.rules)} rule{'s' * (len(self.rules) != 1)})"

    @property
    def in_fp8(self) -> bool:
        """Whether a rule says `math: fp8`."""
        return any(isinstance(rule.math, Fp8) for rule in self.rules)

    def keeps(self, what: str) -> bool:
        """Whether some numbers stay as captured whatever the rules say; they do unless the rules say otherwise.

        Args:
            what: a key of the section `keep`: `sizes`, `angles`, `running_sums`, `powers`, `differences`,
                `quantized`, `batch_norm` or `normalization`.
        """
        return self.keep.get(what, True)
