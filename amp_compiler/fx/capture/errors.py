"""What is said where a model cannot be captured: its own cause, the user's line, and a hint that fits."""

import linecache
import re
import traceback
from dataclasses import dataclass

from amp_compiler.errors import CaptureError, with_causes
from amp_compiler.fx.graph import user_source


@dataclass(frozen=True)
class _Kind:
    """One kind of failure.

    Args:
        what: what is wrong, behind the name of the model.
        hint: what the reader can do.
        text: what stands in what Dynamo or an exception says of it, as a regular expression.
        line: what stands in the user's line, as a regular expression.
    """

    what: str
    hint: str
    text: str
    line: str = ""


_BY_VALUES = r"[Dd]ata[- ]?[Dd]ependent|PendingUnbackedSymbolNotFound"
_BETWEEN = ("contextlib.py", "functools.py")  # files of Python's that stand between a user's frames and torch's
RETURN_THE_LOSS = "return the loss: the step runs backward and update"
BY_ITSELF = "call the model as it is, without capture: if it raises the same, the call or the model is wrong"
# The first that holds is said.
_KINDS = (
    _Kind("runs a backward itself", RETURN_THE_LOSS, r"^Unsupported Tensor\.backward"),
    _Kind(
        "calls an optimizer itself",
        RETURN_THE_LOSS,
        r"^Call to `torch\._dynamo\.graph_break|function `Optimizer\.",
        line=r"\.(step|zero_grad)\(",
    ),
    _Kind("calls a function with wrong arguments", "call it uncompiled to see which", "^failed to bind arguments"),
    _Kind(
        "takes a derivative itself (torch.autograd.grad, requires_grad_), which breaks its graph",
        "leave it so: a compiled model and a training step run what stands around it as graphs of their own",
        r"^using `torch\.autograd\.grad`|^Unsupported Tensor\.requires_grad_",
    ),
    _Kind(
        "takes rows by a mask, of which it depends on values how many there are",
        "use torch.where(mask, value, x) in the place of x[mask] = value to have one graph",
        "^Dynamic shape operator",
    ),
    _Kind(
        "is given what is neither a tensor, nor a number, nor a text",
        "pass tensors, numbers, strings, or containers of them",
        "^ValueError: Unsupported input type",
    ),
    _Kind(
        "gathers keywords (**kwargs) of which sizes are to be dynamic",
        "name them in the signature of its forward",
        "Must provide a tree_name",
    ),
    _Kind(
        "is a reentrant checkpoint of inputs that require no gradient, which leaves its parameters without gradients",
        "give the checkpoint use_reentrant=False",
        "^a reentrant checkpoint of inputs",
    ),
    _Kind(
        "holds a gradient of another size than its parameter, which was resized since",
        "drop it: model.zero_grad()",
        "^(RuntimeError: )?attempting to assign a gradient of size",
    ),
    _Kind(
        "sets the seed of random numbers",
        "set it before the call, or give the draws a torch.Generator of their own",
        "^SeedIsSetError",
    ),
    _Kind(
        "checks the values of a tensor", "remove the assert, or use torch._assert_async", _BY_VALUES, line=r"^assert\b"
    ),
    _Kind(
        "branches on the values of a tensor",
        "remove the branch (torch.where), or use torch.cond",
        _BY_VALUES,
        line=r"\b(if|elif|while|and|or|not|bool)\b",
    ),
    _Kind(
        "repeats something as often as the values of a tensor say",
        "use a number that does not depend on the input, or torch.while_loop",
        _BY_VALUES,
        line=r"\b(for|range)\b",
    ),
    _Kind(
        "needs the values of a tensor as Python numbers, such as a size or an index",
        "keep them in tensors, or give the numbers as arguments",
        _BY_VALUES,
    ),
    _Kind(  # as pack_padded_sequence and pad_packed_sequence do with lengths
        "needs the values of a tensor as sizes",
        "give them as numbers that do not depend on a tensor",
        "argument 'size'.*FakeTensor|pack_padded_sequence|pad_packed",
    ),
    _Kind(
        "makes a tensor whose size depends on the values of another one",
        "use an operator whose result has a size that is known before, such as torch.where in place of a mask",
        "^DynamicOutputShapeException",
    ),
    _Kind(
        "calls an operator that cannot be traced, because it does not say what its result is like",
        "give it a fake implementation with torch.library.register_fake",
        r"(?i)fake impl|UnsupportedOperator|meta kernel|register_fake|Meta implementation",
    ),
    _Kind(
        "leaves torch: it reads the memory or the numbers of a tensor with something else, such as NumPy",
        "do it with torch, or put it into an operator of its own with torch.library.custom_op",
        r"\.numpy\(\)|data pointer|data_ptr|data is not allocated",
    ),
)


SPOKEN_OF = "amp_spoken_of"  # attribute of a module that is no model, which messages name otherwise than by its class


def name_of(model: object) -> str:
    """How messages name a module: by its class."""
    return str(vars(model).get(SPOKEN_OF, type(model).__name__))


def capture_error(cause: Exception, model: object) -> CaptureError:
    """The error to raise for what `torch.export` raised, or the model's own code within it.

    Args:
        cause: the exception.
        model: the module that was to be captured.
    """
    where, name = user_frame(cause), name_of(model)
    for error in with_causes(cause):
        behind = f", so torch.export cannot take it as one graph: {_said(error)}"
        if (known := known_error(name, f"{type(error).__name__}: {error}", where, behind)) is not None:
            return known
    if any(type(one).__module__.partition(".")[0] == "torch" for one in with_causes(cause)):  # not one of Python's
        return CaptureError(
            f"torch.export cannot take {name} as one graph: {_said(cause)}",
            where=where,
            hint="write that part in another way, or put it under torch.compiler.disable",
        )
    return CaptureError(f"{name} raises {_said(cause)}", where=where, hint=BY_ITSELF)


def known_error(name: str, text: str, where: str, behind: str = "") -> CaptureError | None:
    """What is wrong with a line that cannot be captured, and what can be done; `None` for what is not known.

    Args:
        name: of what was to be captured.
        text: all that Dynamo says, or an exception with its name.
        where: `file:line` of the user's, as `user_source` gives it; empty where it is not known.
        behind: what is said behind it.
    """
    file, _, number = where.rpartition(":")
    line = linecache.getline(file, int(number)).strip() if file else ""
    for kind in _KINDS:
        if re.search(kind.text, text) and re.search(kind.line, line):
            shown = f" (`{line}`)" if line else ""
            return CaptureError(f"{name} {kind.what}{shown}{behind}", where=where, hint=kind.hint)
    return None


def user_frame(cause: BaseException) -> str:
    """`file:line` of the innermost frame of a traceback that is not torch's; empty where there is none."""
    traces = (traceback.extract_tb(one.__traceback__) for one in with_causes(cause))
    frames = [frame for trace in traces for frame in trace if not frame.filename.endswith(_BETWEEN)]
    return user_source("".join(traceback.format_list(frames)))


def _said(error: BaseException) -> str:
    """The first line of an exception; of a list of sizes that do not hold what the list says, for its head does not."""
    lines = str(error).strip().splitlines()
    if lines and lines[0].startswith("Constraints violated"):
        lines = [line.strip().removeprefix("- ") for line in lines if line.startswith("  - ")] or lines
        lines = ["; ".join(lines)]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
