"""The contract of a pass, enforced here for all of them: what it requires, what it ensures, an honest `modified`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from amp_compiler.errors import PassError

Subject = TypeVar("Subject")
_ORDER = "run the passes in the order of the pipeline"
_BUG = "this is a bug of the pass; please report it"


@dataclass(frozen=True, slots=True)
class PassResult(Generic[Subject]):
    """What a pass returns.

    Args:
        subject: the draft or graph after the pass (the same object where nothing changed).
        modified: whether anything changed.
    """

    subject: Subject
    modified: bool


class Pass(ABC, Generic[Subject]):
    """Base of every pass. A subclass is a frozen dataclass whose fields are its options.

    The neutral passes take and return a `Draft`; those on FX take and return a `torch.fx.GraphModule`.
    """

    name: ClassVar[str]

    def requires(self, subject: Subject) -> str | None:
        """What is wrong with the input, as a sentence; `None` where the pass accepts it."""
        return None

    def ensures(self, before: Subject, after: Subject) -> str | None:
        """What is wrong with the result, as a sentence; `None` where the pass kept its promise."""
        return None

    def fingerprint(self, subject: Subject) -> object:
        """A comparable summary of the subject, by which `modified` is checked; `None` leaves it unchecked."""
        return None

    @abstractmethod
    def run(self, subject: Subject) -> PassResult[Subject]:
        """Do the work. Call the pass object itself, which checks the contract around this."""

    def __call__(self, subject: Subject) -> PassResult[Subject]:
        """Run the pass with its contract checked.

        Raises:
            PassError: the input is not what the pass requires, the output not what it ensures, or `modified` is untrue.
        """
        wrong = self.requires(subject)
        if wrong is not None:
            raise PassError(wrong, where=f"before pass '{self.name}'", mend=_ORDER)
        before = self.fingerprint(subject)
        result = self.run(subject)
        wrong = self.ensures(subject, result.subject)
        if wrong is not None:
            raise PassError(wrong, where=f"after pass '{self.name}'", mend=_BUG)
        after = self.fingerprint(result.subject)
        if before is not None and (before != after) != result.modified:
            raise PassError(
                f"it says modified={result.modified}, which is not true",
                where=f"after pass '{self.name}'",
                mend=_BUG,
            )
        return result
