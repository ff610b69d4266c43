"""`dynamic_shapes="auto"`: a second shape makes what differs dynamic, in `amp.compile` and `amp.training_step`."""

from __future__ import annotations

import io
import logging
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step, train_beside_torch
from toys import relative as error

import amp_compiler as amp
from amp_compiler.forward import notices
from amp_compiler.fx import sign_of_life
from amp_compiler.passes.pipeline import Stages

BF16_ERROR = 2e-2


@pytest.fixture(autouse=True)
def nothing_known_of_sizes():
    """Dynamo remembers for a class which sizes changed."""
    torch._dynamo.reset()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x, *, mask=None):
        y = F.gelu(self.norm(self.inner(x)))
        y = y if mask is None else y * mask[..., None]
        return self.head(y)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def batch(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def count(compiled) -> int:
    return compiled.compilations


def test_every_dimension_that_changes_becomes_dynamic_and_no_other():
    compiled = amp.compile(model(), dtype="bf16", backend="eager")
    calls = [((4, 6, 8), 1), ((4, 9, 8), 2), ((4, 5, 8), 2), ((3, 5, 8), 3), ((7, 11, 8), 3), ((1, 7, 8), 4)]
    calls += [((9, 1, 8), 5), ((12, 1, 8), 5)]
    for sizes, programs in calls:
        x = batch(*sizes)
        assert error(compiled(x), compiled.original(x)) < BF16_ERROR
        assert count(compiled) <= programs, sizes
    mask = torch.ones(4, 6)
    for sizes in ((4, 6), (5, 9), (6, 3)):
        y = compiled(batch(*sizes, 8), mask=mask.new_ones(sizes))
        assert y.shape == (*sizes, 4)
    assert count(compiled) <= 7


def test_none_captures_each_shape_and_an_unknown_word_is_refused():
    compiled = amp.compile(model(), dtype="bf16", backend="eager", dynamic_shapes=None)
    for size in (4, 5, 6):
        compiled(batch(size, 8))
    assert count(compiled) == 3
    with pytest.raises(amp.AmpError, match=r"dynamic_shapes='atuo'.*'auto'"):
        amp.compile(model(), dynamic_shapes="atuo")


def classes(net, x, y):
    return F.cross_entropy(net(x).mean(1), y)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_trains_on_every_shape_as_torch_does(backend):
    sizes = ((8, 6), (5, 6), (33, 6), (8, 6), (4, 9), (7, 13), (1, 6), (1, 11))
    batches = [(batch(rows, words, 8), torch.arange(rows) % 4) for rows, words in sizes]
    step, _ = train_beside_torch(model(), classes, batches, backend=backend)
    assert len(step._choice.programs) == 4


def test_a_step_in_fp16_that_skips_and_gathers_takes_any_shape():
    step = eager_step(model(), classes, dtype="fp16", accumulate=2, clip_norm=1.0)
    for rows in (4, 4, 6, 6, 9, 10, 3, 8):
        step(batch(rows, 5, 8), torch.arange(rows) % 4)
    assert len(step._choice.programs) == 4  # for gathering and for the update
    step(batch(7, 5, 8) * float("inf"), torch.arange(7) % 4)
    step(batch(12, 5, 8), torch.arange(12) % 4)
    assert int(step.skipped_steps) == 1 and len(step._choice.programs) == 4


def test_each_capture_is_told_in_one_line(caplog):
    caplog.set_level(logging.INFO, "amp_compiler")
    step = eager_step(model(), classes, dtype="bf16")
    for rows in (4, 4, 6, 9, 1):
        step(batch(rows, 5, 8), torch.arange(rows) % 4)
    message = [one.message for one in caplog.records if one.message.startswith(("captured", "recompiled"))]
    assert len(message) == 3 and all("\n" not in line for line in message)
    assert message[0].startswith("captured the training step in ")
    assert "tensor 'batch[0]' size mismatch at index 0. expected 4, actual 6" in message[1]
    assert "no longer held: 2 <= batch[0].size()[0]" in message[2]


class Bars:
    """In the place of rich's bars."""

    shown, texts = threading.Event(), {}

    def __init__(self, *columns: object, **options: object) -> None:
        pass

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.shown.clear()

    def add_task(self, description: str, total: None) -> int:
        return 0

    def update(self, bar: int, description: str) -> None:
        self.texts[description] = True
        self.shown.set()


class ErrorOutput(io.StringIO):
    """An error output that is a terminal or not."""

    def __init__(self, terminal: bool = False) -> None:
        super().__init__()
        self.isatty = lambda: terminal


def wait_for_the_teller() -> None:
    for thread in threading.enumerate():
        if thread.name == "amp_compiler":
            thread.join()


KINDS = ("log", "terminal", "notebook", "notebook without widgets")


@pytest.mark.parametrize(
    ("kind", "level"), [*((kind, None) for kind in KINDS), ("log", "error"), ("terminal", "error")]
)
def test_what_takes_long_is_said_unless_the_level_forbids_it(monkeypatch, caplog, kind, level):
    plan = amp.explain(nn.Linear(4, 2), (torch.ones(2, 4),), dtype="bf16")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sign_of_life, "PATIENCE", 1e-9)
    monkeypatch.setattr("sys.stderr", error_output := ErrorOutput(kind == "terminal"))
    monkeypatch.setattr("rich.console._is_jupyter", lambda: "notebook" in kind)
    monkeypatch.setattr(notices, "find_spec", lambda name: None if "without" in kind else name)
    monkeypatch.setattr(notices, "Progress", Bars)
    caplog.set_level(logging.WARNING, "amp_compiler")  # as Python has it; sets the level back
    notices.set_level(level)
    draws = kind in ("terminal", "notebook") and level != "error"
    with notices.telling("Model") as message:
        if draws:
            assert Bars.shown.wait(60)
        else:
            wait_for_the_teller()
        message.stages = Stages()
        for name in ("capture", "classify", "apply_plan"):
            message.stages.note(name, name)
        message.stages.begin_subgraph("subgraph")
        message.plan = plan
    said = [record.getMessage() for record in caplog.records]
    assert Bars.texts.pop("Model: capturing it", None) is (True if draws else None)
    assert not error_output.getvalue()
    if level == "error":
        assert not said
        return
    assert said[:-1] == ([] if draws else ["compiling Model, for 1e-09 s now: capturing it"])
    assert re.fullmatch(
        r"compiled Model in \d+\.\d s: captured 1 node \(\d\.\d s\), planned 1 of them in bf16 with \d casts"
        r" \(\d\.\d s\), compiled them \(\d\.\d s\)",
        said[-1],
    )


def test_of_a_model_a_step_and_all_that_takes_long_a_begin_and_an_end_are_told(monkeypatch, caplog):
    monkeypatch.setattr(sign_of_life, "PATIENCE", 1e-9)
    monkeypatch.setattr("sys.stderr", ErrorOutput())
    model, x = nn.Linear(4, 2), torch.ones(2, 4)
    for call in (amp.compile(model, dtype="bf16", backend="eager"), eager_step(model, lambda m, x: m(x).mean())):
        call(x), call(x)
    kinds = [record.getMessage().partition(",")[0].partition(" in ")[0] for record in caplog.records]
    names = "Linear", "the training step"
    # Dynamo looks at frames that it leaves alone too, which takes no time that anybody would be told of.
    assert list(dict.fromkeys(kinds)) == [f"{word} {name}" for name in names for word in ("compiling", "compiled")]
    caplog.clear()
    calls = "explain", "export", "export_onnx", "profile", "tune"
    for name in calls:
        getattr(amp, name)(model.eval(), [x] if name in ("profile", "tune") else (x,), dtype="bf16")
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("amp.")]
    begins_and_ends = [(f"amp.{name} has taken 1e-09 s so far", f"amp.{name} is done") for name in calls]
    assert [*zip(said[::2], [one.partition(",")[0] for one in said[1::2]], strict=True)] == begins_and_ends


def test_work_that_is_done_soon_is_not_told(monkeypatch, caplog):
    monkeypatch.setattr("sys.stderr", error_output := ErrorOutput(True))
    with notices.telling("Model") as message:
        message.stages, message.plan = Stages(), amp.explain(nn.Linear(4, 2), (torch.ones(2, 4),), dtype="bf16")
    assert not error_output.getvalue() and not caplog.records


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(amp.AmpError, match="AMP_LOG='eror' is no level; use one of debug"):
        notices.set_level("eror")


def test_shapes_that_do_not_fit_the_model_are_told(caplog):
    class Sixteen(nn.Module):
        def forward(self, x):
            return x.reshape(16, 3) * 2

    shapes = ({0: torch.export.Dim("rows", min=2)},)
    model = amp.compile(Sixteen(), dtype="bf16", backend="eager", dynamic_shapes=shapes)
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        model(torch.ones(16, 3))
    (message,) = [record.message for record in caplog.records if "dynamic_shapes=" in record.message]
    assert message.startswith("no size of graph0 of Sixteen is dynamic") and "'auto'" in message


class Reads(nn.Module):
    """Has no dynamic sizes: it makes a number of one."""

    def forward(self, x, y):
        return x @ torch.eye(x.shape[1]) * len(list(range(x.shape[0]))) + y  # a text of that length: not in torch 2.11


@pytest.mark.parametrize("dynamic_shapes", ["auto", ({0: torch.export.Dim.DYNAMIC}, None)])
def test_tensors_of_a_capture_that_failed_carry_no_marks(dynamic_shapes):
    """With half of torch's marks on it, a tensor makes Dynamo raise wherever it comes next."""
    compiled = amp.compile(Reads(), dtype="bf16", backend="eager", dynamic_shapes=dynamic_shapes)
    for size in (4, 3, 5):
        x, y = batch(size, 8), batch(size, 8)
        compiled(x, y)
        assert not vars(x) and not vars(y)
        assert torch.equal(torch.compile(lambda z: 2 * z, backend="eager")(x), 2 * x)


# ---- torch.compile(model, backend="amp_compiler")

counters = torch._dynamo.utils.counters
OPTIONS = {"dtype": "bf16"}


@pytest.mark.parametrize("options", [{"dynamic": True}, {}], ids=["dynamic=True", "mark_dynamic"])
def test_sizes_that_are_said_to_vary_are_one_graph(options) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = nn.Linear(16, 4)
    compiled = torch.compile(model, backend="amp_compiler", options={**OPTIONS, "backend": "eager"}, **options)
    for rows in (8, 9, 10):
        x = torch.randn(rows, 16)
        if not options:
            torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), model(x), rtol=2**-6, atol=2**-6)
    assert counters["stats"]["unique_graphs"] == 1


def test_a_block_is_compiled_once_for_all_layers_of_its_kind() -> None:
    """The input of the first layer needs no gradient, that of the others does: two graphs of six layers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Block() for _ in range(6)]), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
    expected.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    counters.clear()
    for block in model:
        block.compile(backend="amp_compiler", options={**OPTIONS, "backend": "eager"})
    result = model(x)
    torch.testing.assert_close(result, expected, rtol=2**-6, atol=2**-6)
    result.square().mean().backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 2**-6 * gradient.norm()
    assert counters["stats"]["unique_graphs"] == 2
