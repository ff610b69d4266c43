"""The contract of a pass, enforced here for all of them: what it requires and ensures, and an honest `modified`.

A pipeline holds its passes to it with `AMP_VERIFY=1`, and a pass of the user's always.

A pass changes its subject in place (`InPlacePass`, graphs of torch.fx) or leaves it as it is and returns another
(`FunctionalPass`, drafts of plans and passes that trace anew). `modified` is true exactly if a graph's text changed, as
`fx.text.format_fx` writes it; for a draft, if what its text is made of changed, `Draft.state()`.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from amp_compiler.errors import AmpError, LoweringError, PassError, first_line

Subject = TypeVar("Subject")
_ORDER = "run the passes in the order of the pipeline"
_ON_VALUES = ("GuardOnDataDependentSymNode", "DataDependentOutputException")  # of torch, which is not imported here
_BUG = "this is a bug of the pass: correct it, or report it where it is one of amp_compiler's own"


@dataclass(frozen=True, slots=True)
class PassResult(Generic[Subject]):
    """What a pass returns.

    Args:
        subject: the draft or graph after the pass.
        modified: whether its text changed.
    """

    subject: Subject
    modified: bool


class Texts:
    """The texts of one subject after another; of a graph, only what changed is written anew."""

    def __init__(self) -> None:
        self._lines: Any = None

    def of(self, subject: Any) -> str:
        """The text by which a change is seen: of a draft or an FX graph."""
        if hasattr(subject, "to_text"):
            return str(subject.to_text())
        if self._lines is None:
            from amp_compiler.fx.text import Lines  # here, because the neutral passes do without torch

            self._lines = Lines()
        return str(self._lines.format(subject))

    def state(self, subject: Any, *, kept: bool = True) -> Any:
        """That by which a change is seen: what a draft holds, and of all else the text; `kept` as for `Draft.state`."""
        return subject.state(kept=kept) if hasattr(type(subject), "state") else self.of(subject)

    def clear(self) -> None:
        """Forget the graphs that were written."""
        self._lines = None


class Pass(ABC, Generic[Subject]):
    """What `InPlacePass` and `FunctionalPass` share; derive from one of these. A pass is a frozen dataclass.

    Its fields are its options. A pipeline fills them in by name, see `passes.pipeline.Pipeline.run`.

    Attributes:
        name: by which pipelines, stages and errors call it; by default that of its class, `fold_masks` of `FoldMasks`.
        exact: whether the graph computes the same numbers after it, bit for bit.
        skippable: whether a pipeline may leave it out.
        idempotent: whether it changes nothing when it runs again.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    skippable: ClassVar[bool] = False
    idempotent: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        named = (one for one in cls.__mro__ if "name" in vars(one) and not getattr(one, "__abstractmethods__", None))
        written = next((str(vars(one)["name"]) for one in named), "")
        cls.name = written or re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def requires(self, subject: Subject) -> str | None:
        """What is wrong with the input, as a sentence; `None` where the pass accepts it."""
        return None

    def remember(self, subject: Subject) -> Any:
        """What `ensures` will have to know of the input."""
        return None

    def ensures(self, subject: Subject, remembered: Any) -> str | None:
        """What is wrong with the result, as a sentence; `None` where the pass kept its promise.

        Args:
            subject: the result.
            remembered: what `remember` said of the input.
        """
        return None

    @abstractmethod
    def run(self, subject: Subject) -> PassResult[Subject]:
        """Do the work. Call the pass object itself, which checks the contract around this."""

    @abstractmethod
    def _kept_its_kind(self, subject: Subject, before: Any, result: PassResult[Subject], texts: Texts) -> str | None:
        """What is wrong where an in-place pass returned another object, or a functional one changed its input."""

    def __call__(self, subject: Subject) -> PassResult[Subject]:
        """Run the pass with its contract checked.

        Raises:
            PassError: the input is not what the pass requires, the output not what it ensures, it changed what it must
                not, or `modified` is untrue. An error that is no `AmpError` becomes one that names the pass.
        """
        texts = Texts()
        return self.checked(subject, texts.state(subject), texts)[0]

    def checked(self, subject: Subject, before: Any, texts: Texts) -> tuple[PassResult[Subject], Any]:
        """As `__call__`, for those who have the state of the subject already; returns that of the result as well."""
        with self._named():
            return self._run_checked(subject, before, texts)

    def unchecked(self, subject: Subject) -> PassResult[Subject]:
        """Run the pass where nobody asks for its contract, or the text behind it; an error still names the pass."""
        with self._named():
            return self.run(subject)

    def believed(self, subject: Subject) -> PassResult[Subject]:
        """Run the pass with what it requires and ensures checked, and without the texts that prove `modified`."""
        with self._named():
            return self._run_held(subject)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors that are no `AmpError` name the pass."""
        try:
            yield
        except AmpError:
            raise
        except Exception as cause:  # a pass, the user's too, may raise anything
            if type(cause).__name__ in _ON_VALUES:
                raise LoweringError(
                    f"a size that depends on values must be known here: {first_line(cause)}",
                    where=f"in pass '{self.name}'",
                    hint="keep such sizes out of the graph",
                ) from cause
            raise PassError(
                f"it raised {type(cause).__name__}: {cause}", where=f"in pass '{self.name}'", hint=_BUG
            ) from cause

    def _run_checked(self, subject: Subject, before: Any, texts: Texts) -> tuple[PassResult[Subject], Any]:
        result = self._run_held(subject)
        after = texts.state(result.subject)
        wrong = self._kept_its_kind(subject, before, result, texts)
        if wrong is None and result.modified != (before != after):
            change = "changed" if before != after else "did not change"
            wrong = f"it says modified={result.modified}, and the text {change}"
        self._refuse(wrong, "after", _BUG)
        return result, after

    def _run_held(self, subject: Subject) -> PassResult[Subject]:
        self._refuse(self.requires(subject), "before", _ORDER)
        remembered = self.remember(subject)
        result = self.run(subject)
        if not isinstance(result, PassResult):
            self._refuse(f"it returned a {type(result).__name__}, not a PassResult", "after", _BUG)
        self._refuse(self.ensures(result.subject, remembered), "after", _BUG)
        return result

    def _refuse(self, wrong: str | None, place: str, hint: str) -> None:
        if wrong is not None:
            raise PassError(wrong, where=f"{place} pass '{self.name}'", hint=hint)


class FunctionalPass(Pass[Subject]):
    """Base of the passes that leave their subject as it is; where nothing is to be done they return it itself."""

    def _kept_its_kind(self, subject: Subject, before: Any, result: PassResult[Subject], texts: Texts) -> str | None:
        if result.subject is not subject and not result.modified:
            return "nothing was modified, and it returned another object"
        changed = texts.state(subject, kept=False) != before
        return "it changed its input, which a functional pass leaves as it is" if changed else None


def lacks_example(node: Any) -> bool:
    """Whether a node of an FX graph makes something and carries no example of it; some ops return nothing."""
    schema = getattr(node.target, "_schema", None)
    makes = node.op == "placeholder" or (node.op == "call_function" and (schema is None or len(schema.returns) > 0))
    return makes and "val" not in node.meta


class InPlacePass(Pass[Any]):
    """Base of the passes that change a `torch.fx.GraphModule` in place."""

    def requires(self, subject: Any) -> str | None:
        """Every node that makes something must carry an example of it."""
        bare = next((node for node in subject.graph.nodes if lacks_example(node)), None)
        return None if bare is None else f"node '{bare.name}' carries no example value in meta['val']"

    def _kept_its_kind(self, subject: Any, before: Any, result: PassResult[Any], texts: Texts) -> str | None:
        if result.subject is not subject:
            return "it returned another graph, where an in-place pass returns the one it was given"
        try:
            subject.graph.lint()
        except RuntimeError as cause:
            return f"the graph is broken: {cause}"
        return None


class RewritePass(InPlacePass):
    """Base of the passes that are one function on a graph."""

    @abstractmethod
    def rewrite(self, graph: Any) -> bool:
        """Change a `torch.fx.Graph` in place; whether anything changed."""

    def run(self, subject: Any) -> PassResult[Any]:
        """Rewrite the graph of a module."""
        modified = self.rewrite(subject.graph)
        if modified:
            subject.recompile()
        return PassResult(subject, modified)


class LatePass(RewritePass):
    """Base of the passes that run inside of a compiler, on what it has opened a graph of ours into.

    A node of such a graph may carry no example, where a pass of the user's has put it there, and its text is no stage
    of ours: a compiler calls `rewrite` as it is.
    """

    @abstractmethod
    def awaited(self, graph: Any) -> bool:
        """Whether there may be something to do in what a compiler makes of a `torch.fx.Graph`, forward or backward."""

    def identity(self) -> str:
        """For a cache of compiled graphs: another text whenever the same code of `rewrite` may do something else."""
        return self.name
