"""Models that torch exports to ONNX come back: same outputs, same gradients, same training."""

from pathlib import Path

import onnx
import pytest
import test_export_and_convert
import torch
from onnx_corpus import exported
from onnx_corpus.exported import Logits, export
from onnx_models import kept
from test_export_and_convert import make
from torch import nn
from toys import eager_step, relative

import amp_compiler as amp

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.long  # an export each


def built_model(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model in eval mode whose parameters all differ, so that none can stand for another."""
    if name == "resnet":
        torch.manual_seed(0)
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
        net = transformers.ResNetForImageClassification(config)
        model, args = Logits(net, ("pixel_values",)).eval(), (torch.randn(2, 3, 32, 32),)
    else:
        model, args = make(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model, args


def saved(name: str, path: Path) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A model, which torch has exported to a file."""
    model, args = built_model(name)
    export_it = lambda: export(model, args, optimize=False).model_proto  # noqa: E731
    onnx.save(kept(f"to_fx_{name}", export_it, __file__, exported.__file__, test_export_and_convert.__file__), path)
    return model, args


@pytest.mark.parametrize("name", ["llama", "resnet", "t5"])
def test_outputs_gradients_and_names_are_the_torch_models(name, tmp_path):
    path = tmp_path / "m.onnx"
    model, args = saved(name, path)
    module = amp.onnx_to_fx(path)
    wanted = model(*args)
    outputs = module(*args)
    result = outputs[0] if isinstance(outputs, tuple) else outputs
    assert relative(result, wanted) < 1e-4
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(2))
    (wanted * weights).sum().backward()
    (result * weights).sum().backward()
    theirs = {name: one for name, one in model.named_parameters() if one.grad is not None}
    mine = dict(module.named_parameters())
    # A tied weight may be known by its other name.
    tied = {
        id(one): [n for n, same in model.named_parameters(remove_duplicate=False) if same is one]
        for one in theirs.values()
    }
    scale = max(float(one.grad.norm()) for one in theirs.values())
    for name, parameter in theirs.items():
        there = [mine[other] for other in tied[id(parameter)] if other in mine]
        assert there, f"no parameter for {name}"
        error = float((there[0].grad - parameter.grad).norm())
        assert error <= 1e-4 * float(parameter.grad.norm()) + 1e-7 * scale, name
    assert set(mine) <= {name for name, _ in model.named_parameters(remove_duplicate=False)}


def test_an_optimized_export_with_a_dynamic_batch():
    model, args = built_model("cnn")
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    program = export(model, args, dynamic_shapes=shapes)
    module = amp.onnx_to_fx(program.model)
    larger = tuple(torch.cat([one, one.flip(0), one]) for one in args)
    with torch.no_grad():
        assert relative(module(*larger), model(*larger)) < 1e-4
        compiled = amp.compile(module, dtype="bf16", backend="eager", dynamic_shapes=shapes)
        for inputs in (args, larger):
            assert relative(compiled(*inputs), model(*inputs)) < 1e-2


def test_compile_and_train_from_a_path(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    path = tmp_path / "m.onnx"
    model, args = saved("resnet", path)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: args[0].numpy()})[0])
    compiled = amp.compile(str(path), dtype="bf16", backend="eager")
    with torch.no_grad():
        result = compiled(*args)
    assert 0 < relative(result, wanted) < 1e-2
    assert any(node.precision == "low" and "conv" in node.op for node in compiled.plan.nodes)

    target = torch.zeros_like(wanted)
    loss_fn = lambda m, x, y: (m(x) - y).square().mean()  # noqa: E731
    step = eager_step(path, loss_fn, lambda parameters: torch.optim.SGD(parameters, 0.05))
    reference = torch.optim.SGD(model.parameters(), 0.05)
    losses: list[float] = []
    for _ in range(4):
        mine = float(step(*args, target))
        loss = loss_fn(model, *args, target)
        losses.append(float(loss))
        reference.zero_grad()
        loss.backward()
        reference.step()
        assert mine == pytest.approx(losses[-1], abs=1e-2 * losses[0])
    assert losses[-1] < 0.5 * losses[0]
    weights = dict(step.model.named_parameters())
    for name, parameter in model.named_parameters():
        assert relative(weights[name].detach(), parameter.detach()) < 2e-2, name
