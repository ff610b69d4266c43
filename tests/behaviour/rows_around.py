"""What stands around a call or inside of a model: autocast, modes, tracers, threads, compiled and scripted modules."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from table import DOORS, FORWARD, X, at, row, rows_of, setting
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import amp_compiler as amp

CALLED = ("compile", "backend")
LOW, OTHER = torch.bfloat16, torch.float16


def region(**options: Any) -> Any:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = m.fc(x)
        with torch.autocast("cpu", **options):
            y = m.out(y.float()).float()
        return m.fc(y)

    return forward


row("autocast region without a type", inductor=True)(region())
row("autocast region of the type")(region(dtype=LOW))
row("autocast region of the other 16-bit type", autocast=True)(region(dtype=OTHER))
row("autocast region that is off", autocast=True)(region(enabled=False))


def nested(breaks: bool) -> Any:
    def forward(m: Any, x: torch.Tensor) -> Any:
        y = m.fc(x)
        with torch.autocast("cpu", dtype=OTHER):
            y = m.out(y).softmax(-1)
            if breaks and y.sum() > 1e9:
                y = -y
            with torch.autocast("cpu", enabled=False):
                y = m.fc(y.float())
            y = m.out(y)
        return m.out(y), y

    return forward


row("autocast regions, nested", autocast=True)(nested(False))
row("autocast region cut by a graph break", autocast=True, breaks=4)(nested(True))


@row("gradients switched in an autocast region", autocast=True)
def switched(m, x):
    y = m.fc(x)
    with torch.autocast("cpu", dtype=OTHER):
        with torch.no_grad():
            y = m.out(y)
        return m.fc(y).float()


@row("gradients that an autocast region leaves switched off")
def left_off(m, x):
    with torch.autocast("cpu", enabled=False):
        y = m.fc(x)
        torch.set_grad_enabled(False)
    y = m.out(y)
    torch.set_grad_enabled(True)
    return m.fc(y)


@row("autocast region of another device")
def of_another_device(m, x):
    with torch.autocast("cuda", enabled=False):
        return m.out(m.fc(x))


row("autocast as a decorator", fp32=True)(torch.autocast("cpu", enabled=False)(lambda m, x: m.out(x).float() + m.fc(x)))
row("FP32 by the model's own cast")(lambda m, x: m.out(m.fc(x).float().exp()))
for name, context in {
    "the same type": lambda: torch.autocast("cpu", LOW),
    "the other 16-bit type": lambda: torch.autocast("cpu", OTHER),
    "off": lambda: torch.autocast("cpu", enabled=False),
}.items():
    row(f"autocast around the call: {name}", around=context, doors=DOORS)(lambda m, x: m.out(m.fc(x).tanh()))
row(
    "autocast around the call of a model that breaks",
    around=lambda: torch.autocast("cpu", LOW),
    doors=DOORS,
    builds=4,
    broken="inference compile step backend",
)(lambda m, x: m.out(y) if (y := m.fc(x)).sum() < 1e9 else y)


# Modes: 16 bits or a word


class Counts(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


UNSEEN = {"backend": "FP32 without a word"}
MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "FLOP counter": (
        lambda: FlopCounterMode(display=False),
        {"builds": {"inference": 0, "compile": 0, "step": 1, "backend": 0}, "broken": "inference compile backend"},
    ),
    "dispatch mode": (Counts, {"broken": "backend"}),
    "TORCHDYNAMO_DISABLE": (
        lambda: torch._dynamo.config.patch(disable=True),
        {"broken": "inference compile", "today": UNSEEN},
    ),
    'set_stance("force_eager")': (
        lambda: torch.compiler.set_stance("force_eager"),
        {"broken": "inference compile", "today": UNSEEN},
    ),
    "freezing of weights": (lambda: torch._inductor.config.patch(freezing=True), {"doors": ("inference",)}),
    "profiler": (lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]), {}),
    "detect_anomaly": (lambda: torch.autograd.detect_anomaly(check_nan=False), {}),
    "deterministic": (lambda: torch.backends.cudnn.flags(deterministic=True), {}),
    "default device": (lambda: torch.device("cpu"), {}),
    "inference_mode": (torch.inference_mode, {"doors": ("inference",)}),
}
for name, (mode, fields) in MODES.items():
    row(f"around a call: {name}", around=mode, **{"doors": DOORS, **fields})(lambda m, x: m.out(m.fc(x).tanh()))


class Once:
    """A context for one of the calls alone."""

    def __init__(self, number: int, context: Any) -> None:
        self.number, self.context, self.now = number, context, -1

    def __call__(self) -> Any:
        self.now += 1
        return self.context() if self.now % 5 == self.number else contextlib.nullcontext()


LATER: dict[str, dict[str, Any]] = {
    "FLOP counter": {"broken": "compile backend"},
    'set_stance("force_eager")': {"broken": "compile", "today": UNSEEN},
}
for name, fields in LATER.items():
    fields = {"around": Once(2, MODES[name][0]), "builds": {"compile": 1, "step": 2, "backend": 1}, **fields}
    row(f"around a later call: {name}", **fields)(lambda m, x: m.out(m.fc(x).tanh()))
row(
    'set_stance("eager_on_recompile") around a new size',
    around=Once(1, lambda: torch.compiler.set_stance("eager_on_recompile")),
    calls=rows_of(6, 5, 6),
    doors=("inference",),
    broken="inference",
)(lambda m, x: m.out(m.fc(x)))
row("torch.compiler.disable around", use=lambda m, x: torch.compiler.disable(m)(x), doors=FORWARD, today=UNSEEN)(
    lambda m, x: m.out(m.fc(x))
)
row(
    "torch.compiler.disable on a layer",
    begin=lambda m: setattr(m.fc, "forward", torch.compiler.disable(m.fc.forward)),
    autocast=True,
    step_breaks=3,
)(lambda m, x: m.out(m.fc(x)))
# Tracers, copies, wrappers


row(
    "torch.jit.trace of the compiled module",
    use=lambda module, x: torch.jit.trace(module, x, check_trace=False)(x),
    doors=FORWARD,
    builds=0,
    broken="inference compile",
    today={"backend": "raises RuntimeError: Detected that you are using FX to torch.jit.trace"},
)(lambda m, x: m.out(m.fc(x)))
row(
    "symbolic_trace of the compiled module",
    use=lambda m, x: fx.symbolic_trace(m)(x),
    doors=FORWARD,
    builds=0,
    refused={
        "inference": "a compiled module cannot be traced by torch.fx; give torch.fx the module",
        "compile": "a compiled module cannot be traced by torch.fx; give torch.fx the module",
    },
    today={"backend": "raises NotImplementedError: Module [OptimizedModule] is missing the re"},
)(lambda m, x: m.out(m.fc(x)))
row(
    "make_fx of the compiled module",
    use=lambda m, x: fx.experimental.proxy_tensor.make_fx(m)(x)(x),
    doors=("inference",),
    builds=0,
    broken="inference",
)(lambda m, x: m.out(m.fc(x)))
row("compiled module inside another", use=lambda m, x: nn.Sequential(m, nn.Tanh())(x), doors=FORWARD)(
    lambda m, x: m.out(m.fc(x))
)
row(
    "torch.compile around",
    use=lambda m, x: torch.compile(lambda t: m(t) * 2, backend="eager")(x),
    doors=FORWARD,
    today=UNSEEN,
)(lambda m, x: m.out(m.fc(x)))
row(
    "checkpoint around",
    use=lambda m, x: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=False),
    doors=CALLED,
    inside=1,
)(lambda m, x: m.out(m.fc(x).tanh()))
row("hooks for saved tensors around", use=lambda m, x: kept_on_cpu(m, x), doors=CALLED)(
    lambda m, x: m.out(m.fc(x).tanh())
)


def kept_on_cpu(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m(x)


def inner(change: Any) -> Any:
    class Holds(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self[0] = change(self[0])

    return Holds


row("module that torch.compile has made, inside")(inner(lambda one: torch.compile(one, backend="eager")))
row("module that amp.compile has made, inside")(inner(lambda one: amp.compile(one, dtype="bf16", backend="eager")))
row("scripted module inside", autocast=True, breaks={"compile": 2, "step": 4, "backend": 2})(inner(torch.jit.script))
# Modules that change


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.drop = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4), nn.Dropout(0.9)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.head(self.norm(self.body(x)))


row("train and eval", change=lambda m, n: m.train(n % 2 == 0), calls=((X,),) * 4, inductor=True, builds=2)(Body)
row("one module in eval", change=at(1, lambda m: m.norm.eval()), builds=2)(Body)
row("module replaced", change=at(1, lambda m: m.body.__setitem__(1, nn.ReLU())), builds=2)(Body)
row(
    "weight replaced",
    change=at(1, lambda m: setattr(m.head, "weight", nn.Parameter(torch.full((4, 4), 0.3)))),
    doors=FORWARD,
)(Body)
row("options of a layer", change=setting("norm.eps", 1e-5, 0.5, 3.0), builds=3)(Body)


# Recurrent layers, attention


class Recurrent(nn.Module):
    kind: Any = nn.LSTM

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = self.kind(4, 4, batch_first=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.rnn(x[None])[0])


for kind in (nn.LSTM, nn.GRU, nn.RNN):
    row(f"{kind.__name__}", doors=DOORS, tolerance=4e-2)(type("Recurrent", (Recurrent,), {"kind": kind}))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.body(x[None], src_mask=nn.Transformer.generate_square_subsequent_mask(len(x)), is_causal=True)[0]


row("causal encoder layer", doors=DOORS)(Encoder)


# Threads


def many(calls: int, threads: int) -> Any:
    def use(m: Any, *xs: torch.Tensor) -> torch.Tensor:
        grad = torch.is_grad_enabled()

        def one(number: int) -> torch.Tensor:
            with torch.set_grad_enabled(grad):
                return m(xs[number % len(xs)])

        with ThreadPoolExecutor(threads) as pool:
            return torch.cat(list(pool.map(one, range(calls))))

    return use


row(
    "1,000 calls from 8 threads",
    calls=((X,),),
    use=many(1000, 8),
    inside=1000,
    doors=FORWARD,
    builds={"inference": 1, "compile": 1, "backend": 64},
)(lambda m, x: m.out(m.fc(x)))
row(
    "calls of a model that breaks from 8 threads",
    calls=((X,),),
    use=many(40, 8),
    inside=40,
    doors=FORWARD,
    builds={"inference": 2, "compile": 2, "backend": 64},
    broken="inference compile backend",
)(lambda m, x: m.out(y) if (y := m.fc(x)).sum() < 1e9 else y)


# Kernels that autocast and we have to agree on

IMAGE, VOLUME, LABELS = torch.randn(2, 4, 6, 6), torch.randn(2, 4, 4, 4), torch.tensor([0, 1, 3, 2, 0, 1])
row("avg_pool3d of 16 bits", calls=((VOLUME,),) * 3, autocast=True)(lambda m, x: F.avg_pool3d(m.fc(x), 2))
for name in ("multi_margin_loss", "multilabel_margin_loss", "nll_loss", "cross_entropy"):
    target = LABELS.repeat(4, 1).t().contiguous() if name == "multilabel_margin_loss" else LABELS
    function = getattr(F, name)
    row(f"{name} of 16 bits", autocast=True, calls=((X,),))(lambda m, x, f=function, t=target: f(m.fc(x), t))
row("byte() of 16 bits", calls=((X,), (9 * X,)), autocast=True, fp32=True)(
    lambda m, x: (m.fc(x) * 40).abs().byte().float() + 0 * m.fc(x)
)
row("pow_ in place", inductor=True)(lambda m, x: (m.fc(x).abs() + 1).pow_(-0.5) * x)
row(
    "whole power of a number",
    {"n": 2},
    tolerance=0.1,
    change=setting("n", 2, 3, 5),
    step_breaks=4 if torch.__version__ < "2.14" else "",
)(lambda m, x: (m.fc(x).abs() + 1) ** m.n)
row("inverse of a matrix")(lambda m, x: torch.linalg.inv((h := m.fc(x).float()).t() @ h + torch.eye(4)))
row("distribution")(lambda m, x: torch.distributions.Categorical(logits=m.fc(x), validate_args=False).log_prob(LABELS))


row(
    "forward of the model's own, with gathered keywords",
    begin=lambda m: setattr(m, "forward", lambda x, **others: 3 * type(m).forward(m, x, **others)),
    calls=tuple((x, {"k": 2.0}) for (x,) in rows_of(4, 3, 7)),
    builds=2,
)(lambda m, x, k=1.0, **others: m.fc(x) * k)
