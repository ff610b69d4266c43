"""Where Dynamo would replay otherwise than Python what a function writes to containers, or differentiates."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from amp_compiler.fx.torch_private.runtime import exchanged


@contextlib.contextmanager
def containers_as_in_python() -> Iterator[None]:
    """Within it Dynamo keeps the length that a deque is bounded to, and replays an order that alone has changed."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables import ConstantVariable, dicts, user_defined
    from torch._dynamo.variables.lists import DequeVariable

    effects: Any = SideEffects
    ordered: Any = getattr(user_defined, "OrderedDictVariable", dicts.ConstDictVariable)
    track, replay, call = effects.track_mutable, effects.codegen_update_mutated, ordered.call_method

    def tracked(self: Any, item: Any, variable: Any, *rest: Any, **options: Any) -> Any:
        if type(item) is collections.deque:
            variable.maxlen = ConstantVariable.create(item.maxlen)
        return track(self, item, variable, *rest, **options)

    def replayed(self: Any, *args: Any, **options: Any) -> None:
        for one in self._get_modified_vars():
            if isinstance(one, DequeVariable) and one.source is not None:
                one.maxlen = ConstantVariable.create(None)  # its items are no more than it takes
        replay(self, *args, **options)

    def called(self: Any, tx: Any, name: str, *args: Any, **options: Any) -> Any:
        result = call(self, tx, name, *args, **options)
        if name in ("move_to_end", "popitem"):
            getattr(self, "_base_vt", self).should_reconstruct_all = True
        return result

    with (
        exchanged(effects, "track_mutable", tracked),
        exchanged(effects, "codegen_update_mutated", replayed),
        exchanged(ordered, "call_method", called),
    ):
        yield


def broken_at_idle_checkpoints() -> contextlib.AbstractContextManager[None]:
    """Within it Dynamo breaks its graphs at a reentrant checkpoint that eager torch leaves without gradients.

    That is one none of whose tensors requires a gradient; in a graph its parameters would have some.
    """
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable as Checkpoint

    theirs = Checkpoint._call_function

    def learn(values: Iterable[Any]) -> bool:
        tensors = (one for one in (value.realize() for value in values) if isinstance(one, TensorVariable))
        return any(one.as_proxy().node.meta["example_value"].requires_grad for one in tensors)

    def call(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        option = kwargs.get("use_reentrant")
        reentrant = option is None or not option.is_python_constant() or option.as_python_constant() in (None, True)
        idle = reentrant and torch.is_grad_enabled() and not learn(args[1:])
        result = theirs(self, tx, args, kwargs)
        if idle and learn(getattr(result, "items", None) or [result]):
            raise torch._dynamo.exc.Unsupported("a reentrant checkpoint of inputs that require no gradient")
        return result

    return exchanged(Checkpoint, "_call_function", call)
