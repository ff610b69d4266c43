"""The ways of doing an AdamW update that `update.py` measures, the tensors they do it on, and the bytes they move."""

from __future__ import annotations

from collections.abc import Callable

import torch
from measuring import TORCH_TYPES
from torch import nn

import amp_compiler.ops.update.operators  # noqa: F401 - defines torch.ops.amp_compiler
from amp_compiler.ops.cpu import update as cpu_update

OURS, FUSED, FOREACH, COMPILED, CASTS, COPY = VARIANTS = (
    "amp_compiler", "AdamW(fused=True)", "AdamW(foreach=True)", "torch.compile", "casts alone", "copy",
)  # fmt: skip
LR, BETAS, EPS, DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
SCALE, CLIP = 1024.0, 1.0
_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
Shapes = list[tuple[int, ...]]


def transformer(parameters: int) -> Shapes:
    """Embedding, six blocks and their norms and biases: matrices of several sizes, and half the tensors are vectors."""
    width = max(8, round((parameters / 80) ** 0.5 / 8) * 8)
    block: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(8 * width, width), *block * 6, (width,), (width,)]


def wide(parameters: int) -> Shapes:
    """Four large matrices and their biases."""
    width = max(8, round((parameters / 4) ** 0.5 / 8) * 8)
    return [(width, width), (width,)] * 4


def convnet(parameters: int) -> Shapes:
    """Four stages of three residual blocks, with batch norms: many tensors, most of them small."""
    first = max(4, round((parameters / 4590) ** 0.5 / 4) * 4)
    layer = [[(c, c, 3, 3), (c,), (c,)] for c in (first, 2 * first, 4 * first, 8 * first)]
    return [shape for stage in layer for shape in stage * 6]


MIXES: dict[str, Callable[[int], Shapes]] = {"transformer": transformer, "wide": wide, "convnet": convnet}

Terms = tuple[tuple[int, str], ...]
_STATE: Terms = ((24, "weight and moments"),)
_FUSED: Terms = ((4, "gradient"), *_STATE)
_FOREACH: Terms = (  # one pass over memory per operation
    (8, "decay"), (12, "lerp"), (8, "mul"), (12, "addcmul"), (8, "sqrt"), (8, "div"), (8, "add"), (16, "addcdiv"),
)  # fmt: skip
_CLIPPED: Terms = ((8, "unscale"), (4, "norm"), (8, "clip"))
_GRADIENT_CAST: Terms = ((6, "gradient cast"),)
_WEIGHT_CAST: Terms = ((6, "weight cast"),)


def terms(variant: str, dtype: str) -> Terms:
    """Bytes that a variant reads and writes per parameter, and what for.

    Args:
        variant: one of `VARIANTS`.
        dtype: of the gradients, a key of `TORCH_TYPES`.
    """
    if variant == COPY:
        return ((8, "copy"),)
    if variant == CASTS:
        return (*_GRADIENT_CAST, *_WEIGHT_CAST)
    size = TORCH_TYPES[dtype].itemsize
    low = dtype != "fp32"
    if variant == OURS:
        return ((size, "check"), (size, "gradient"), *_STATE, *(((2, "16-bit copy"),) if low else ()))
    update = (*(_CLIPPED if dtype == "fp16" else ()), *(_FOREACH if variant == FOREACH else _FUSED))
    return (*_GRADIENT_CAST, *update, *_WEIGHT_CAST) if low else update


def bytes_per_parameter(variant: str, dtype: str) -> int:
    """The sum of `terms`."""
    return sum(count for count, _ in terms(variant, dtype))


def formula(variant: str, dtype: str) -> str:
    """`terms` as text."""
    return " + ".join(f"{count} {what}" for count, what in terms(variant, dtype))


class Tensors:
    """Weights, gradients as a backward leaves them, and in 16 bits the weights' copies; the same on every call.

    They are made where they are used.

    Args:
        shapes: of the weights.
        dtype: of the gradients, a key of `TORCH_TYPES`; FP16 gradients are multiplied by the loss scale.
        device: `cpu` or `cuda`.
    """

    def __init__(self, shapes: Shapes, dtype: str, device: str) -> None:
        kind = TORCH_TYPES[dtype]
        low = dtype != "fp32"
        self.scaled = dtype == "fp16"
        random = torch.Generator(device).manual_seed(0)
        size = 1e-3 * (SCALE if self.scaled else 1.0)
        self.weights = [nn.Parameter(0.02 * torch.randn(s, generator=random, device=device)) for s in shapes]
        self.grads = [(size * torch.randn(s, generator=random, device=device)).to(kind) for s in shapes]
        self.low_weights = [weight.detach().to(kind) for weight in self.weights] if low else []


class Ours(Tensors):
    """The check, the clipping factor and the update, as a compiled training step runs them."""

    def __init__(self, shapes: Shapes, dtype: str, device: str) -> None:
        super().__init__(shapes, dtype, device)
        if device == "cpu" and not cpu_update.available():
            raise SystemExit("the native updates are not compiled: install a C++ compiler, or set CXX")
        operators = torch.ops.amp_compiler
        names = ("grad_check", "adam_update")
        self.check, self.adam = (
            cpu_update.FUNCTIONS[name] if device == "cpu" else getattr(operators, name) for name in names
        )
        self.masters = [weight.detach() for weight in self.weights]
        self.moments = [[torch.zeros_like(weight) for weight in self.masters] for _ in range(2)]
        self.steps = [torch.zeros((), device=device) for _ in shapes]
        self.hyper = torch.tensor([LR, *BETAS, EPS, DECAY, 0.0], dtype=torch.float64, device=device)
        self.inverse = torch.tensor(1.0 / SCALE if self.scaled else 1.0, device=device)
        self.run = _replayed(self.update) if device == "cuda" else self.update

    def update(self) -> None:
        norm, nonfinite, _ = self.check(self.grads, self.inverse)
        clip = (CLIP / (norm + _CLIP_EPSILON)).clamp(max=1.0) if self.scaled else 1.0
        state = (self.masters, self.grads, *self.moments, [], self.low_weights, self.steps)
        self.adam(*state, self.hyper, self.inverse * clip, nonfinite, False, False, True)

    def __call__(self) -> None:
        self.run()


def _replayed(run: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of it, which is how a compiled step runs on CUDA."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


class Casts(Tensors):
    """What torch.autocast casts around the update: gradients to FP32, weights to 16 bits."""

    def __init__(self, shapes: Shapes, dtype: str, device: str) -> None:
        super().__init__(shapes, dtype, device)
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad.float() if self.low_weights else grad
        self.wide = [weight.grad for weight in self.weights]

    def widen(self) -> None:
        if self.low_weights:
            torch._foreach_copy_(self.wide, self.grads)

    def narrow(self) -> None:
        if self.low_weights:
            torch._foreach_copy_(self.low_weights, [weight.detach() for weight in self.weights])

    def __call__(self) -> None:
        self.widen()
        self.narrow()


class Torch(Casts):
    """An optimizer of torch between the casts; in FP16 with `GradScaler` and `clip_grad_norm_`."""

    def __init__(self, variant: str, shapes: Shapes, dtype: str, device: str) -> None:
        super().__init__(shapes, dtype, device)
        kind = {"fused": True} if variant == FUSED else {"foreach": True}
        self.optimizer = torch.optim.AdamW(self.weights, LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **kind)
        if variant == COMPILED:
            self.optimizer.step = torch.compile(self.optimizer.step)
        self.scaler = torch.amp.GradScaler(device, init_scale=SCALE, growth_interval=2**30, enabled=self.scaled)
        self.scaler.scale(torch.zeros((), device=device))  # makes the scale's tensor, as scaling a loss does

    def __call__(self) -> None:
        self.widen()
        if self.scaled:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.weights, CLIP)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.narrow()


def make(variant: str, shapes: Shapes, dtype: str, device: str) -> Callable[[], object]:
    """One way to do the update: call it for one.

    Args:
        variant: one of `VARIANTS`.
        shapes: of the weights.
        dtype: of the gradients.
        device: `cpu` or `cuda`.
    """
    if variant == OURS:
        return Ours(shapes, dtype, device)
    if variant == CASTS:
        return Casts(shapes, dtype, device)
    if variant == COPY:
        count = sum(torch.Size(shape).numel() for shape in shapes)
        source, target = (torch.randn(count, device=device) for _ in range(2))
        return lambda: target.copy_(source)
    return Torch(variant, shapes, dtype, device)
