"""What the hand-made models of the corpus are put together from."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper
from onnx_models import make_model, value

from onnx_corpus.case import Batches, Built


class Builder:
    """Collects nodes and weights of one graph; every method gives the name of the value that it made.

    Args:
        seed: of the weights and the batches.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def node(self, op: str, inputs: Sequence[str], name: str = "", outputs: int = 1, **attributes: object) -> str:
        """Add a node; its first output has its name."""
        name = name or f"{op.lower()}_{len(self.nodes)}"
        result = [name, *(f"{name}_{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(op, list(inputs), result, name=name, **attributes))
        return name

    def weight(self, array: object, name: str = "") -> str:
        """Add an initializer; floats become FP32."""
        data = np.asarray(array)
        data = data.astype(np.float32) if data.dtype == np.float64 else data
        name = name or f"weight_{len(self.weights)}"
        self.weights[name] = data
        return name

    def linear(self, x: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        """A matrix product and a bias, with weights that keep the variance times `gain` squared."""
        weight = self.random.standard_normal((inputs, outputs)) * gain / np.sqrt(inputs)
        product = self.node("MatMul", [x, self.weight(weight)])
        return self.node("Add", [product, self.weight(0.1 * self.random.standard_normal(outputs))])

    def block(self, x: str, width: int) -> str:
        """A residual block: x + linear(relu(linear(x))), scaled to keep its size."""
        hidden = self.node("Relu", [self.linear(x, width, width, 1.4)])
        return self.node("Mul", [self.node("Add", [x, self.linear(hidden, width, width)]), self.weight(0.75)])

    def layer_norm(self, x: str, width: int) -> str:
        """Layer normalisation written out, as older exporters do."""
        mean = self.node("ReduceMean", [x], axes=[-1], keepdims=1)
        centred = self.node("Sub", [x, mean])
        square = self.node("Pow", [centred, self.weight(2.0)])
        variance = self.node("ReduceMean", [square], axes=[-1], keepdims=1)
        spread = self.node("Sqrt", [self.node("Add", [variance, self.weight(1e-5)])])
        scaled = self.node("Mul", [self.node("Div", [centred, spread]), self.weight(np.ones(width))])
        return self.node("Add", [scaled, self.weight(np.zeros(width))])

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """Normal numbers in FP32."""
        return (scale * self.random.standard_normal(shape)).astype(np.float32)

    def model(
        self, x_shape: Sequence[int | str], y: str, y_shape: Sequence[int | str], opset: int = 17
    ) -> onnx.ModelProto:
        """The model with the one input `x` and the one output `y`."""
        self.nodes.append(helper.make_node("Identity", [y], ["y"], name="result"))
        return make_model(self.nodes, [value("x", x_shape)], [value("y", y_shape)], self.weights, opset)

    def batches(self, *shape: int, count: int = 2) -> Batches:
        """Batches of normal numbers for the input `x`."""
        return [{"x": self.normal(*shape)} for _ in range(count)]


def mlp(depth: int = 6, width: int = 32, opset: int = 17) -> Built:
    """A chain of residual blocks behind a linear layer, so that the residual stream is low from there on."""
    b = Builder()
    x = b.linear("x", width, width)
    for _ in range(depth):
        x = b.block(x, width)
    return b.model(["n", width], x, ["n", width], opset), b.batches(8, width)


def wide_mlp() -> Built:
    """An MLP whose file is weights and little else."""
    return mlp(3, 256)
