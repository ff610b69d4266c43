"""Models of about 100 nodes with five planted faults between ordinary layers, for torch and as an ONNX file."""

import numpy as np
import onnx
import torch
from onnx_models import info, model, node, scalar
from torch import nn

WIDTH, BLOCKS = 16, 20
# The nodes that have to be in FP32: module and op.
PLANTED = {(f"channels.{place}.up", "aten.linear") for place in range(5)}


def linear(inputs: int, built: int, gain: float = 1.0, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(inputs, built)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(built, inputs, generator=generator) * gain / inputs**0.5)
        layer.bias.zero_()
    return layer


class Block(nn.Module):
    """Five nodes that 16 bits do no harm to."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 2 * WIDTH, seed=seed), linear(2 * WIDTH, WIDTH, seed=seed + 1)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * 0.1


class Channel(nn.Module):
    """One channel of 32 beyond 65504."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.down = linear(WIDTH, 32, seed=seed), linear(32, WIDTH, seed=seed + 100)
        with torch.no_grad():
            self.up.weight[7] *= 1e5

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) * 1e-5))


class Net(nn.Module):
    """Blocks, with a fault behind every fourth of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(10 * place) for place in range(BLOCKS))
        self.channels = nn.ModuleList(Channel(place) for place in range(5))

    def forward(self, x):
        for place, block in enumerate(self.blocks):
            x = block(x)
            if place % 4 == 1:
                x = self.channels[place // 4](x)
        return x


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def file(blocks: int = BLOCKS) -> tuple[onnx.ModelProto, set[str]]:
    """An ONNX file of as many nodes, with a product beyond 65504 behind every fourth block; the nodes for FP32."""
    random = np.random.default_rng(0)
    nodes, planted, value = [], set(), "x"
    stored = [scalar("small", 2.0**-17), scalar("tenth", 0.1)]

    def add(name: str, op: str, *inputs: str) -> str:
        nodes.append(node(op, inputs, [f"{name}:0"], name))
        return f"{name}:0"

    def product(name: str, value: str, gain: float) -> str:
        stored.append(scalar(f"{name}/w", random.standard_normal((WIDTH, WIDTH)) * gain))
        return add(name, "MatMul", value, f"{name}/w")

    for place in range(blocks):
        name = f"block{place}"
        down = product(f"{name}/down", add(f"{name}/tanh", "Tanh", product(f"{name}/up", value, 0.25)), 0.25)
        value = add(f"{name}/add", "Add", value, add(f"{name}/small", "Mul", down, "tenth"))
        if place % 4 == 1:
            scaled = add(f"{name}/scaled", "Mul", product(f"{name}/wide", value, 1.5e4), "small")
            value = add(f"{name}/fault", "Add", value, add(f"{name}/bounded", "Tanh", scaled))
            planted |= {f"{name}/wide", f"{name}/scaled"}
    nodes[-1].output[0] = "y"
    return model(nodes, [info("x", 8, WIDTH)], [info("y", 8, WIDTH)], stored), planted
