"""`PrecisionPlan`: what was decided for every node and every cast, as a value that can be read, diffed and replayed."""

from __future__ import annotations

import difflib
import html
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.files import write_atomically
from amp_compiler.ir.value_class import value_class

if TYPE_CHECKING:
    from amp_compiler import report

FORMAT_VERSION = 1


@value_class
class PlannedNode:
    """One node's verdict.

    Args:
        name: the node.
        op: canonical op name.
        family: op family.
        module: qualified name of the module that called it.
        precision: `low`, `fp32` or `keep`: what it runs in, after `widest` and `follow` were resolved.
        rule: `file:line` of the rule that decided, empty where the model or a guard did.
        reason: why.
        requested: what the rule asks for (`widest` and `follow` included).
        source: `file:line` of the user's model.
        outputs: (value, type) of each output after the rewrite.
        math: type that it computes in, empty for the op's default.
        backward: precision of the gradients, empty for the same as forward.
        backward_math: type to accumulate the gradients in, empty for the op's default.
        inputs: names of the values read, by operand; before casts.
        math_rule: `file:line` of the rule that said `math`, empty where none did.
        bytes: that its results take; 0 of a view, `None` where nobody counted.
        flops: operations on numbers, a multiply-add counted as two; 0 of a view, `None` where they are not known.
    """

    name: str
    op: str
    family: str
    module: str
    precision: str
    rule: str
    reason: str
    requested: str = ""
    source: str = ""
    outputs: tuple[tuple[str, str], ...] = ()
    math: str = ""
    backward: str = ""
    backward_math: str = ""
    inputs: tuple[str, ...] = ()
    math_rule: str = ""
    bytes: int | None = field(default=None, compare=False)
    flops: int | None = field(default=None, compare=False)

    @property
    def decision(self) -> str:
        """Its precision, with the rule and the reason."""
        return f"{self.precision} by {self.rule or 'no rule'} ({self.reason})"


@dataclass(frozen=True, slots=True)
class PlannedCast:
    """One cast, or an upcast of the model's own that is not needed any more.

    Where `src == dst` nothing is cast: `users` read `value` itself, in place of the FP32 copy that the upcast makes.
    Such entries are not in `plan.cast_count`, so that `len(plan.casts)` may be larger.

    Args:
        value: the value that is cast.
        src: its type, as `fp32`, `fp16`, `bf16`.
        dst: the type that it is cast to.
        bytes: memory traffic of it: elements times (size of src + size of dst).
        users: (node, operand index) pairs that read the cast; the node name `return` is the graph's output list.
        explicit: the cast stands in the model's own text; it is counted here and not inserted.
    """

    value: str
    src: str
    dst: str
    bytes: int
    users: tuple[tuple[str, int], ...] = ()
    explicit: bool = False

    def __str__(self) -> str:
        users = ", ".join(f"{name}[{index}]" for name, index in self.users)
        if self.explicit:
            return f"model's own cast {self.value}: {self.src} -> {self.dst}, {self.bytes} bytes"
        if self.src == self.dst:
            return f"read {self.value} ({self.src}) itself, for {users}"
        return f"cast {self.value}: {self.src} -> {self.dst}, {self.bytes} bytes, for {users}"


@dataclass(frozen=True, slots=True)
class UnusedRule:
    """A rule of the user's own that matches no node.

    Args:
        rule: `file:line`.
        text: the rule as it stands there, on one line.
        condition: the key of `match:` that no node meets; empty where each is met by some node, but not all by one.
        nearest: the name in the model that is most like what the condition asks for, or, where `condition` is empty,
            the node that meets most conditions; empty where there is none.
    """

    rule: str
    text: str
    condition: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        text = f"{self.rule}, {self.text}"
        if not self.condition:
            return f"{text} (node '{self.nearest}' meets most of its conditions)" if self.nearest else text
        kind = self.condition.replace("_", " ")
        return (
            f"{text} (the nearest {kind} is '{self.nearest}')" if self.nearest else f"{text} (no node has that {kind})"
        )


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a plan is of.

    Args:
        name: class of the model, or the name of its file; empty where it is not known.
        parameters: how many numbers its parameters hold; 0 where that is not known.
        inputs: type and shape of each input, as `i64[2, 16]`.
        names: qualified name of each parameter and buffer, by the value that the graph has of it.
    """

    name: str = ""
    parameters: int = 0
    inputs: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AutocastTotals:
    """What `torch.autocast` does in the same forward.

    Args:
        casts: how many casts it makes; of a weight one.
        cast_bytes: memory traffic of them: elements times (size of source + size of target).
        low_nodes: how many of the plan's nodes make tensors of the low type.
    """

    casts: int
    cast_bytes: int
    low_nodes: int


RETURN = "return"


def many(count: int, word: str) -> str:
    """A number with its noun: `1 cast`, `2 batches`."""
    return f"{count:,} {word}{'' if count == 1 else 'es' if word.endswith('ch') else 's'}"


class Printed:
    """A result that a prompt and a cell of a notebook show as its text: they are no place for thousands of counts."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@dataclass(frozen=True)
class PrecisionPlan:
    """The outcome of planning. Compare two with `==`; print what differs with `diff`.

    `plan.to_html(path)` and `plan.to_svg(path)` are `amp.to_html` and `amp.to_svg`, which draw a plan.

    Args:
        dtype: `fp16` or `bf16`.
        rules: name of the rule set.
        device: device type that was planned for.
        nodes: verdicts in execution order.
        casts: in execution order, with upcasts that are not needed any more: `cast_count` is the number of casts.
        inputs: (value, type) of each input of the graph; parameters and other stored data are not among them.
        outputs: names of the values that the graph returns; before casts.
        unused_rules: the rules of the user's own files that match no node, in the order in which they are read.
        autocast: what `torch.autocast` does in the same forward, counted by `amp.explain` for a module on the device
            that it plans for; `None` where nobody counted. Plans are equal without regard to it.
        notes: of a training step of several processes: what each sends and holds.
        model: what it is a plan of. Plans are equal without regard to it.

    Example:
        >>> plan = PrecisionPlan("fp16", "default", "cpu", (), ())
        >>> plan.cast_bytes
        0
    """

    dtype: str
    rules: str
    device: str
    nodes: tuple[PlannedNode, ...]
    casts: tuple[PlannedCast, ...]
    inputs: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()
    unused_rules: tuple[UnusedRule, ...] = ()
    autocast: AutocastTotals | None = field(default=None, compare=False)
    notes: tuple[str, ...] = ()
    model: PlannedModel = field(default=PlannedModel(), compare=False)

    @property
    def labels(self) -> Mapping[str, str]:
        """By node name, what it runs in: `low`, `fp32` or `keep`."""
        return {node.name: node.precision for node in self.nodes}

    @property
    def types(self) -> Mapping[str, DType]:
        """The type after the rewrite of each value that a node makes, by name."""
        return {name: dtype_from_short(short) for node in self.nodes for name, short in node.outputs}

    @property
    def cast_bytes(self) -> int:
        """Bytes moved by all casts of one forward run, the model's own included."""
        return sum(cast.bytes for cast in self.casts)

    @property
    def cast_count(self) -> int:
        """Number of casts in one forward run, the model's own included; `casts` may have more entries."""
        return sum(cast.src != cast.dst for cast in self.casts)

    @property
    def low_nodes(self) -> int:
        """Number of nodes that run in the low type."""
        return sum(node.precision == "low" for node in self.nodes)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain Python data, ready for JSON."""
        data = {"version": FORMAT_VERSION, **asdict(self), "cast_bytes": self.cast_bytes, "cast_count": self.cast_count}
        return {name: value for name, value in data.items() if value or name not in ("autocast", "notes")}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PrecisionPlan:
        """Read back what `to_dict` or `to_json` wrote.

        Args:
            data: that dict, such as `json.load` reads it.

        Raises:
            AmpError: where the data is not a plan of this version.
        """
        version = data.get("version") if isinstance(data, dict) else type(data)
        if version != FORMAT_VERSION:
            raise AmpError(
                f"this is a plan of version {version!r}, not {FORMAT_VERSION}",
                hint="make it again with amp.explain",
            )
        from pydantic import TypeAdapter, ValidationError  # what imports the package alone does without

        try:
            return TypeAdapter(cls).validate_python(data)
        except ValidationError as cause:
            error = cause.errors(include_url=False)[0]
            place = ".".join(map(str, error["loc"]))
            raise AmpError(
                f"the plan is damaged: {place}: {error['msg']}", hint="make it again with amp.explain"
            ) from cause

    def to_json(self, path: str | Path | None = None) -> str:
        """The plan as JSON text, the same bytes on every run; written to `path` (atomically) where one is given."""
        text = json.dumps(self.to_dict(), indent=1, ensure_ascii=False) + "\n"
        if path is not None:
            write_atomically(path, text)
        return text

    if TYPE_CHECKING:  # at run time `report`, which stands above this room, puts them here
        to_html = report.to_html
        to_svg = report.to_svg

    def to_text(self) -> str:
        """One line for each node, cast and unused rule, for reading and for diffing, in the names of the model."""
        shown, low = self.model.names, {"low": self.dtype}
        lines = [f"plan dtype={self.dtype} rules={self.rules} device={self.device} cast_bytes={self.cast_bytes}"]
        for node in self.nodes:
            types = ", ".join(dtype for _, dtype in node.outputs)
            lines.append(
                f"{low.get(node.precision, node.precision):<5}{node.name} = {node.op} -> {types}"
                + (f"  backward={node.backward}" if node.backward not in ("", node.precision) else "")
                + (f"  module={node.module}" if node.module else "")
                + (f"  rule={node.rule}" if node.rule else "")
                + f"  ({node.reason})"
            )
        lines += [str(replace(cast, value=shown.get(cast.value, cast.value))) for cast in self.casts]
        lines += [f"unused rule {rule}" for rule in self.unused_rules]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return self.to_text()

    def __repr__(self) -> str:
        counts = f"{many(len(self.nodes), 'node')}, {many(self.cast_count, 'cast')}"
        return f"PrecisionPlan(dtype={self.dtype!r}, rules={self.rules!r}, device={self.device!r}, {counts})"

    def diff(self, other: PrecisionPlan, name: str = "this", other_name: str = "other") -> str:
        """A unified diff of the two plans' text; empty where they are equal.

        Args:
            other: the plan to compare with.
            name: what this one is called in the diff.
            other_name: what the other one is.
        """
        lines = self.to_text().splitlines(keepends=True), other.to_text().splitlines(keepends=True)
        return "".join(difflib.unified_diff(*lines, name, other_name, n=0))
