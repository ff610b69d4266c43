"""What the page of a plan shows, as plain data: one block of JSON, from which the browser draws."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import LOW_TYPES
from amp_compiler.ir.plan import RETURN, PrecisionPlan
from amp_compiler.ir.ranges import RANGES
from amp_compiler.ir.step_graph import StepGraph

PRECISIONS = ("low", "fp32", "keep")
NODE, INPUT, STORED, CAST = range(4)  # what makes a value


@dataclass
class Strings:
    """Texts that are written once, and meant by their number everywhere else. The number 0 is no text."""

    numbers: dict[str, int] = field(default_factory=lambda: {"": 0})

    def __call__(self, text: str) -> int:
        """The number of a text."""
        return self.numbers.setdefault(text, len(self.numbers))


def page_data(
    plans: Sequence[PrecisionPlan], names: Sequence[str], step: StepGraph | None = None, profile: Any = None
) -> dict[str, Any]:
    """The data of a page.

    Args:
        plans: one, or two to compare.
        names: what each is called.
        step: the whole step whose forward the first plan is for.
        profile: what `amp.profile` found.

    Returns:
        What `json.dumps` takes. Names and other texts are numbers of `strings`. What stands at which place of a row is
        told by the functions below, and read back in `page/model.js`.
    """
    strings = Strings()
    graphs: list[dict[str, Any]] = [{"key": "forward", "sides": [_of_plan(plan, strings) for plan in plans]}]
    places = [node.source for plan in plans for node in plan.nodes]
    if step is not None:
        graphs.append({"key": "step", "sides": [_of_step(step, plans[0], strings)]})
        places += [node.source for node in step.nodes]
    data = {
        "plans": [{"name": name, "type": plan.dtype} for name, plan in zip(names, plans, strict=True)],
        "texts": _TEXTS,
        "graphs": graphs,
        "code": {place: line for place in dict.fromkeys(places) if (line := line_of(place))},
        "profile": None if profile is None else _of_profile(profile, strings),
        "ranges": {name: [RANGES[name].least, RANGES[name].normal, RANGES[name].greatest] for name in LOW_TYPES},
    }
    return {"strings": list(strings.numbers), **data}


def line_of(place: str) -> str:
    """The line of code at `file:line`, without its indent; empty where the file cannot be read here."""
    file, _, number = place.rpartition(":")
    if not file or not number.isdigit():
        return ""
    return linecache.getline(file, int(number)).strip()


class _Graph:
    """Rows of values, nodes and casts; each value is read by its number."""

    def __init__(self, strings: Strings, names: Mapping[str, str]) -> None:
        self.strings, self.names = strings, names
        self.values: list[list[int]] = []  # name, type, what makes it, the number of that
        self.nodes: list[list[Any]] = []
        self.casts: list[list[int]] = []  # value, made value or -1, type, type, bytes, whether it is the model's own
        self.numbers: dict[str, int] = {}

    def make(self, name: str, dtype: str, kind: int, maker: int = -1) -> int:
        """Add a value; where two have one name, the later one is read."""
        self.numbers[name] = len(self.values)
        self.values.append([self.strings(self.names.get(name, name)), self.strings(dtype), kind, maker])
        return self.numbers[name]

    def read(self, name: str, dtype: str = "") -> int:
        """The number of a value that is read; what nothing has made is stored with the model."""
        return self.numbers[name] if name in self.numbers else self.make(name, dtype, STORED)

    def cast(self, value: int, src: str, dst: str, count: int, own: bool, name: str) -> int:
        """Add a cast, and give the number of the value that it makes; -1 for one that stands in the graph as a node."""
        result = -1
        if not own:
            result = len(self.values)
            self.values.append([self.strings(self.names.get(name, name)), self.strings(dst), CAST, len(self.casts)])
        self.casts.append([value, result, self.strings(src), self.strings(dst), count, int(own)])
        return result

    def node(
        self, named: dict[str, str], precision: str, outputs: Sequence[int], inputs: Sequence[int], size: int | None
    ) -> None:
        """Add a node; `named` are its texts by the names of `_TEXTS`, and a reason may quote values."""
        reason = _QUOTED.sub(lambda match: repr(self.names.get(match[1], match[1])), named.get("reason", ""))
        texts = [self.strings({**named, "reason": reason}.get(name, "")) for name in _TEXTS]
        self.nodes.append([*texts, PRECISIONS.index(precision), list(outputs), list(inputs), size])

    def data(self, outputs: Iterable[int]) -> dict[str, Any]:
        """All of it."""
        return {"values": self.values, "nodes": self.nodes, "casts": self.casts, "outputs": list(outputs)}


_TEXTS = (
    "name", "op", "family", "module", "asked", "rule", "reason", "source", "phase", "planned", "math", "math_rule",
    "backward", "backward_math",
)  # fmt: skip
_QUOTED = re.compile(r"'([\w.]+)'")
_OF_PLANNED = tuple(name for name in _TEXTS if name not in ("phase", "planned"))


def _of_plan(plan: PrecisionPlan, strings: Strings) -> dict[str, Any]:
    """The forward: what each node reads, through a cast or not."""
    graph = _Graph(strings, plan.model.names)
    for name, dtype in plan.inputs:
        graph.make(name, dtype, INPUT)
    outputs = [
        [graph.make(name, dtype, NODE, index) for name, dtype in node.outputs] for index, node in enumerate(plan.nodes)
    ]
    reads: dict[tuple[str, int], int] = {}
    for cast in plan.casts:
        value = graph.read(cast.value, cast.src)
        result = value
        if cast.src != cast.dst:  # else it is read past an upcast: nothing is cast
            result = graph.cast(value, cast.src, cast.dst, cast.bytes, cast.explicit, cast.value)
        if result >= 0:
            reads.update(dict.fromkeys(cast.users, result))
    for node, made_values in zip(plan.nodes, outputs, strict=True):
        inputs = [reads.get((node.name, place), graph.numbers.get(name, -1)) for place, name in enumerate(node.inputs)]
        inputs = [graph.read(name) if one < 0 else one for one, name in zip(inputs, node.inputs, strict=True)]
        texts = {name: getattr(node, name) for name in _OF_PLANNED}
        graph.node(texts, node.precision, made_values, inputs, node.bytes)
    returned = [reads.get((RETURN, place), graph.read(name)) for place, name in enumerate(plan.outputs)]
    return graph.data(returned)


def _of_step(step: StepGraph, plan: PrecisionPlan, strings: Strings) -> dict[str, Any]:
    """The whole step: a node has rule and reason of the node of the plan that it was made for."""
    graph = _Graph(strings, plan.model.names)
    planned = {node.name: node for node in plan.nodes}
    for name, dtype in step.inputs:
        graph.make(name, dtype, INPUT)
    for name, dtype in step.stored:
        graph.make(name, dtype, STORED)
    outputs = [
        [graph.make(name, dtype, NODE, index) for name, dtype in node.outputs] for index, node in enumerate(step.nodes)
    ]
    for cast in step.casts:  # one may cast what another has made, so numbers come first
        graph.make(cast.name, cast.dst, CAST, len(graph.casts))
        graph.casts.append([-1, graph.numbers[cast.name], strings(cast.src), strings(cast.dst), cast.bytes, 0])
    for row, cast in zip(graph.casts, step.casts, strict=True):
        row[0] = graph.read(cast.value, cast.src)
    for node, made_values in zip(step.nodes, outputs, strict=True):
        source = planned.get(node.planned)
        texts = {name: getattr(node, name) for name in ("name", "op", "module", "source", "phase")}
        texts["planned"] = node.planned if source else ""
        if source is not None:
            texts |= {"rule": source.rule, "reason": source.reason, "asked": source.asked}
            texts |= {name: texts[name] or getattr(source, name) for name in ("module", "source")}
        types = [dtype for _, dtype in node.outputs]
        inputs = [graph.read(name) for name in node.inputs]
        graph.node(texts, precision_of(types, plan.dtype), made_values, inputs, None)
    return graph.data(graph.read(name) for name in step.outputs)


def precision_of(types: Sequence[str], low: str) -> str:
    """By what a node makes: `low` where anything is of the low type."""
    return "low" if low in types else "fp32" if "fp32" in types else "keep"


def _of_profile(profile: Any, strings: Strings) -> list[list[Any]]:
    """The histograms, with what becomes of the numbers in each type, and of the updates of a weight.

    Raises:
        AmpError: it is none.
    """
    try:
        updates = {row.name: row for row in profile.updates if row.made}
        rows = [
            [
                *(strings(getattr(row, name)) for name in ("name", "kind", "op", "module", "planned", "dtype")),
                data["stored"],
                data["exponents"] if data["exponents"] != data["stored"] else None,
                {dtype: list(astuple(row.stored.fractions(dtype))) for dtype in LOW_TYPES},
                {dtype: updates[row.name].fraction_lost(dtype) for dtype in LOW_TYPES}
                if row.kind == "weight" and row.name in updates
                else None,
            ]
            for row, data in zip(profile.rows, profile.to_dict()["rows"], strict=True)
        ]
    except AttributeError as cause:
        raise AmpError(
            f"profile is a {type(profile).__name__}", hint="pass what amp.profile gave, or Profile.from_dict"
        ) from cause
    return rows
