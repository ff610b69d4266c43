"""A model's forward as one graph, for those who read it or run it themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from amp_compiler.fx.capture.errors import name_of
from amp_compiler.fx.capture.frontend import capture_once
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.capture.retrace import Names, captured_from_dynamo
from amp_compiler.fx.capture.spread import refuse_spread
from amp_compiler.fx.captured import Captured
from amp_compiler.fx.torch_private.dynamo import prints_ignored
from amp_compiler.fx.torch_private.runtime import no_saved_tensor_hooks


def inputs_for(inputs: Sequence[Any], leaves: Sequence[Any], captured_for: Sequence[Any]) -> list[Any]:
    """Inputs of a graph for another batch of the same form.

    Args:
        inputs: those that it was captured with.
        leaves: the batch, flat.
        captured_for: the batch that it was captured for, flat.
    """
    places = {id(leaf): place for place, leaf in enumerate(captured_for) if isinstance(leaf, Tensor)}
    return [leaves[places[id(one)]] if id(one) in places else one for one in inputs]


def capture_model(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    low: torch.dtype | None,
    dynamic: bool = False,
) -> tuple[Captured, tuple[Any, ...]]:
    """Capture a forward through the door by which `amp.compile` does; nothing runs, and nothing is changed.

    Args:
        model: the module, in the mode in which it is to run.
        args: positional arguments.
        kwargs: keyword arguments.
        low: the low type that is planned for; `None` where nothing is planned.
        dynamic: whether all sizes are symbolic.

    Returns:
        Its graph, and what it was captured with, one for each placeholder.

    Raises:
        CaptureError: the forward is not one graph.
    """
    refuse_spread(model)

    def run(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    def make(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Captured, tuple[Any, ...]]:
        with generators_kept(), no_saved_tensor_hooks():
            captured = captured_from_dynamo(graph_module, inputs, low, Names.of(model))
        return captured, (*inputs, *captured.constants.values())

    return capture_once(run, make, name_of(model), args, kwargs, dynamic, prints_ignored)  # type: ignore[no-any-return]
