"""Which buffers the forward of a step in subgraphs writes: its update writes them, as in a step that is one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase


class WrittenBuffers:
    """Which buffers a model's forward writes, and what they held before.

    BatchNorm writes its buffers without telling autograd. Those of torch's modules are taken to be written in training;
    which others are is found by their values, in the first call in each mode.

    Args:
        model: the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: dict[tuple[bool, ...], set[str]] = {}

    @contextmanager
    def watched(self) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """Run a forward within; what this gives takes the new values out of the buffers, which are as before then.

        Where an error comes of the forward they are as before too.
        """
        modes = tuple(module.training for module in self._model.modules())
        held = [
            (
                f"{path}.{name}" if path else name,
                module._buffers,
                name,
                buffer,
                -1 if module.training and isinstance(module, _NormBase) else buffer._version,
                buffer.detach().clone(),
            )
            for path, module in self._model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

        def take() -> dict[str, Tensor]:
            known = self._known.get(modes)
            written = {}
            for path, table, name, buffer, version, old in held:
                now: Any = table[name] if name in table else None  # noqa: SIM401  # a scripted module's has no get
                is_written = now is not buffer or buffer._version != version
                if not isinstance(now, Tensor) or now.shape != buffer.shape or now.dtype is not buffer.dtype:
                    continue  # another one, which it is to keep
                if is_written or (path in known if known is not None else not torch.equal(buffer, old)):
                    written[path] = now.detach().clone()
                    table[name] = buffer
                    with torch.no_grad():
                        buffer.copy_(old)
            return written

        def take_and_note() -> dict[str, Tensor]:
            written = take()
            self._known[modes] = self._known.get(modes, set()) | set(written)
            return written

        try:
            yield take_and_note
        except BaseException:
            take()
            raise
