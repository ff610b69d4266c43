"""`amp.compile(weights="low")`: parameters that are stored in 16 bits alone, for inference."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from amp_compiler.errors import AmpError
from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ir.plan import PrecisionPlan

logger = logging.getLogger("amp_compiler")
NO_TRAINING = 'the model keeps its weights in 16 bits alone (weights="low"), which no training can update well'
_FOR_TRAINING = 'compile the model without weights="low" to train it'


def refuse_training(model: nn.Module) -> None:
    """Refuse a call that is to be differentiated by such weights.

    Raises:
        AmpError: gradients are enabled, and a parameter requires one.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in model.parameters()):
        raise AmpError(NO_TRAINING, hint=f"call it under torch.no_grad() or torch.inference_mode(); {_FOR_TRAINING}")


def refuse_as_trained(model: object) -> None:
    """Refuse a compiled module as the model of a training step.

    Raises:
        AmpError: it keeps its weights in 16 bits alone.
    """
    if getattr(getattr(model, "_amp_settings", None), "weights", "") == "low":
        raise AmpError(NO_TRAINING, hint=_FOR_TRAINING)


class LowWeights:
    """The parameters of a model that are stored in 16 bits.

    While the model is captured they are FP32, for which it was written: what asks for their type is answered so.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Around a capture; `store` ends it, so that Dynamo guards the parameters as they are stored."""
        self._kept = {id(one): (one, one.data) for one in self._model.parameters() if one.dtype in LOW_TYPES}
        for parameter, data in self._kept.values():
            parameter.data = data.float()
        try:
            yield
        finally:
            self._restore()

    def _restore(self) -> None:
        for parameter, data in self._kept.values():
            parameter.data = data
        self._kept = {}
        # What weights in FP32 had taken, and then what was compiled, glibc keeps for itself: half of the model.
        if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
            trim(0)

    def store(
        self, captured: Captured, inputs: Sequence[Any], plan: PrecisionPlan, low: torch.dtype
    ) -> dict[str, torch.dtype]:
        """Convert the parameters of a graph, in place, but for those that a rule or the model has read in FP32.

        Args:
            captured: in normal form.
            inputs: what Dynamo gives it.
            plan: of that graph.
            low: the 16-bit type.

        Returns:
            The types of those that have 16 bits, by placeholder.

        Raises:
            AmpError: a number is beyond what that type holds; the parameter stays as it is.
        """
        wide, stored = _read_wide(captured, plan), {}
        for entry, parameter in zip(captured.inputs, inputs, strict=False):
            if entry.source is not Source.PARAMETER or not isinstance(parameter, nn.Parameter):
                continue
            known = self._kept.get(id(parameter))
            if known is None and parameter.dtype is torch.float32 and entry.name not in wide:
                rounded = parameter.detach().to(low)
                if not torch.equal(rounded.isinf(), parameter.detach().isinf()):
                    raise AmpError(
                        f"numbers of '{entry.target}' are beyond what {str(low).removeprefix('torch.')} holds",
                        hint="use dtype='bf16', or a rule that keeps what reads it in FP32",
                    )
                parameter.data, stored[entry.name] = rounded, low
            elif known is not None:
                stored[entry.name] = known[1].dtype
                if entry.name in wide:
                    logger.warning("'%s' has 16 bits already: '%s' reads it in FP32", entry.target, wide[entry.name])
        self._restore()
        return stored


def _read_wide(captured: Captured, plan: PrecisionPlan) -> dict[str, str]:
    """Parameters that a node reads in FP32 by a rule or by the model's own word, with the name of that node."""
    of = {entry.name: entry.name for entry in captured.inputs if entry.source is Source.PARAMETER}
    wide: dict[str, str] = {}
    for node in plan.nodes:
        read = [of[value] for value in node.inputs if value in of]
        if node.family == "view":
            of.update((value, read[0]) for value, _ in node.outputs if read)
        elif node.precision == "fp32" and node.requested not in ("widest", "follow"):
            wide.update((name, node.name) for name in read)
    return wide
