"""`amp.explain` of a model plans it and changes nothing; what is not one graph is refused with the user's line."""

import array

import numpy as np
import onnx.parser
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import amp_compiler as amp

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Writing(nn.Module):
    """Writes to attributes, a list, a dict and a set."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fc, self.fails = nn.Linear(4, 4), fails
        self.n, self.aux, self.maps, self.table, self.seen = 0, None, [], {"n": 0}, {1, 2}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        self.n, self.aux, self.table["n"], self.new = self.n + 1, h.square().mean(), 1, h
        self.maps.append(h)
        self.seen.symmetric_difference_update((2, 3))
        if not hasattr(self, "late"):
            self.register_buffer("late", x.mean(0), persistent=False)
        print("shape", tuple(h.shape))
        if self.fails:
            raise RuntimeError("not today")
        return h


@pytest.mark.parametrize("fails", [False, True])
def test_it_writes_and_prints_nothing(fails, capsys):
    model = Writing(fails)
    before, held = dict(vars(model)), (model.maps, model.table, model.seen)
    if fails:
        with pytest.raises(amp.CaptureError, match=r"test_explain\.py:\d+: .*not today"):
            amp.explain(model, (X,), dtype="bf16")
    else:
        assert amp.explain(model, (X,), dtype="bf16").low_nodes > 0
    assert vars(model) == before and held == ([], {"n": 0}, {1, 2}) and "late" not in dict(model.named_buffers())
    assert all(vars(model)[name] is one for name, one in zip(("maps", "table", "seen"), held, strict=True))
    assert capsys.readouterr().out == ""


class Does(nn.Linear):
    def __init__(self, work) -> None:
        super().__init__(4, 4)
        self.work = work

    def forward(self, x):
        return self.work(self, super().forward(x))


def seeded(model, h):
    torch.manual_seed(7)
    return h + torch.rand_like(h)


def boxed(model, h):
    model.box = array.array("f")
    return h


def hooked(model, h):
    h.register_hook(lambda gradient: 2 * gradient)
    return h


def saving(model, h):
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: 3 * tensor):
        return h.exp()


REFUSED = {
    "manual_seed": seeded,
    "array.array": boxed,
    "register_hook": hooked,
    "saved_tensors_hooks": saving,
    "branches on the values": lambda model, h: h if h.sum() > 0 else -h,
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_no_one_graph_is_refused_with_its_line(said):
    with pytest.raises(amp.CaptureError, match=rf"test_explain\.py:\d+: Does .*{said}"):
        amp.explain(Does(REFUSED[said]), (X,))


def test_arguments_of_an_onnx_model_give_its_sizes_or_are_refused():
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20, "mine": 1]> g (float[n, 8] x) => (float[n, 8] y)'
        "<float[8, 8] w = {" + ", ".join(["1"] * 64) + "}> { a = MatMul(x, w) y = mine.Unknown(a) }"
    )
    x = np.ones((4, 8), np.float32)
    for one in (x, torch.from_numpy(x)):
        assert amp.explain(model, (one,), dtype="bf16").casts[0].bytes == 6 * 32
    for wrong, said in (
        ((x, x), "2 example_args, and the model takes 1; pass x"),
        ((x.astype(np.float16),), "takes float32"),
        ((np.array(["x"]),), "<U1"),
        (([1.0],), r"is a list.*numpy\.ndarray"),
    ):
        with pytest.raises(amp.AmpError, match=said):
            amp.explain(model, wrong)


def test_an_onnx_model_of_texts_is_planned_too():
    text = '<ir_version: 9, opset_import: ["": 20, "mine": 1]> g (string[n] x, float[n, 4] f) => (float[n, 4] y)'
    model = onnx.parser.parse_model(text + "{ a = mine.Length(x) y = Mul(a, f) }")
    plan = amp.explain(model, (np.array(["1"]), np.ones((1, 4), np.float32)), dtype="bf16")
    assert plan.nodes[-1].op == "onnx.Mul" and plan.autocast is None


def test_a_call_without_a_graph_leaves_the_plan_of_the_last_that_had_one():
    class Early(nn.Linear):
        def forward(self, x: torch.Tensor, go: bool = True) -> torch.Tensor:
            return super().forward(x) if go else x

    compiled = amp.compile(Early(4, 4), dtype="bf16", backend="eager")
    compiled(X)
    plan = compiled.plan
    compiled(X, go=False)
    assert compiled.plan == plan and "as it is written" in compiled.execution
