"""What Dynamo says of what it cannot take, and of what it compiles again."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx

from amp_compiler.errors import first_line, with_causes


def reason_here() -> str:
    """What no longer held of a function that Dynamo compiles again just now, such as `len(L['self'].log) == 63`."""
    metrics: Any = torch._dynamo.utils.get_metrics_context()._metrics
    match = _FAILED_GUARD.match(metrics.get("recompile_reason") or "")
    return match[1].strip() if match else ""


_FAILED_GUARD = re.compile(r"\d+/\d+: (.+?)(?:  +#|$)", re.MULTILINE)


def recompile_limit() -> int:
    """The user's own limit of how often Dynamo compiles a function."""
    return int(torch._dynamo.config.recompile_limit)


def is_recompile_limit(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that the limit is reached."""
    return any(isinstance(one, torch._dynamo.exc.FailOnRecompileLimitHit) for one in with_causes(error))


@dataclass(frozen=True)
class Break:
    """What Dynamo says of something that it cannot take into a graph.

    Args:
        what: what it is.
        explanation: what that means here; empty where nothing more is said.
        hint: what can be done; empty where nothing is said.
        stack: the user's frames, the innermost last.
        of_model: whether the call itself is wrong, in eager mode too.
        raised: what the model itself raises, such as `ValueError: no such row`; empty where it raises nothing.
        raised_inside: what a backend raises that was given a graph; empty where none does.
    """

    what: str
    explanation: str = ""
    hint: str = ""
    stack: Sequence[traceback.FrameSummary] = ()
    of_model: bool = False
    raised: str = ""
    raised_inside: str = ""


def break_of(error: BaseException) -> Break | None:
    """What Dynamo says in an error that it raises; `None` where that is another one."""
    for one in with_causes(error):
        if isinstance(one, torch._dynamo.exc.TorchDynamoException) and hasattr(one, "real_stack"):
            wrong = isinstance(one, torch._dynamo.exc.TorchRuntimeError)
            inside = one.inner_exception if isinstance(one, torch._dynamo.exc.BackendCompilerFailed) else None
            text = "" if inside is None else f"{type(inside).__name__}: {first_line(inside)}"
            return replace(_read_break(str(one)), stack=one.real_stack or (), of_model=wrong, raised_inside=text)
    return None


def break_before(graph_module: fx.GraphModule) -> Break | None:
    """The graph break that ends one of Dynamo's graphs; `None` where it ends with the function."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    return replace(_read_break(reason.reason), stack=reason.user_stack)


def _read_break(text: str) -> Break:
    fields = ("Explanation", "Hint", "Developer debug context")
    said = {name: match[1].strip() for name in fields if (match := re.search(rf"{name}: (.+)", text))}
    raised = re.search(r"(?:: got |^raised exception )(.+)$", said.get(fields[0], "")) or re.search(
        r"^raised exception (.+)$", said.get(fields[2], "")
    )
    shown = re.sub(r"\[ConstantVariable\(str: (.*)\)\]", r"\1", raised[1]) if raised else ""  # as torch 2.11 says it
    shown = re.sub(r"^(\w+)\((['\"])(.*)\2,?\)$", r"\1: \3", shown)
    if said.get(fields[2]) == "value: ConstantVariable(bool: False)":
        shown = "AssertionError"  # at numbers that are known
    return Break(text.strip().partition("\n")[0], said.get(fields[0], ""), said.get(fields[1], ""), raised=shown)


def reads_values(error: BaseException) -> bool:
    """Whether an error, or what it was raised from, says that values are needed while only shapes are known."""
    return any(
        isinstance(one, torch._subclasses.fake_tensor.DataDependentOutputException) for one in with_causes(error)
    )


def dynamo_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises of its own."""
    return (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit)


def is_failed_assertion(error: BaseException) -> bool:
    """Whether a graph found a number that a tensor says to be none that it was captured for, such as a size of -1."""
    return isinstance(error, RuntimeError) and str(error).startswith("Runtime assertion failed for expression")


def needs_double_backward(error: BaseException) -> bool:
    """Whether an error says that a compiled backward was to be differentiated; torch has no type for it."""
    # By the second words what the backward reads was given away to it; they come before the first are thought of.
    texts = (
        "does not currently support double backward",
        "non-empty donated buffers which requires create_graph=False",
    )
    return isinstance(error, RuntimeError) and any(words in str(error) for words in texts)
