"""The light models that ONNX ships for its backend tests: real architectures of 2017, all of whose weights are 0.02.

With such weights the values of the nets without normalisation grow past FP16's range, some past 1e30.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test

from onnx_corpus.case import Built

FOLDER = Path(onnx.backend.test.__file__).parent / "data" / "light"
NAMES = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)  # fmt: skip
OVERFLOW = {"bvlc_alexnet", "inception_v1", "resnet50", "squeezenet", "vgg19", "zfnet512"}
SLOW = set(NAMES) - {"squeezenet"}


def build(name: str) -> Built:
    """One of the models, with one image of random pixels."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    defaults = {tensor.name for tensor in model.graph.initializer}
    image = next(info for info in model.graph.input if info.name not in defaults)
    shape = [dim.dim_value for dim in image.type.tensor_type.shape.dim]
    pixels = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return model, [{image.name: pixels}]
