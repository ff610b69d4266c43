"""What people try that cannot be: an error of ours, with what to write instead."""

import concurrent.futures
import copy
import io
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import amp_compiler as amp

X = torch.ones(2, 4)
ROOT = Path(__file__).parent.parent


def compiled(model: nn.Module) -> amp.CompiledModule:
    return amp.compile(model, dtype="bf16", backend="eager")


def step_of(model: nn.Module, optimizer: object = None, **options: object) -> amp.TrainingStep:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    return amp.training_step(model, lambda m, x: m(x).mean(), optimizer, dtype="bf16", backend="eager", **options)


def test_a_level_of_forward_mode_that_another_thread_has_opened_stops_no_step():
    step = step_of(nn.Linear(4, 2))
    with torch.autograd.forward_ad.dual_level(), concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert torch.isfinite(threads.submit(step, X).result())


def test_backward_on_the_loss_of_a_step():
    loss = step_of(nn.Linear(4, 2))(X)
    for one in (loss, copy.deepcopy(loss)):
        with pytest.raises(amp.AmpError, match=r"has already updated the weights.*leave out backward\(\)"):
            one.backward()
    # Else it is a tensor like any other, also in a checkpoint that is read as data alone.
    assert type(loss) is torch.Tensor
    torch.save({"loss": loss}, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["loss"], loss)
    assert not vars(loss + 1)


@pytest.mark.parametrize("built", [compiled, step_of], ids=["compile", "step"])
def test_a_wrong_shape_is_told_as_eager_tells_it(built):
    run = built(nn.Linear(4, 2))
    run(X)
    with pytest.raises(amp.CaptureError, match=r"\(2x5 and 4x2\); the call or the model is wrong"):
        run(torch.ones(2, 5))


def test_torch_jit():
    model = compiled(nn.Linear(4, 2))
    with pytest.raises(amp.CaptureError, match=r"cannot be scripted.*the module that was compiled"):
        torch.jit.script(model)
    assert torch.jit.trace(model, (X,), check_trace=False)(X).shape == (2, 2)


@pytest.mark.parametrize(
    ("around", "says"),
    [
        (lambda step: torch.jit.trace(step, (X,)), r"torch\.jit\.trace"),
        (lambda step: torch.jit.trace(lambda x: step(x) * 2, (X,)), r"torch\.jit\.trace"),
        (lambda step: make_fx(step)(X), "make_fx"),
        (lambda step: torch.fx.symbolic_trace(lambda x: step(x)), r"traced by torch\.fx"),
        (lambda step: torch.vmap(step)(X), r"torch\.func"),
        (lambda step: torch.func.grad(step)(X), r"torch\.func"),
    ],
    ids=["jit.trace", "jit.trace of a call", "make_fx", "fx", "vmap", "grad"],
)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_a_step_that_is_traced_or_transformed(around, says, used):
    step = step_of(model := nn.Linear(4, 2))
    if used:
        step(X)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(amp.AmpError, match=f"{says}.*; call the step by itself"):
        around(step)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("of", [lambda step: step, lambda step: lambda x: (step(x) * 2, step.flush())[0] / 2])
def test_torch_compile_leaves_a_step_alone(of):
    torch.manual_seed(0)
    first, second = (step_of(copy.deepcopy(model), accumulate=2) for model in [nn.Linear(4, 2)] for _ in range(2))
    compiled_step = torch.compile(of(second), backend="eager")
    for _ in range(4):
        assert compiled_step(X) == of(first)(X)
    assert torch.equal(first.model.weight, second.model.weight)
    with pytest.raises(Exception, match="it compiles itself"):
        torch.compile(of(second), fullgraph=True)(X)


def test_a_gradient_of_a_size_that_its_parameter_had_is_named():
    model = nn.Sequential(nn.Embedding(8, 4))
    compiled, ids = amp.compile(model, dtype="bf16", backend="eager"), torch.tensor([1, 2])
    compiled(ids).sum().backward()
    model[0].weight.data = torch.randn(12, 4)
    with pytest.raises(amp.CaptureError, match=r"a gradient of another size than its parameter.*zero_grad"):
        compiled(ids)
    compiled.zero_grad()
    assert compiled(ids).shape == (2, 4)


def of_lightning(name: str, module: str, **members: object) -> type[nn.Module]:
    """A class as Lightning has it."""
    return type(name, (nn.Module,), {"__module__": module, **members})


def test_a_lightning_module_and_fabrics_wrapper():
    kind = of_lightning("LightningModule", "lightning.pytorch.core.module")
    mine = type("Mine", (kind,), {"forward": lambda self, x: x})()
    said = r"Mine. is a LightningModule.*self\.net = amp\.compile\(net\).*AmpPrecision"
    with pytest.raises(amp.AmpError, match=said):
        compiled(mine)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return self._forward_module(x)

    wrapper, inner = of_lightning("_FabricModule", "lightning.fabric.wrappers", forward=forward)(), nn.Linear(4, 2)
    wrapper._forward_module = inner
    assert compiled(wrapper).original is inner
    assert step_of(wrapper).model is inner


class QuantizedState(torch.Tensor):
    """As the state of an 8-bit optimizer: of a class whose copies nobody knows."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(str(function))


class AdamW8bit(torch.optim.Optimizer):
    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: object = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["exp_avg"] = torch.Tensor._make_wrapper_subclass(QuantizedState, parameter.shape)


def test_an_optimizer_whose_state_is_no_plain_tensor():
    model = nn.Linear(4, 2)
    with pytest.raises(amp.AmpError, match=r"AdamW8bit.*train amp\.compile\(model\) with it in a loop of your own"):
        step_of(model, AdamW8bit(model.parameters()))(X)


@pytest.mark.long
def test_without_onnx_the_extra_is_named():
    code = """
import sys
for name in "onnx onnx_ir onnxruntime onnxscript google triton matplotlib sklearn tensorboard".split():
    sys.modules[name] = None
from amp_compiler import *
import amp_compiler as amp, torch
layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
calls = [
    lambda: amp.convert_onnx("a.onnx", "b.onnx"), lambda: amp.export_onnx(layer, (x,), "b.onnx"),
    lambda: amp.compile("a.onnx"), lambda: amp.explain("a.onnx"), lambda: amp.onnx_to_fx("a.onnx"),
    lambda: amp.tune("a.onnx", [{}]), lambda: amp.profile("a.onnx", [x]),
    lambda: amp.find_nonfinite("a.onnx", {"x": x.numpy()}),
    lambda: amp.training_step("a.onnx", lambda m, x: m(x), lambda p: torch.optim.SGD(p, 0.1)),
]
for call in calls:
    try:
        call()
    except amp.OnnxError as error:
        print(error.hint)
amp.compile(layer, dtype="bf16", backend="eager")(x)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:-1] == ["pip install 'amp_compiler[onnx]'"] * 9


def test_a_traceback_names_the_list_of_such_errors():
    class Mine(amp.RuleError):
        pass

    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for kind in (Mine, amp.RuleError, amp.OnnxError, amp.AmpError):
        note = re.search(
            r"^see: docs/errors\.md#(\w+)$", "".join(traceback.format_exception(kind("x"))), flags=re.MULTILINE
        )
        assert note[1] in {one.lower() for one in headings} and note[1] == kind.section()
        assert str(kind("it is wrong", hint="use another")) == "it is wrong; use another"
    assert Mine.section() == "ruleerror"
