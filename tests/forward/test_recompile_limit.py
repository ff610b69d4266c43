"""How often Dynamo compiles a function: each model has a limit of its own, and what passes it runs under autocast."""

import copy
import re

import pytest
import torch
from torch import nn
from toys import train_beside_torch

import amp_compiler as amp
import amp_compiler.forward.subgraphs as subgraphs
from amp_compiler.fx.torch_private import dynamo as torch_private

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def as_in_a_process_of_its_own(monkeypatch):
    """Torch before 2.13 has limits that grow with the number of models that a process compiled."""
    monkeypatch.setattr(torch_private, "_MODELS", [0])
    torch._dynamo.reset()


class Branches(nn.Module):
    """Breaks its graph; `k` is a number that each subgraph is compiled for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)

    def forward(self, x, k=0):
        y = self.fc(x) + len(list(range(k)))  # a number that no graph can be told
        return y if y.sum() > 1e9 else -y


def compiled() -> amp.CompiledModule:
    return amp.compile(Branches(), dtype="bf16", backend="eager")


X = torch.ones(2, 4)


def low(result: torch.Tensor, model: nn.Module, *arguments) -> bool:
    """Whether a result is that of a 16-bit product, and near the FP32 one."""
    exact = (model.original if isinstance(model, amp.CompiledModule) else model)(X, *arguments)
    return not torch.equal(result, exact) and bool((result - exact).norm() < 2e-2 * exact.norm())


def test_where_torch_counts_the_models_of_a_class_together_each_has_its_limit(monkeypatch):
    """As torch before 2.13 does."""
    monkeypatch.setattr(torch_private, "_ISOLATES", False)
    monkeypatch.setattr(subgraphs, "MOST_FORMS", 2)  # Dynamo's own is 8
    for _ in range(6):
        model = compiled()
        assert low(model(X), model)


def test_past_the_limit_a_warning_names_it_and_autocast_takes_over(monkeypatch, caplog):
    monkeypatch.setattr(subgraphs, "MOST_FORMS", 10)
    model = compiled()
    for number in range(14):
        assert low(model(X, number), model, number), number
    message = [record.getMessage() for record in caplog.records if "torch.autocast" in record.getMessage()]
    assert len(message) == 1
    assert re.search(
        r"Branches runs under torch\.autocast.*10 forms of its inputs: this no longer held: .+; keep", message[0]
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected = model.original(X, 21)
    assert torch.equal(model(X, 21), expected)
    assert torch._dynamo.config.recompile_limit == 8 and not torch._dynamo.config.fail_on_recompile_limit_hit


class Gathers(nn.Linear):
    """Keeps a number of every call in a list: Dynamo compiles for each length of it."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen = []

    def forward(self, x):
        y = super().forward(x)
        if y.sum() > 1e9:
            y = -y
        self.note(y)
        return y

    def note(self, y):
        self.seen.append(y.sum().item())


def test_a_list_that_grows_is_told_early_and_named_at_the_limit(monkeypatch, caplog):
    monkeypatch.setattr(subgraphs, "MOST_FORMS", 12)
    model = amp.compile(Gathers(), dtype="bf16", backend="eager")
    for _ in range(9):
        model(X)
    message = [record.getMessage() for record in caplog.records if "8 forms of its inputs" in record.getMessage()]
    assert len(message) == 1 and "lists that grow" in message[0]
    for _ in range(10):
        assert low(model(X), model)
    assert re.search(r"no longer held: len\(.*seen.*\) == \d+.*under torch\.compiler\.disable", caplog.text)
    model.original.seen.clear()
    model(X)
    assert len(model.original.seen) == 1


class Normed(Gathers):
    """With random numbers and a buffer that every call moves."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        y = nn.functional.dropout(self.norm(nn.Linear.forward(self, x)), 0.5)
        if y.sum() > 1e9:
            y = -y
        self.note(y)
        return y


def test_the_call_that_is_one_too_many_moves_buffers_and_random_numbers_once(monkeypatch):
    monkeypatch.setattr(subgraphs, "MOST_FORMS", 4)
    x = torch.randn(16, 4)

    def after(compile_it):
        torch.manual_seed(3)
        model = compile_it(Normed())
        for _ in range(9):
            model(x)
        assert len(model.seen) == 9
        return [*(one.clone() for one in model.buffers()), torch.rand(1)]

    result = after(lambda model: amp.compile(model, dtype="bf16", backend="eager"))
    expected = after(lambda model: model)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=1e-2)
    assert torch.equal(result[-1], expected[-1]) and int(result[-2]) == 9


def test_the_hint_holds(monkeypatch, caplog):
    """With the part that the message names written as it says."""
    monkeypatch.setattr(Gathers, "note", torch.compiler.disable(Gathers.note))
    model = amp.compile(Gathers(), dtype="bf16", backend="eager")
    for _ in range(20):
        model(X)
    assert len(model.seen) == 20 and not [one for one in caplog.records if "forms" in one.getMessage()]


class Loop(nn.Module):
    """Dynamo gives up a function that breaks within a loop, and takes what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if x.sum() > 1e9:
                break
        return x * 2


def test_functions_that_dynamo_gives_up_are_told_once(caplog):
    model = amp.compile(Loop(), dtype="bf16", backend="eager")
    for _ in range(2):
        assert low(model(X), model)
    message = [record.getMessage() for record in caplog.records if "gave up" in record.getMessage()]
    assert len(message) == 1 and "functions of Loop" in message[0]


# ---- models of which no graph can be planned

ROWS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Split(nn.Linear):
    """Its only graph reads a size from a tensor."""

    def forward(self, x):
        left, right = torch.tensor_split(super().forward(x), torch.tensor([5]), 1)
        return left.square().mean() + 2 * right.square().mean()


def test_a_model_of_which_no_graph_can_be_planned_runs_as_it_is_written(caplog):
    torch.manual_seed(0)
    model = Split(4, 8)
    stepped = copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    with caplog.at_level("WARNING", "amp_compiler"):
        result = compiled(ROWS)
    assert "without a plan" in caplog.text and "test_recompile_limit.py" in caplog.text
    assert torch.equal(result, stepped(ROWS))
    assert compiled.execution.startswith("as it is written: ") and "test_recompile_limit.py" in compiled.execution
    with pytest.raises(amp.AmpError, match=r"the model has no plan: .*test_recompile_limit\.py:\d+: "):
        _ = compiled.graph_module
    step, _ = train_beside_torch(stepped, lambda m, x: m(x), [(ROWS,)] * 2, enabled=True)
    assert "as it is written" in step.execution


class Does(nn.Module):
    def forward(self, x):
        return x.tolist()


def test_a_model_in_which_nothing_is_captured_says_so():
    compiled = amp.compile(Does(), dtype="bf16", backend="eager")
    assert compiled(ROWS) == ROWS.tolist()
    assert compiled.execution == "as it is written: Dynamo captured nothing of it"
