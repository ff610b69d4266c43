"""What one model of the corpus is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx

Batches = list[dict[str, np.ndarray]]
Built = tuple[onnx.ModelProto, Batches]


@dataclass(frozen=True)
class Case:
    """A model of the corpus.

    Args:
        name: its name in the tests.
        build: makes the model and its input batches, the same bytes on every call.
        kind: `benign`, `overflow` (values past FP16's range), `outlier` (a few very large channels) or `odd` (there for
            its structure).
        low_weights: all of its weights can go low, so that the file shrinks to about half.
        low_share: least share of its float nodes that must be low in FP16 under `default`; `None` where a model is
            too small, or made of what stays FP32.
        slow: running it takes long; only the slow tests do.
        error: bound on the relative L2 error in FP16 with true rounding; `None` where the model is ill-conditioned.
    """

    name: str
    build: Callable[[], Built]
    kind: str = "odd"
    low_weights: bool = False
    low_share: float | None = None
    slow: bool = False
    error: float | None = 3e-3
