"""Branches, loops, exceptions, generators; inputs and outputs of all forms; sizes that differ."""

import collections
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from table import DOORS, FORWARD, READS, X, row, rows_of

SIZES = rows_of(8, 9, 10)
KEPT = torch.tensor([True, False, True, True, False, True])


@row("branch on data", calls=((X,), (X - 9,), (X,)), inductor=True, breaks=5)
def branch(m, x):
    y = m.fc(x)
    return m.out(y) if x.sum() > -20 else -m.out(y)


@row("branch on data, never taken", breaks=4)
def never(m, x):
    y = m.fc(x)
    return y if y.sum() > 1e9 else -y


row("item", calls=((X,), (X * 2,), (X * 3,)), **READS)(lambda m, x: m.fc(x) * x.abs().sum().item())
row("data as a size", calls=((X,), (X * 1.3,), (X * 0.6,)), **READS)(lambda m, x: m.fc(x)[: 1 + int(x.abs().sum()) % 5])


@row("graph break that is asked for", breaks=4)
def breaks(m, x):
    y = m.fc(x)
    torch._dynamo.graph_break()
    return m.out(y.relu())


@row("function that is left to Python", {"seen": []}, settles=False, step_breaks=3)
def left_out(m, x):
    y = m.fc(x)
    noted(m, y)
    return y


@torch.compiler.disable
def noted(m: Any, y: torch.Tensor) -> None:
    m.seen.append(y.sum().item())


row("NumPy amid forward")(lambda m, x: m.fc(x) + torch.from_numpy(x.detach().numpy() * 2))


@torch.library.custom_op("amp_behaviour::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2


opaque.register_autograd(lambda ctx, grad: grad * 2)
row(
    "operator without a fake kernel",
    builds=0,
    refused={
        "compile": "Model calls an operator that cannot be traced, because it do",
        "step": "the loss function calls an operator that cannot be traced, b",
    },
    today={"backend": "raises TorchRuntimeError: RuntimeError when making fake tensor call Ex"},
)(lambda m, x: m.fc(torch.ops.amp_behaviour.opaque(x)))


@row(
    "exception of the model itself", calls=((X,), (X,), (X,)), change=lambda m, n: setattr(m, "fail", n == 1), builds=2
)
def own_error(m, x):
    if m.fail:
        raise ValueError("no such thing today")
    return m.fc(x)


class Own(Exception):
    pass


@row("exception behind a write", {"n": 0}, change=lambda m, n: setattr(m, "fail", n == 1), builds=2)
def error_behind_write(m, x):
    m.n += 1
    if m.fail:
        raise Own("not today")
    return m.fc(x)


@row("exception that depends on data", calls=((X,), (X + 100,), (X,)), step_breaks=3)
def error_on_data(m, x):
    y = m.fc(x)
    if x.sum() > 1000:
        raise Own("too much")
    return y


row("wrong input shape", calls=((X,), (X[:, :3],), (X,)), lines=4)(lambda m, x: m.out(m.fc(x).relu()))
row("wrong input shape at the first call", calls=((X[:, :3],), (X,)), lines=4)(lambda m, x: m.out(m.fc(x).relu()))
row("wrong input shape of a model that breaks", calls=((X,), (X[:, :3],), (X,)), lines=6, breaks=5)(
    lambda m, x: never(m, m.out(x))
)


@row("generator function")
def generates(m, x):
    def parts():
        for factor in (1.0, 2.0, 3.0):
            yield m.fc(x * factor)

    return torch.cat(list(parts()), 1)


@row(
    "generator that is kept",
    change=lambda m, n: setattr(m, "source", (float(k) for k in range(1, 9))) if n == 0 else None,
    breaks=5,
)
def kept_generator(m, x):
    return m.fc(x) * next(m.source)


# Sizes

row("second and third batch size", calls=SIZES, doors=DOORS, inductor=True, builds=2)(
    lambda m, x: m.out(F.gelu(m.fc(x)))
)
row("batch of one", calls=rows_of(8, 1, 9, 1), builds=3)(lambda m, x: m.fc(x))
row("empty batch", calls=rows_of(8, 0, 9), fp32=True, builds=3)(lambda m, x: m.fc(x))
row("size in a branch", calls=SIZES, builds=3)(lambda m, x: m.fc(x) if x.shape[0] > 9 else m.out(x))
row("another number of dimensions", calls=((X,), (X[None],), (X[0],)), builds=3)(lambda m, x: m.fc(x))
row("another type of input", calls=((X,), (X.bfloat16(),), (X,)), autocast=True, builds=2)(lambda m, x: m.fc(x))
row("another memory layout", calls=((X,), (X.t().contiguous().t(),), (X,)), builds=2)(lambda m, x: m.fc(x))
row("two inputs that are one", calls=((X, X + 1), (X, X), (X, X + 1)), builds=2)(lambda m, x, y: m.fc(x) * y)
for name, sizes in {
    "growing length": ((2, 3), (2, 4), (2, 5)),
    "other batches and lengths": ((2, 8), (3, 9), (4, 11), (5, 7)),
}.items():
    takes_sizes = torch.__version__ >= "2.12"  # before, torch traces attention for the sizes that it sees
    row(
        f"attention with {name}",
        calls=tuple((torch.randn(*one, 4),) for one in sizes),
        builds=2 if takes_sizes else len(sizes),
    )(lambda m, x: F.scaled_dot_product_attention(m.fc(x), m.out(x), x, is_causal=True))


row("sizes of a model that breaks", calls=SIZES, breaks=4, today={"step": "seven graphs are built"})(
    lambda m, x: m.out(y) / len(y) if (y := m.fc(x)).sum() < 1e9 else y
)


@row("cache that grows", {"cache": None}, calls=tuple((X[n : n + 1],) for n in range(4)), settles=False, builds=3)
def grows_cache(m, x):
    keys = m.fc(x)
    m.cache = keys.detach() if m.cache is None else torch.cat([m.cache, keys.detach()])
    return m.out(x) @ m.cache.t()


row("rows of a mask", **READS)(lambda m, x: m.fc(x)[KEPT].square())
row("rows where data says", calls=((X,), (X - 0.5,), (X + 0.5,)), **READS)(lambda m, x: m.fc(x)[x.sum(1) > 0].square())
row("masked_select, the mask broadcasts to more")(
    lambda m, x: m.fc(x)[0].masked_select(torch.ones(6, 4, dtype=torch.bool))
)
row("repeat_interleave")(lambda m, x: torch.repeat_interleave(m.fc(x), (x.sum(1) > 0).long() + 1, dim=0))
row("one_hot without a number of classes", breaks=4)(lambda m, x: m.fc(F.one_hot(torch.tensor([0, 3, 1])).float()))
row("tensor index that is read", {"place": torch.tensor(1)})(lambda m, x: m.fc(x)[:, m.place] * 2)


row(
    "sizes that data says",
    calls=((X,), (X - 0.5,), (X + 0.5,)),
    builds={"compile": 7, "step": 1, "backend": 7},
    broken="compile backend",
    inductor=True,
)(lambda m, x: sizes(m, x))


def sizes(m: Any, x: torch.Tensor) -> torch.Tensor:
    h, wanted = m.fc(x), x.sum(1) > 0
    kept = wanted.nonzero().squeeze(1)
    return torch.cat([h[wanted].square(), h.index_add(0, kept, h[kept]), h.repeat_interleave(wanted + 1, 0)])


# Inputs and outputs


@dataclasses.dataclass
class Output:
    logits: Any
    hidden: Any = None
    count: int = 0


@dataclasses.dataclass
class Held:
    x: Any
    rows: Any


class Result(collections.OrderedDict):
    """As model outputs of transformers: a dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


row("dict as an output", doors=DOORS)(lambda m, x: {"logits": m.fc(x), "more": [m.out(x), None, 3, "text"]})
row("dataclass as an output")(lambda m, x: Output(m.fc(x), m.out(x), 2))
row("dict with attributes as an output", look=lambda m, y: type(y).__name__, doors=FORWARD)(
    lambda m, x: Result(a=m.fc(x))
)
row("input as an output")(lambda m, x: (m.fc(x), x))
row("one output twice", look=lambda m, y: y is None or y[0] is y[1], doors=FORWARD)(lambda m, x: ((y := m.fc(x)), y))
row("view as an output")(lambda m, x: ((y := m.fc(x)), y[:2]))
row("no tensor among the outputs", doors=("compile", "backend"), fp32=True, builds=0, broken="compile backend")(
    lambda m, x: int(x.shape[0]) + 1
)
row("keywords", calls=((X, {"y": X, "flag": True}), (X, {"flag": False, "y": X}), (X, {"y": X + 1})), builds=3)(
    lambda m, x, y=None, flag=True: m.fc(x) + y if flag else m.out(x) * y
)
row("dict as an input", calls=(({"x": X, "k": [X, 2.0]},),) * 3, use=lambda m, batch=None, **kw: m(batch or kw))(
    lambda m, batch: m.fc(batch["x"]) + batch["k"][0] * batch["k"][1]
)
row("dataclass as an input", calls=tuple((Held(X * n, slice(4)),) for n in (1, 2, 3)))(
    lambda m, held: m.fc(held.x)[held.rows]
)
row("array as an input", calls=((X.numpy(),), (2 * X.numpy(),)))(lambda m, x: m.fc(torch.as_tensor(x)))
row("text as an input", calls=((X, "a"), (X, "b"), (X, "a")), builds=2)(
    lambda m, x, kind: m.fc(x) if kind == "a" else m.out(x)
)
row("sparse matrix as an input", calls=((X, torch.eye(6).to_sparse()),) * 3, step_breaks=3)(
    lambda m, x, s: torch.sparse.mm(s, m.fc(x))
)
row(
    "rows of several lengths (jagged) as an input",
    use=lambda m, x: m(torch.nested.nested_tensor([x[:2], x], layout=torch.jagged)).values(),
    doors=FORWARD,
)(lambda m, x: m.out(m.fc(x).relu()))
row("complex numbers inside")(lambda m, x: torch.view_as_real(torch.fft.fft(m.fc(x))))
row("whole numbers as an output", doors=FORWARD)(lambda m, x: (m.fc(x), x.argmax(1), x > 0))
