"""The contract of passes is held by their base classes."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from fx_reader import parse_fx

from amp_compiler.errors import PassError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import PrecisionGraph
from amp_compiler.passes import PASSES, find_pass
from amp_compiler.passes.base import FunctionalPass, InPlacePass, Pass, PassResult
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Context

TEXT = "in x: fp32[2]\nneg: fp32[2] = aten.neg.default(x)\nreturn neg\n"


@dataclass(frozen=True)
class Numbers:
    """A subject with a text."""

    held: tuple[int, ...]

    def to_text(self) -> str:
        return "".join(f"{number}\n" for number in self.held)


@dataclass(frozen=True)
class Append(FunctionalPass[Numbers]):
    """Append `number`."""

    name: ClassVar[str] = "append"
    exact: ClassVar[bool] = True
    number: int = 1
    says_modified: bool = True
    does: bool = True

    def requires(self, subject: Numbers) -> str | None:
        return "the list is full" if len(subject.held) > 2 else None

    def remember(self, subject: Numbers) -> int:
        return len(subject.held)

    def ensures(self, subject: Numbers, remembered: int) -> str | None:
        return "the number is negative" if subject.held[remembered:] and subject.held[-1] < 0 else None

    def run(self, subject: Numbers) -> PassResult[Numbers]:
        return PassResult(Numbers((*subject.held, self.number)) if self.does else subject, self.says_modified)


def test_result_and_modified_both_ways() -> None:
    assert Append()(Numbers((0,))) == PassResult(Numbers((0, 1)), True)
    assert Append(does=False, says_modified=False)(Numbers((0,))) == PassResult(Numbers((0,)), False)


@pytest.mark.parametrize(
    ("run", "inputs", "says"),
    [
        (Append(), (1, 2, 3), "before pass 'append': the list is full"),
        (Append(number=-1), (), "after pass 'append': the number is negative"),
        (Append(does=False), (), "modified=True, and the text did not change"),
        (Append(says_modified=False), (), "nothing was modified, and it returned another object"),
    ],
)
def test_broken_promises_are_errors(run: Append, inputs: tuple[int, ...], says: str) -> None:
    with pytest.raises(PassError, match=says):
        run(Numbers(inputs))


@pytest.mark.parametrize("method", ["requires", "remember", "ensures"])
def test_what_a_check_raises_names_the_pass(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("bias")

    monkeypatch.setattr(Append, method, fails)
    with pytest.raises(PassError, match="in pass 'append': it raised KeyError: 'bias'"):
        Append()(Numbers(()))


@dataclass(frozen=True)
class Break(InPlacePass):
    """Do to the graph what `how` says."""

    how: str = ""
    name: ClassVar[str] = "break"
    exact: ClassVar[bool] = True

    def run(self, subject: Any) -> PassResult[Any]:
        graph = subject.graph
        (neg,) = [node for node in graph.nodes if node.op == "call_function"]
        if self.how == "another object":
            return PassResult(parse_fx(TEXT), False)
        if self.how == "no result":
            return None  # type: ignore[return-value]
        if self.how == "raises":
            raise KeyError("bias")
        if self.how == "silent":
            neg.target = torch.ops.aten.exp.default
        if self.how == "order":
            neg.prepend(graph.output_node())
        return PassResult(subject, self.how == "order")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("another object", "returned another graph"),
        ("no result", "returned a NoneType, not a PassResult"),
        ("raises", "in pass 'break': it raised KeyError: 'bias'"),
        ("silent", "modified=False, and the text changed"),
        ("order", "the graph is broken"),
    ],
)
def test_a_pass_that_breaks_the_contract_is_named(how: str, says: str) -> None:
    with pytest.raises(PassError, match=says) as caught:
        Break(how)(parse_fx(TEXT))
    assert "'break'" in str(caught.value)
    assert not Break()(parse_fx(TEXT)).modified


@dataclass(frozen=True)
class Changes(FunctionalPass[Any]):
    """A functional pass that changes its input."""

    name: ClassVar[str] = "changes"
    exact: ClassVar[bool] = True
    field: str = ""

    def run(self, subject: Any) -> PassResult[Any]:
        if self.field:
            getattr(subject, self.field)["y"] = "low"
            return PassResult(subject, False)
        next(n for n in subject.graph.nodes if n.op == "call_function").target = torch.ops.aten.exp.default
        return PassResult(parse_fx(TEXT), True)


@pytest.mark.parametrize("field", ["", "decisions", "labels", "notes"])
def test_a_functional_pass_must_leave_its_input(field: str) -> None:
    draft = Draft(PrecisionGraph(), load_rules("default"), Context(DType.BFLOAT16), **({field: {}} if field else {}))
    with pytest.raises(PassError, match="changed its input"):
        Changes(field)(draft if field else parse_fx(TEXT))


@pytest.mark.parametrize("name", PASSES)
def test_table_of_passes(name: str) -> None:
    result = find_pass(name)
    assert result.name == name
    assert issubclass(result, (InPlacePass, FunctionalPass)) and isinstance(result.exact, bool)
    doc = result.__doc__ or ""
    assert "Before" in doc and "After" in doc, "show a before and an after"
    assert "Left alone" in doc or "Not changed" in doc or "No casts" in doc, "and a case that it leaves alone"


def test_an_unknown_pass_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(PassError, match="did you mean 'place_casts'"):
        find_pass("place_cast")
    with pytest.raises(PassError, match="'xyzzy' is no pass"):
        find_pass("xyzzy")


def test_classes_are_found_as_attributes_of_the_package() -> None:
    import amp_compiler.passes as passes

    assert passes.Classify is find_pass("classify") and issubclass(passes.FuseUpdate, Pass)
    with pytest.raises(AttributeError, match="Xyzzy"):
        passes.Xyzzy  # noqa: B018
