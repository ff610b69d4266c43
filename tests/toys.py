"""The toy models and loss functions that tests share: small enough to compile in seconds, one for each kind of graph.

A `Toy` makes everything that a training step takes. Weights are made from a fixed seed.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import amp_compiler as amp

F = nn.functional


@dataclass(frozen=True)
class Toy:
    """A model with what trains it.

    Args:
        model: makes the model, or a dict of models.
        batch: makes one batch.
        loss: `loss(model, *batch)`.
        optimizer: makes the optimizer of the model, or a dict of them.
        options: further arguments of `amp.training_step`.
    """

    model: Callable[[], Any]
    batch: Callable[[], tuple[Any, ...]]
    loss: Callable[..., Any]
    optimizer: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters(), 1e-3)
    options: dict[str, Any] = field(default_factory=dict)

    def step(self, amp: Any, **options: Any) -> Any:
        """`amp.training_step` of this toy, with weights from a fixed seed."""
        torch.manual_seed(0)
        model = self.model()
        return amp.training_step(
            model, self.loss, self.optimizer(model), **{"dtype": "bf16", **self.options, **options}
        )


def sgd_step(model: nn.Module, loss: Callable[..., Any], rate: float = 0.1, **options: Any) -> Any:
    """A training step by SGD, in BF16 and node by node if nothing else is asked for."""
    import amp_compiler as amp

    optimizer = torch.optim.SGD(model.parameters(), rate)
    return amp.training_step(model, loss, optimizer, **{"dtype": "bf16", "backend": "eager", **options})


def squares(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error."""
    return (model(x) - y).square().mean()


def mean_square(model: Any, x: Tensor) -> Tensor:
    """Of what the model makes."""
    return model(x).square().mean()


def classes(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of class numbers."""
    return F.cross_entropy(model(x), y)


def plain_step(model: Any, loss_fn: Callable[..., Tensor], optimizer: torch.optim.Optimizer, *batch: Any) -> Tensor:
    """A step of a loop in plain torch: the loss."""
    optimizer.zero_grad()
    loss = loss_fn(model, *batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def eager_step(model: Any, loss_fn: Callable[..., Any], optimizer: Any = None, **options: Any) -> Any:
    """`amp.training_step` in BF16, run node by node, by SGD at a rate of 0.1, but for what is said otherwise."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return amp.training_step(model, loss_fn, optimizer, **{"dtype": "bf16", "backend": "eager", **options})


def train_beside_torch(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    batches: Iterable[tuple[Any, ...]],
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.SGD(parameters, 0.1),
    between: Callable[[int, Any, Any], None] = lambda number, model, optimizer: None,
    tolerance: dict[str, float] | None = None,
    **options: Any,
) -> tuple[Any, nn.Module]:
    """Hold a step in FP32 against a loop in plain torch: losses and, in the end, weights, buffers and names of states.

    Args:
        model: the step's; the loop has a copy.
        loss_fn: `loss_fn(model, *batch)`.
        batches: one for each step.
        make: makes an optimizer of parameters.
        between: `between(number, model, optimizer)`, done to both before each step.
        tolerance: `rtol` and `atol`; without it those of torch.
        **options: of the training step; the loop gathers and clips gradients as they say.

    Returns:
        The step, and the model of the loop.
    """
    plain = copy.deepcopy(model)
    ours, theirs = make(model.parameters()), make(plain.parameters())
    step = eager_step(model, loss_fn, ours, **{"enabled": False, **options})
    gathered = options.get("accumulate", 1)
    for number, batch in enumerate(batches):
        for one, optimizer in ((model, ours), (plain, theirs)):
            between(number, one, optimizer)
        loss = loss_fn(plain, *batch)
        (loss / gathered).backward()
        if (number + 1) % gathered == 0:
            nn.utils.clip_grad_norm_(plain.parameters(), options.get("clip_norm", torch.inf))
            theirs.step()
            theirs.zero_grad()
        torch.testing.assert_close(step(*batch), loss.detach(), **(tolerance or {}))
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), **(tolerance or {}))
    first, second = ({key: set(one) for key, one in each.state_dict()["state"].items()} for each in (ours, theirs))
    assert first == second
    return step, plain


def saved_bytes(model: nn.Module, call: Callable[[Any], Any], x: Tensor) -> tuple[int, Any]:
    """Bytes of all memory that a call keeps for its backward beside the parameters, and its result."""
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), result


def relative(matches: Tensor, exact: Tensor) -> float:
    """The error of a tensor, of the L2 norms."""
    matches, exact = matches.detach().double(), exact.detach().double()
    return float((matches - exact).norm() / exact.norm())


def mlp(wide: int = 16) -> nn.Module:
    """Linear, GELU, LayerNorm, Linear: what every rule set treats in another way."""
    return nn.Sequential(nn.Linear(8, wide), nn.GELU(), nn.LayerNorm(wide), nn.Linear(wide, 4))


def small(seed: int = 0) -> nn.Module:
    """Linear, ReLU, Linear: the least that has something to round, with weights from a seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def conv() -> nn.Module:
    """A convolution with BatchNorm, whose buffers change in every step, and a linear head."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(8 * 4 * 4, 4),
    )  # fmt: skip


class Composed(nn.Module):
    """Modules by name, and what is done with them: `Composed(lambda m, x: m.fc(x), fc=nn.Linear(8, 8))`."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Tied(nn.Module):
    """An embedding whose table is the head's weight as well."""

    def __init__(self, words: int = 32, wide: int = 64) -> None:
        super().__init__()
        self.table = nn.Embedding(words, wide)
        self.inner = nn.Linear(wide, wide)
        self.head = nn.Linear(wide, words, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.table(ids))))


def next_words(model: Any, ids: Tensor, following: Tensor) -> Tensor:
    """Cross-entropy of the words that follow."""
    return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())


def gpt2(dropout: float = 0.0, **options: Any) -> Any:
    """A small GPT-2 of transformers, whose output layer and lookup are one tensor."""
    import transformers

    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, **options}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=0, use_cache=False, **sizes, **drops)
    return transformers.GPT2LMHeadModel(config)


class Recurrent(nn.Module):
    """An LSTM, batch first, with a head on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    """One pre-norm block: attention, a residual sum, and a mask outside of autocast's reach."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        with torch.autocast(x.device.type, enabled=False):
            gain = x.float().square().mean(-1, keepdim=True).add(1e-5).rsqrt()
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width)) * gain


def gan() -> dict[str, nn.Module]:
    """A generator and a judge."""
    return {
        "generator": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)),
        "judge": nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    }


def judged(nets: dict[str, nn.Module], real: Tensor, noise: Tensor) -> Tensor:
    """The judge's loss on real and made samples, and the generator's on its own."""
    result = nets["generator"](noise)
    return F.softplus(-nets["judge"](real)).mean() + F.softplus(nets["judge"](result)).mean()


def _both(nets: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        "judge": torch.optim.Adam(nets["judge"].parameters(), 1e-3),
        "generator": torch.optim.SGD(nets["generator"].parameters(), 1e-2, momentum=0.9),
    }


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 3, 8, 8), torch.randint(4, (2,))


def _rows() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 8), torch.randn(4, 4)


def assert_three_rows(x: Tensor) -> Tensor:
    """Stands here because pytest rewrites the assertions of a file of tests."""
    assert x.shape[0] == 3, "three rows"
    return x


TOYS = {
    "mlp": Toy(mlp, _rows, squares),
    "conv": Toy(conv, _images, classes, lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)),
    "tied": Toy(Tied, lambda: (torch.randint(32, (2, 8)), torch.randint(32, (2, 8))), next_words),
    "lstm": Toy(Recurrent, lambda: (torch.randn(2, 5, 8), torch.randint(4, (2,))), classes),
    "gan": Toy(gan, lambda: (torch.randn(4, 8), torch.randn(4, 4)), judged, _both),
    "attention": Toy(Attention, lambda: (torch.randn(2, 4, 16), torch.randn(2, 4, 16)), squares),
    "accumulate": Toy(mlp, _rows, squares, options={"dtype": "fp16", "accumulate": 2, "clip_norm": 1.0}),
}
