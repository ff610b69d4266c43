"""Neutral passes and passes on FX; `PASSES` is the one table of them all."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from amp_compiler.errors import PassError
from amp_compiler.passes.base import Pass
from amp_compiler.policy.marks import nearest

_ROOMS = ("capture", "onnx_plan", "plan", "precision", "step", "device", "onnx_export", "diagnose")


def _class_of(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _passes() -> dict[str, str]:
    """A module of a room that has the class of its name is a pass; the others there help one."""
    here = Path(__file__).parent
    modules = [path for room in _ROOMS for path in sorted((here / room).glob("*.py"))]
    return {
        path.stem: f"{__name__}.{path.parent.name}.{path.stem}:{_class_of(path.stem)}"
        for path in modules
        if f"\nclass {_class_of(path.stem)}(" in path.read_text(encoding="utf-8")
    }


# Name of every pass, with the class that does it. The classes are imported when they are asked for, as those on FX need
# torch and the neutral ones must do without.
PASSES: dict[str, str] = _passes()
_CLASSES = {path.partition(":")[2]: name for name, path in PASSES.items()}


def find_pass(name: str) -> type[Pass[Any]]:
    """The class of the pass called `name`.

    Args:
        name: a key of `PASSES`.

    Raises:
        PassError: no pass has this name.

    Example:
        >>> find_pass("place_casts").__name__
        'PlaceCasts'
    """
    if name not in PASSES:
        raise PassError(f"'{name}' is no pass", hint=nearest(name, PASSES, f"there are {', '.join(PASSES)}"))
    module, _, attribute = PASSES[name].partition(":")
    pass_class: type[Pass[Any]] = getattr(import_module(module), attribute)
    return pass_class


def __getattr__(name: str) -> Any:
    """`amp_compiler.passes.Classify` and the like, imported when they are asked for."""
    if name in _CLASSES:
        return find_pass(_CLASSES[name])
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
