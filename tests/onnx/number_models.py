"""Models that compute sizes and indices in floating point."""

import numpy as np
from onnx import TensorProto as T
from onnx_models import info, model, node, scalar, weight


def doubled():
    """`F.interpolate(x, scale_factor=2.0, recompute_scale_factor=True)` as exporters write it out."""
    nodes = [
        node("Shape", ["x"], ["shape"]),
        node("Slice", ["shape", "two", "four"], ["spatial"]),
        node("Slice", ["shape", "zero", "two"], ["channels"]),
        node("Cast", ["spatial"], ["wide"], to=T.FLOAT),
        node("Mul", ["wide", "factor"], ["scaled"], "scale"),
        node("Floor", ["scaled"], ["whole"], "floor"),
        node("Cast", ["whole"], ["sizes"], "sizes", to=T.INT64),
        node("Concat", ["channels", "sizes"], ["all"], axis=0),
        node("Conv", ["x", "w"], ["c"], "conv", pads=[1, 1, 1, 1]),
        node("Resize", ["c", "", "", "all"], ["y"], "resize", mode="nearest"),
    ]
    ints = [scalar(name, [number], np.int64) for name, number in (("zero", 0), ("two", 2), ("four", 4))]
    return model(
        nodes, [info("x", 1, 2, "h", "w")], [info("y", 1, 2, "H", "W")],
        [*ints, scalar("factor", 2.0), weight("w", 2, 2, 3, 3)],
    )  # fmt: skip


def offset_rows():
    """Rows of a table of 5,100, from number 4,097 on."""
    nodes = [
        node("Cast", ["ids"], ["wide"], to=T.FLOAT),
        node("Add", ["wide", "offset"], ["moved"], "move"),
        node("Cast", ["moved"], ["rows"], to=T.INT64),
        node("Gather", ["table", "rows"], ["r"]),
        node("MatMul", ["r", "w"], ["y"]),
    ]
    return model(nodes, [info("ids", "n", kind=T.INT64)], [info("y", "n", 8)],
                   [weight("table", 5100, 8), weight("w", 8, 8), scalar("offset", 4097.0)])  # fmt: skip
