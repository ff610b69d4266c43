"""What one model of the corpus is, and the light models that ONNX ships for its backend tests.

Those are real architectures of 2017, all of whose weights are 0.02. With such weights the values of the nets without
normalisation grow past FP16's range, some past 1e30.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test

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
        low_share: least share of its float nodes that must be low in FP16 under `default`; `None` where a model is
            too small, or made of what stays FP32.
        slow: running it takes long; only the slow tests do.
        error: bound on the relative L2 error in FP16 with true rounding; `None` where the model is ill-conditioned.
    """

    name: str
    build: Callable[[], Built]
    kind: str = "odd"
    low_share: float | None = None
    slow: bool = False
    error: float | None = 3e-3


FOLDER = Path(onnx.backend.test.__file__).parent / "data" / "light"
NAMES = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)  # fmt: skip
OVERFLOW = {"bvlc_alexnet", "inception_v1", "resnet50", "squeezenet", "vgg19", "zfnet512"}
SLOW = set(NAMES) - {"squeezenet"}


def light(name: str) -> Built:
    """One of the models, with one image of random pixels."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    defaults = {tensor.name for tensor in model.graph.initializer}
    image = next(info for info in model.graph.input if info.name not in defaults)
    shape = [dim.dim_value for dim in image.type.tensor_type.shape.dim]
    pixels = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return model, [{image.name: pixels}]
