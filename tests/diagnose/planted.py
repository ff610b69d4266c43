"""Models of about 200 nodes with five planted faults between ordinary layers, for torch and as ONNX files."""

from __future__ import annotations

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

WIDTH, BLOCKS = 16, 40
# What puts the ops of the faults low, where `default` knows better.
RULES = {"version": 1, "extends": "default", "allow": ["reduction", "aten.softmax", "aten.log", "aten.sum"]}
# The nodes that have to be in FP32: module and op.
PLANTED = {
    ("attention", "aten.matmul"),
    ("variance", "aten.mul"),
    ("variance", "aten.mean"),
    ("channel.up", "aten.linear"),
    ("log", "aten.softmax"),
    ("log", "aten.log"),
    ("total", "aten.sum"),
}


def linear(given: int, made: int, gain: float = 1.0, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(given, made)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(made, given, generator=generator) * gain / given**0.5)
        layer.bias.zero_()
    return layer


class Block(nn.Module):
    """Five nodes that 16 bits do no harm to."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 2 * WIDTH, seed=seed), linear(2 * WIDTH, WIDTH, seed=seed + 1)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * 0.1


class Attention(nn.Module):
    """Logits beyond 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = linear(WIDTH, WIDTH, 300.0, 1), linear(WIDTH, WIDTH, 300.0, 2)

    def forward(self, x):
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2))
        return x + torch.tanh(scores * 1e-5).mean(-1, keepdim=True)


class Variance(nn.Module):
    """Squares beyond 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(WIDTH, WIDTH, 2000.0, 3)

    def forward(self, x):
        hidden = self.inner(x)
        centred = hidden - hidden.mean(-1, keepdim=True)
        square = centred * centred
        return x + centred * torch.rsqrt(square.mean(-1, keepdim=True) + 1e-5)


class Channel(nn.Module):
    """One channel of 32 beyond 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 32, seed=4), linear(32, WIDTH, seed=5)
        with torch.no_grad():
            self.up.weight[7] *= 1e5

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) * 1e-5))


class Log(nn.Module):
    """The logarithm of a softmax that underflows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(WIDTH, WIDTH, 10.0, 6)

    def forward(self, x):
        return x + torch.log(torch.softmax(self.inner(torch.tanh(x)), -1)) * 0.01


class Total(nn.Module):
    """A sum of 100,000 terms."""

    def forward(self, x):
        terms = (x.mean() * 0.1 + 1.0).expand(100_000)
        return x + terms.sum() * 1e-5


class Net(nn.Module):
    """Blocks, with a fault behind every eighth of forty, every second of ten."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(10 * place) for place in range(blocks))
        self.attention, self.variance, self.channel, self.log, self.total = (
            Attention(), Variance(), Channel(), Log(), Total(),
        )  # fmt: skip

    def forward(self, x):
        faults = iter((self.attention, self.variance, self.channel, self.log, self.total))
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place % (len(self.blocks) // 5) == 1:
                x = next(faults)(x)
        return x


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


# ---- as a file

SMALL = 2.0**-17  # a power of two, which FP16 holds: others as small keep what reads them in FP32
ONNX_RULES = {"version": 1, "extends": "default", "allow": ["onnx.Log", "onnx.Softmax", "onnx.ReduceSum"]}
# What makes a value that 16 bits do not hold, or reads one. The square goes with its mean: both are converted alike; so
# does what makes a mean of the sum: what divides a sum that is kept in FP32 keeps it by itself.
ONNX_PLANTED = {
    "attention/scores", "attention/scaled", "variance/mean", "variance/scaled", "channel/up", "channel/scaled",
    "log/softmax", "log/log", "total/sum",
}  # fmt: skip


class _File:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.stored: dict[str, TensorProto] = {}

    def add(self, name: str, op: str, *inputs: str | float | np.ndarray, **attributes) -> str:
        names = [
            one if isinstance(one, str) else self.store(f"{name}/{place}", one) for place, one in enumerate(inputs)
        ]
        self.nodes.append(helper.make_node(op, names, [f"{name}:0"], name, **attributes))
        return f"{name}:0"

    def store(self, name: str, value) -> str:
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self.stored[name] = numpy_helper.from_array(array, name)
        return name

    def weight(self, layer: nn.Linear) -> np.ndarray:
        return layer.weight.detach().numpy().T.copy()


def file(blocks: int = BLOCKS) -> onnx.ModelProto:
    """The same as an ONNX model, with names of its own."""
    net, made = Net(blocks), _File()
    x = "x"
    axes = np.array([-1])

    def attention(x):
        query = made.add("attention/query", "MatMul", x, made.weight(net.attention.query))
        key = made.add("attention/key", "MatMul", x, made.weight(net.attention.key))
        turned = made.add("attention/turned", "Transpose", key, perm=[1, 0])
        scores = made.add("attention/scores", "MatMul", query, turned)
        bounded = made.add("attention/tanh", "Tanh", made.add("attention/scaled", "Mul", scores, SMALL))
        return made.add("attention/mean", "ReduceMean", bounded, axes, keepdims=1)

    def variance(x):
        hidden = made.add("variance/inner", "MatMul", x, made.weight(net.variance.inner))
        square = made.add("variance/square", "Mul", hidden, hidden)
        mean = made.add("variance/mean", "ReduceMean", square, axes, keepdims=1)
        return made.add("variance/tanh", "Tanh", made.add("variance/scaled", "Mul", mean, SMALL / 32))

    def channel(x):
        up = made.add("channel/up", "MatMul", x, made.weight(net.channel.up))
        bounded = made.add("channel/tanh", "Tanh", made.add("channel/scaled", "Mul", up, SMALL))
        return made.add("channel/down", "MatMul", bounded, made.weight(net.channel.down))

    def log(x):
        inner = made.add("log/inner", "MatMul", made.add("log/tanh", "Tanh", x), made.weight(net.log.inner))
        logs = made.add("log/log", "Log", made.add("log/softmax", "Softmax", inner, axis=-1))
        return made.add("log/scaled", "Mul", logs, 0.01)

    def total(x):
        mean = made.add("total/mean", "ReduceMean", x, keepdims=0)
        shifted = made.add("total/shifted", "Add", made.add("total/small", "Mul", mean, 0.1), 1.0)
        terms = made.add("total/terms", "Expand", shifted, np.array([100_000]))
        return made.add(
            "total/scaled", "Mul", made.add("total/sum", "ReduceSum", terms, np.array([0]), keepdims=0), 1e-5
        )

    faults = iter((attention, variance, channel, log, total))
    for place, block in enumerate(net.blocks):
        name = f"block{place}"
        up = made.add(f"{name}/up", "MatMul", x, made.weight(block.up))
        down = made.add(f"{name}/down", "MatMul", made.add(f"{name}/tanh", "Tanh", up), made.weight(block.down))
        x = made.add(f"{name}/add", "Add", x, made.add(f"{name}/scaled", "Mul", down, 0.1))
        if place % (blocks // 5) == 1:
            x = made.add(f"{name}/fault", "Add", x, next(faults)(x))
    made.nodes[-1].output[0] = "y"
    ends = [helper.make_tensor_value_info(one, TensorProto.FLOAT, [8, WIDTH]) for one in ("x", "y")]
    graph = helper.make_graph(made.nodes, "planted", ends[:1], ends[1:], list(made.stored.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
