"""What a step is asked for, on a CUDA device: it errs no more from an FP32 loop than the same step does on a CPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import classes, conv, eager_step, next_words
from training_gpu import REPLAYED

import amp_compiler as amp

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
STEPS, WIDE, WORDS = 10, 64, 96


class Transformer(nn.Module):
    """A table, two pre-norm blocks with causal attention and a head of the table's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDE)
        block = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDE, 4, 128, **block) for _ in range(2))
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=ids.device)
        hidden = self.table(ids) * 4
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


class Images(nn.Module):
    """Grouped, strided and transposed convolutions with GroupNorm, an average and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.inner(x)


class Layers(nn.Module):
    """Linear layers and a product of two activations, whose sizes FP8 takes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(WIDE, 128), nn.Linear(128, 48, bias=False), nn.Linear(48, 4)

    def forward(self, x):
        return self.third(F.silu(self.second(F.relu(self.first(x)))))


class Broken(nn.Module):
    """A graph break, so that the step runs in subgraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, 32), nn.Linear(32, 4)

    def forward(self, x):
        hidden = self.first(x)
        torch._dynamo.graph_break()
        return self.second(F.relu(hidden))


def words():
    ids = torch.randint(WORDS, (8, 17))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def images():
    return torch.randn(8, 3, 8, 8), torch.randint(4, (8,))


def rows():
    return torch.randn(32, WIDE), torch.randint(4, (32,))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.01, momentum=0.9, nesterov=True)  # with 0.05 rounding decides where it goes


NETS = {
    "transformer": (Transformer, words, next_words),
    "images": (Images, images, classes),
    "conv": (conv, images, classes),
    "layers": (Layers, rows, classes),
    "broken": (Broken, rows, classes),
}
# Net, arguments of the step, optimizer, and whether the whole is one CUDA graph.
FEATURES = {
    **{f"{net}, {dtype}": (net, {"dtype": dtype}, sgd) for net in NETS for dtype in ("bf16", "fp16")},
    **{f"rules {name}": ("layers", {"rules": name}, sgd) for name in ("fp8", "fp8-delayed", "fp8-rowwise", "mxfp8")},
    "rules fp8, fp16": ("layers", {"rules": "fp8", "dtype": "fp16"}, sgd),
    "rules fp8-rowwise, fp16": ("layers", {"rules": "fp8-rowwise", "dtype": "fp16"}, sgd),
    "rules fp8, transformer": ("transformer", {"rules": "fp8"}, sgd),
    **{
        f"rules {name}": ("transformer", {"rules": name}, sgd)
        for name in ("fast", "safe", "torch-amp", "apex-o1", "apex-o2", "apex-o3", "deepspeed", "tensorflow", "mxnet")
    },
    "rules nvcaffe": ("conv", {"rules": "nvcaffe", "dtype": "fp16"}, sgd),
    "accumulate": ("transformer", {"accumulate": 2, "clip_norm": 1.0, "dtype": "fp16"}, sgd),
    "clipping": ("transformer", {"clip_norm": 0.1}, sgd),
    "loss scale": ("layers", {"dtype": "fp16", "loss_scale": 128.0}, sgd),
    "kahan": (
        "layers",
        {"rules": {"version": 1, "extends": "default", "weights": {"master": "low", "rounding": "kahan"}}},
        sgd,
    ),
    "without AMP": ("transformer", {"enabled": False}, sgd),
    **{
        kind.__name__: ("layers", {}, lambda parameters, kind=kind, options=options: kind(parameters, **options))
        for kind, options in {
            torch.optim.AdamW: {"lr": 3e-3, "amsgrad": True},
            torch.optim.Adam: {"lr": 3e-3, "weight_decay": 0.1},
            torch.optim.RMSprop: {"lr": 3e-3},
            torch.optim.Adagrad: {"lr": 3e-2},
            torch.optim.NAdam: {"lr": 3e-3},
            torch.optim.RAdam: {"lr": 3e-3},
            torch.optim.Adadelta: {"lr": 1.0},
            torch.optim.Adafactor: {"lr": 3e-2},
        }.items()
    },
}


def changes(device, net, options, optimizer):
    """Losses, how the weights changed, and the step; without a device those of a loop in FP32."""
    kind, batch, loss = NETS[net]
    torch.manual_seed(0)
    model, inputs, losses = kind(), [batch() for _ in range(STEPS)], []
    before = [one.detach().double() for one in model.parameters()]
    model, count = model.to(device or "cpu"), options.get("accumulate", 1)
    step, result = None, optimizer(model.parameters())
    if device:
        backend = "inductor" if device == "cuda" else "eager"
        step = eager_step(model, loss, result, backend=backend, **options)
    for number, batch in enumerate(inputs, 1):
        if step is not None:
            losses.append(step(*(one.to(device) for one in batch)))
            continue
        losses.append(loss(model, *batch))
        (losses[-1] / count).backward()
        if number % count == 0:
            nn.utils.clip_grad_norm_(model.parameters(), options.get("clip_norm", torch.inf))
            result.step()
            result.zero_grad()
    if step is not None:
        step.flush()
    moved = [one.detach().double().cpu() - start for one, start in zip(model.parameters(), before, strict=True)]
    return torch.stack(losses).detach().double().cpu(), torch.cat([one.flatten() for one in moved]), step


def far(built, exact):
    return float((built - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", FEATURES)
def test_it_errs_no_more_than_on_a_cpu(name, record_property):
    net, options, optimizer = FEATURES[name]
    losses, moved, _ = changes("", net, options, optimizer)
    errors = {}
    for device in ("cpu", "cuda"):
        ours, changed, step = changes(device, net, copy.deepcopy(options), optimizer)
        errors[device] = far(ours, losses), far(changed, moved)
    record_property(
        "relative errors",
        "losses {:.1e} (CPU {:.1e}), weights {:.1e} (CPU {:.1e})".format(
            *(errors[device][place] for place in (0, 1) for device in ("cuda", "cpu"))
        ),
    )
    record_property("ran", step.execution)
    for result, allowed in zip(errors["cuda"], errors["cpu"], strict=True):
        assert result < 1.5 * allowed + 2.0**-8
    assert ("subgraphs" in step.execution) if net == "broken" else step.execution == REPLAYED


@pytest.mark.parametrize("net", ["transformer", "images", "conv", "layers", "broken"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_inference_errs_no_more_than_autocast(net, dtype):
    kind, batch, _ = NETS[net]
    torch.manual_seed(0)
    model, (x, _) = kind().cuda().eval(), batch()
    x = x.cuda()
    exact = copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x).cpu()
    with torch.no_grad(), torch.autocast("cuda", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])):
        theirs = far(model(x).double().cpu(), exact)
    compiled = amp.compile(model, dtype=dtype)
    with torch.no_grad():
        ours = [far(compiled(x).double().cpu(), exact) for _ in range(3)]
    assert max(ours) < 1.5 * theirs + torch.finfo(torch.bfloat16 if dtype == "bf16" else torch.float16).eps


def test_find_nonfinite_profile_and_tune_take_a_model_on_a_gpu():
    torch.manual_seed(0)
    model = Layers().cuda()
    x, y = (one.cuda() for one in rows())
    with torch.no_grad():
        model.first.weight.mul_(3e4)
    report = amp.find_nonfinite(model, (x, y), loss_fn=classes, dtype="fp16")
    assert "first" in str(report)
    with torch.no_grad():
        model.first.weight.div_(3e4)
    assert amp.profile(model, [(x, y)], loss_fn=classes, dtype="fp16") is not None
    assert amp.tune(model, [(x, y)], loss_fn=classes, dtype="bf16") is not None


def test_scaled_products_are_those_that_are_emulated():
    """Every form that a device multiplies, whose sums and rows may have any length."""
    from amp_compiler.ir.arithmetic import Fp8
    from amp_compiler.ops.fp8 import multiply, scaled

    torch.manual_seed(0)
    wrong = []
    for scaling in ("tensorwise", "rowwise", "mx"):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for rows_, between, columns in ((64, 128, 48), (17, 40, 32), (1, 16, 16), (33, 70, 48)):
                for left_format in (torch.float8_e4m3fn, torch.float8_e5m2):
                    way = Fp8(scaling=scaling)
                    left, right = torch.randn(rows_, between).to(dtype), torch.randn(between, columns).to(dtype)
                    result = []
                    for device in ("cpu", "cuda"):
                        operands = (
                            scaled(left.to(device), left_format, way, 1),
                            scaled(right.to(device), torch.float8_e4m3fn, way, 0),
                        )
                        try:
                            result.append(multiply(*operands, dtype, way).cpu().double())
                        except RuntimeError as error:
                            wrong.append((scaling, dtype, rows_, between, columns, left_format, str(error)[:200]))
                    if len(result) == 2 and not far(result[1], result[0]) < 2 * torch.finfo(dtype).eps + 2e-4:
                        wrong.append((scaling, dtype, rows_, between, columns, left_format, far(result[1], result[0])))
    assert not wrong
