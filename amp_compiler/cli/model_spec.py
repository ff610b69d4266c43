"""Finds the model and the example arguments that a command line names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from amp_compiler.cli.usage import UsageError
from amp_compiler.errors import AmpError
from amp_compiler.fx.examples import split_example
from amp_compiler.ir.dtypes import dtype_from_short
from amp_compiler.policy.marks import nearest

_ARGUMENT = re.compile(r"^(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>\w+)\[(?P<shape>\s*(?:\d+\s*(?:,\s*\d+\s*)*)?)\]$")
_SPEC_HINT = "write `package.module:name` or `path/to/file.py:name`"


def load_model(
    spec: str, argument_specs: Sequence[str] = (), *, eval_mode: bool = False, loss: Callable[..., Any] | None = None
) -> tuple[Any, Any]:
    """The model that `spec` names, and example arguments for it as `amp.explain` takes them.

    Args:
        spec: `package.module:name`, `path/to/file.py:name`, or a path that ends in `.onnx`.
        argument_specs: one text per argument, such as `fp32[8,64]` or `labels=i64[8]`; where there is none, the
            arguments that the factory gave are used. An ONNX file needs none.
        eval_mode: put the model into eval mode.
        loss: what the arguments are for, behind the model; without it they are those of `forward`.

    Raises:
        UsageError: an argument cannot be read, or does not fit the model.
        AmpError: the name leads to no model.
    """
    example_args = example_arguments(argument_specs)
    if spec.endswith(".onnx"):
        if not Path(spec).is_file():
            raise AmpError("there is no such file", where=spec, hint="name an ONNX file that exists")
        if eval_mode:
            raise UsageError("an ONNX file says its own mode", where="--eval", hint="leave it out")
        return spec, example_args
    model, own_example = _build(_find(spec), spec)
    if eval_mode:
        model.eval()
    example = own_example if example_args is None else example_args
    if example is None:
        raise AmpError(
            "the model needs example arguments",
            where=spec,
            hint="give --args 'fp32[8,64]' once for each, or let the factory give (model, example_args)",
        )
    if loss is None:
        _check_fit(model.forward, (), example, "forward", "--args" if example_args is not None else spec)
    else:
        _check_fit(loss, (model,), example, getattr(loss, "__name__", "the loss"), "--args")
    return model, example


def load_loss(spec: str) -> Callable[..., Any]:
    """The function that `spec` names, as `load_model` finds a model.

    Raises:
        UsageError: it cannot be called.
        AmpError: the name leads nowhere.
    """
    loss = _find(spec)
    if not callable(loss):
        hint = "name a function that is called as loss(model, *args)"
        raise UsageError(f"it is a {type(loss).__name__}, not a function", where=f"--loss {spec}", hint=hint)
    return loss  # type: ignore[no-any-return]


def _check_fit(function: Callable[..., Any], before: tuple[Any, ...], example: Any, name: str, where: str) -> None:
    """The example arguments must be those of the function, by number and name."""
    args, kwargs = split_example(example)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function that is written in C
        return
    try:
        signature.bind(*before, *args, **kwargs)
    except TypeError as cause:
        kind = UsageError if where == "--args" else AmpError
        what, hint = f"the example arguments do not fit {name}{signature}: {cause}", "give one for each, in its order"
        raise kind(what, where=where, hint=hint) from cause


def example_arguments(specs: Sequence[str]) -> Any:
    """Tensors for argument texts: a tuple, a dict of keywords, or both as (args, kwargs); `None` for no text at all.

    Real numbers are drawn from a normal distribution with a fixed seed, integers are zeros (a valid index everywhere),
    booleans are true.

    Raises:
        UsageError: where a text is not `dtype[sizes]` or `name=dtype[sizes]`, or torch can make no such tensor.

    Example:
        >>> example_arguments(["fp32[2,3]"])[0].shape
        torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(0)
    positional: list[torch.Tensor] = []
    keywords: dict[str, torch.Tensor] = {}
    for spec in specs:
        match, where = _ARGUMENT.match(spec.strip()), f"--args {spec}"
        if match is None:
            raise UsageError(
                "an argument is a type with its sizes", where=where, hint="write 'fp32[8,64]' or 'labels=i64[8]'"
            )
        if match["name"] in keywords:
            raise UsageError(f"'{match['name']}' is given twice", where=where, hint="leave one out")
        sizes = [int(size) for size in match["shape"].split(",") if size.strip()]
        tensor = _tensor(match["dtype"], sizes, generator, where)
        if match["name"]:
            keywords[match["name"]] = tensor
        else:
            positional.append(tensor)
    if keywords:
        return (tuple(positional), keywords) if positional else keywords
    return tuple(positional) or None


def _tensor(short: str, shape: list[int], generator: torch.Generator, where: str) -> torch.Tensor:
    try:
        dtype = getattr(torch, dtype_from_short(short).value, None)
    except AmpError as cause:
        raise UsageError(cause.what, where=where, hint=cause.hint) from cause
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"torch makes no tensors of type '{short}'", where=where, hint="use fp32, i64 or bool")
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return torch.randn(shape, generator=generator).to(dtype)
        return torch.ones(shape, dtype=dtype) if dtype is torch.bool else torch.zeros(shape, dtype=dtype)
    except (RuntimeError, OverflowError) as cause:  # sizes that no memory holds
        reason = str(cause).partition("\n")[0]
        raise UsageError(f"torch cannot make it: {reason}", where=where, hint="write smaller sizes") from cause


def _find(spec: str) -> Any:
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise AmpError(f"'{spec}' names no model", hint=_SPEC_HINT)
    value: Any = _import(place)
    for part in name.split("."):
        if not hasattr(value, part):
            names = [known for known in dir(value) if not known.startswith("_")]
            hint = nearest(part, names, "name a model, a class or a function of that module")
            raise AmpError(f"there is no '{part}' in it", where=place, hint=hint)
        value = getattr(value, part)
    return value


def _import(place: str) -> ModuleType:
    path = Path(place)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise AmpError("there is no such file", where=place, hint=_SPEC_HINT)
    # A model's own imports must work as they do when its file is run, or when Python is started in this folder.
    sys.path.insert(0, str(path.resolve().parent if is_file else Path.cwd()))
    try:
        return _import_file(path) if is_file else importlib.import_module(place)
    except SystemExit as cause:
        hint = "put what it does when it is run under `if __name__ == '__main__':`"
        raise AmpError("it ends the program when it is imported", where=place, hint=hint) from cause
    except Exception as cause:
        raise AmpError(
            f"importing it failed: {_describe(cause)}", where=place, hint="see that it imports in a Python prompt"
        ) from cause


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _build(model: Any, spec: str) -> tuple[torch.nn.Module, Any]:
    if not isinstance(model, torch.nn.Module) and callable(model):
        try:
            model = model()
        except SystemExit as cause:
            hint = "name a function without arguments that gives the model"
            raise AmpError("calling it ends the program", where=spec, hint=hint) from cause
        except Exception as cause:
            raise AmpError(
                f"calling it without arguments failed: {_describe(cause)}",
                where=spec,
                hint="name a function without arguments that gives the model",
            ) from cause
    example = None
    if isinstance(model, tuple) and len(model) == 2:
        model, example = model
        # A lone tensor is the commonest single argument; a tuple of one is what explain takes.
        example = (example,) if isinstance(example, torch.Tensor) else example
    if not isinstance(model, torch.nn.Module):
        raise AmpError(
            f"it is a {type(model).__name__}, not an nn.Module",
            where=spec,
            hint="name a model, or a function that gives a model or (model, example_args)",
        )
    return model, example


def _describe(cause: Exception) -> str:
    """The error in one line, with the innermost line of code that is neither ours nor the import system's."""
    ours = (__file__, importlib.__file__)
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if frame.filename not in ours and not frame.filename.startswith("<frozen")
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}{where}"
