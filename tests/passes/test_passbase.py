"""The contract of passes is held by their base class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest

from amp_compiler.errors import PassError
from amp_compiler.passes import NEUTRAL, PASSES, find_pass
from amp_compiler.passes.base import Pass, PassResult


@dataclass(frozen=True)
class Append(Pass[list[int]]):
    """Append `number`."""

    name: ClassVar[str] = "append"
    number: int = 1
    says_modified: bool = True
    does: bool = True

    def requires(self, subject: list[int]) -> str | None:
        return "the list is full" if len(subject) > 2 else None

    def ensures(self, before: list[int], after: list[int]) -> str | None:
        return "the number is negative" if after and after[-1] < 0 else None

    def fingerprint(self, subject: list[int]) -> object:
        return tuple(subject)

    def run(self, subject: list[int]) -> PassResult[list[int]]:
        return PassResult([*subject, self.number] if self.does else subject, self.says_modified)


def test_result_and_modified_both_ways() -> None:
    assert Append()([0]) == PassResult([0, 1], True)
    assert Append(does=False, says_modified=False)([0]) == PassResult([0], False)


@pytest.mark.parametrize(
    ("run", "given", "says"),
    [
        (Append(), [1, 2, 3], "before pass 'append': the list is full"),
        (Append(number=-1), [], "after pass 'append': the number is negative"),
        (Append(does=False), [], "modified=True, which is not true"),
        (Append(says_modified=False), [], "modified=False, which is not true"),
    ],
)
def test_broken_promises_are_errors(run: Append, given: list[int], says: str) -> None:
    with pytest.raises(PassError, match=says):
        run(given)


def test_a_pass_without_checks_needs_none() -> None:
    class Nothing(Pass[int]):
        name: ClassVar[str] = "nothing"

        def run(self, subject: int) -> PassResult[int]:
            return PassResult(subject, True)

    assert Nothing()(3) == PassResult(3, True)


@pytest.mark.parametrize("name", PASSES)
def test_table_of_passes(name: str) -> None:
    found = find_pass(name)
    assert found.name == name
    assert issubclass(found, Pass)
    assert found.__doc__ and ("Before" in found.__doc__ or "before" in found.__doc__), "show a before and after"


def test_an_unknown_pass_is_an_error_with_the_nearest_name() -> None:
    assert set(NEUTRAL) <= set(PASSES)
    with pytest.raises(PassError, match="did you mean 'place_casts'"):
        find_pass("place_cast")
    with pytest.raises(PassError, match="'xyzzy' is no pass"):
        find_pass("xyzzy")
