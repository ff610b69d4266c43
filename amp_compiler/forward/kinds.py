"""What other tools ask of a compiled module: its original's class and members, and the arguments of its forward."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from amp_compiler.errors import AmpError
from amp_compiler.forward.first_calls import told_once

_OF_STATES = ("_version", "_save_to_state_dict", "_load_from_state_dict")  # members of a class that decide on its state


def refuse_lightning(model: object) -> None:
    """Refuse a module of Lightning, whose training is not its forward.

    Raises:
        AmpError: says what to write instead.
    """
    if any(one.__name__ == "LightningModule" and "lightning" in one.__module__ for one in type(model).__mro__):
        raise AmpError(
            f"'{type(model).__name__}' is a LightningModule, whose training_step calls more than its forward",
            hint="compile the net in it (self.net = amp.compile(net)), or train all of it as one graph with"
            " Trainer(plugins=amp_compiler.integrations.lightning.AmpPrecision())",
        )


def derived_class(model: nn.Module, base: type[nn.Module], run: Callable[..., Any]) -> type[Any]:
    """A class of compiled modules that is one of the model's class too, and has its name and members.

    A method is called with the compiled module, so that `self(…)` in it runs what was compiled. Everything else is read
    from the original. Called, the class makes a module of the original's class, as `type(self)(config)` expects.

    Args:
        model: the module.
        base: the class of all compiled modules, whose members go before those of the model's class.
        run: the forward: called with the object, the positional and the keyword arguments.
    """
    kind, module = type(model), base.__module__
    members: dict[str, Any] = {"__doc__": base.__doc__, "forward": _like_forward_of(model, run, base.forward.__doc__)}
    if not isinstance(model, fx.GraphModule):  # which makes a class of its own for each object, and writes to it
        if kind.__module__.partition(".")[0] != "torch":  # of torch's own Dynamo knows what they do
            module = kind.__module__

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            return kind(*args, **kwargs) if args or kwargs else object.__new__(cls)

        own = {**_members(kind, base), **members, "__module__": module, "__new__": new}
        with contextlib.suppress(TypeError):  # of a class that takes no other beside it
            return types.new_class(kind.__name__, (base, kind), exec_body=lambda names: names.update(own))
    return type(kind.__name__, (base,), {**members, "__module__": module})


def _members(kind: type[nn.Module], base: type[nn.Module]) -> dict[str, Any]:
    taken = {name for one in base.__mro__ if one not in nn.Module.__mro__ for name in vars(one)}
    members: dict[str, Any] = {"__del__": lambda module: None} if hasattr(kind, "__del__") else {}
    for one in kind.__mro__:
        if one in nn.Module.__mro__:
            continue
        for name, value in vars(one).items():
            if name in taken or name in members or (name.startswith("__") and name.endswith("__")):
                continue
            private = name.startswith("_") and name in vars(nn.Module) and name not in _OF_STATES
            members[name] = vars(nn.Module)[name] if private else _Member(kind, name, value)
    return members


class _Member:
    """A member of the model's class: a method is bound to the compiled module, all else is the original's."""

    def __init__(self, kind: type, name: str, value: Any) -> None:
        self._kind, self._name = kind, name
        self._function = value if isinstance(value, types.FunctionType) else None

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return getattr(self._kind, self._name)
        original = module._amp_original
        if self._function is None or self._name in original.__dict__:
            return getattr(original, self._name)
        return told_once(module, self._name, types.MethodType(self._function, module))


def _like_forward_of(model: nn.Module, run: Callable[..., Any], doc: str | None) -> Callable[..., Any]:
    """A method `forward` with the signature that the forward of a model has; any arguments where that says nothing."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    forward.__doc__ = doc
    try:
        shown = inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return forward
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = shown.replace(parameters=[me, *shown.parameters.values()])  # type: ignore[attr-defined]
    return forward
