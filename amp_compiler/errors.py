"""The exceptions of the library. Every one says what is wrong, where, and the hint; a note names where such stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

BUG = "this is a bug; please report it"


class AmpError(Exception):
    """Base of every error that `amp_compiler` raises on purpose.

    Args:
        what: what is wrong, in one sentence.
        where: the place: a file with its line, a node, a user's source line.
        hint: what the reader can do about it.

    Example:
        >>> str(AmpError("the rule matches no op", where="my.yaml:3", hint="use 'aten.linear'"))
        "my.yaml:3: the rule matches no op; use 'aten.linear'"
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        text = f"{where}: {what}" if where else what
        self._text = f"{text}; {hint}" if hint else text
        super().__init__(self._text)
        self.add_note(f"see: docs/errors.md#{self.section()}")

    @classmethod
    def section(cls) -> str:
        """The heading of docs/errors.md under which such errors stand; that of a user's own class is its base's."""
        return next(kind.__name__.lower() for kind in cls.__mro__ if kind.__module__.startswith("amp_compiler."))

    def __str__(self) -> str:
        """The text as it was made: Dynamo appends to the arguments of an exception that it lets through."""
        return self._text


class RuleError(AmpError):
    """A rule file, a rule dict or a preset name is wrong.

    Args:
        what: what is wrong.
        file: the rule file, or `<dict>` for rules given as a Python dict.
        line: line of the offending key or value, from 1; `None` where there is none.
        column: column of it, from 1.
        key: dotted path of the key in the file, such as `rules.0.match.op`.
        hint: what to write instead.
    """

    def __init__(
        self,
        what: str,
        *,
        file: str = "",
        line: int | None = None,
        column: int | None = None,
        key: str = "",
        hint: str = "",
    ) -> None:
        self.file, self.line, self.column, self.key = file, line, column, key
        where = ":".join(str(part) for part in (file, line, column) if part not in ("", None))
        super().__init__(f"{what} (at key '{key}')" if key else what, where=where, hint=hint)


class RankError(AmpError):
    """Processes that train one model together differ, or one of them failed or did not come; raised on each."""


class CaptureError(AmpError):
    """A model cannot be turned into a graph."""


class ValuesReadError(CaptureError):
    """A graph reads the values of a tensor while it is made; what reads them runs as it is written."""


class HookError(CaptureError):
    """A module carries a hook, or is of a kind, that no graph can hold, whole or in subgraphs."""


class GraphError(AmpError):
    """A `PrecisionGraph`, or the text of one, breaks an invariant."""


class PassError(AmpError):
    """A pass was given a graph that it does not accept, or made one that it must not.

    Attributes:
        stages: where a pipeline was running, the stages that the graph had gone through until then.
    """

    stages: Any = None


class LoweringError(AmpError):
    """A plan cannot be carried out on a graph, or the graph cannot be compiled for the device."""


class DoubleBackwardError(LoweringError):
    """A backward of compiled code is to be differentiated, or to run twice, and the call cannot run once more."""


class OptimizerError(LoweringError):
    """What an optimizer's own code does fits no graph, whole or in subgraphs."""


class OnnxError(AmpError):
    """An ONNX model cannot be read, converted or written."""


class OnnxCaptureError(CaptureError, OnnxError):
    """An ONNX model holds what no torch function is known for, or what is no model."""


class LossScaleError(AmpError):
    """Gradients stay non-finite although the loss scale can go no lower.

    Args:
        what: what is wrong.
        parameters: qualified names of the parameters with non-finite gradients, the first ones first.
        nodes: names of the graph nodes that made the first non-finite values.
        hint: what the reader can do about it.

    Attributes:
        report: what `step.nonfinite_report()` found in the last step; `None` where nobody looked.

    Example:
        >>> print(LossScaleError("no finite gradient in 20 steps", parameters=["fc.weight"], nodes=["exp_1"]))
        no finite gradient in 20 steps (first non-finite parameters: fc.weight; nodes: exp_1)
    """

    def __init__(self, what: str, *, parameters: Iterable[str] = (), nodes: Iterable[str] = (), hint: str = "") -> None:
        self.parameters, self.nodes = tuple(parameters), tuple(nodes)
        self.report: Any = None
        listed = [
            f"{kind}: {_first(names)}"
            for kind, names in (("parameters", self.parameters), ("nodes", self.nodes))
            if names
        ]
        super().__init__(f"{what} (first non-finite {'; '.join(listed)})" if listed else what, hint=hint)

    def add_report(self, report: Any) -> None:
        """Put `report`, what `step.nonfinite_report()` found, behind the text."""
        self.report = report
        self._text = f"{self._text}\n{report}"


def _first(names: tuple[str, ...], shown: int = 5) -> str:
    """The first names as text, with the number of those left out."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and one by one what it was raised from, or in whose handling.

    Example:
        >>> try:
        ...     raise AmpError("it cannot be read") from OSError("gone")
        ... except AmpError as error:
        ...     [type(one).__name__ for one in with_causes(error)]
        ['AmpError', 'OSError']
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line; its type where it says nothing.

    Example:
        >>> first_line(KeyError()), first_line(ValueError("wrong\\nfor these reasons"))
        ('KeyError', 'wrong')
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
