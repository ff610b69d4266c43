"""`amp.export`: the rewritten forward as a program of torch.export."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from toys import small

import amp_compiler as amp

pytestmark = pytest.mark.long
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A weight that is read in FP32 too, a buffer, a keyword and a dict of results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small()
        self.gate = nn.Linear(8, 8)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x, *, scale=None):
        gated = self.gate(x) + self.gate.weight.sum()
        out = self.inner(gated + self.shift)
        return {"out": out if scale is None else out * scale, "gated": gated}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_program_gives_what_the_compiled_model_gives(dtype):
    model, example = net(), ((X,), {"scale": torch.tensor(2.0)})
    program = amp.export(model, example, dtype=dtype)
    compiled = amp.compile(model, dtype=dtype, backend="eager")
    with torch.no_grad():
        expected, result = compiled(X, scale=torch.tensor(2.0)), program.module()(X, scale=torch.tensor(2.0))
    assert list(result) == ["out", "gated"] and all(torch.equal(result[name], expected[name]) for name in result)
    assert program.state_dict.keys() == model.state_dict().keys()
    low = torch.bfloat16 if dtype == "bf16" else torch.float16
    types = {name: value.dtype for name, value in program.state_dict.items()}
    assert types["inner.0.weight"] is low and types["gate.weight"] is types["shift"] is torch.float32
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert not [node for node in program.graph.nodes if "amp_compiler" in str(node.target)]


def test_sizes_may_be_dynamic_and_it_is_loaded_and_run_without_this_package(tmp_path):
    program = amp.export(small(), (X,), dtype="bf16", dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=64)},))
    with torch.no_grad():
        expected = amp.compile(small(), dtype="bf16", backend="eager")(X.repeat(3, 1))
        assert torch.equal(program.module()(X.repeat(3, 1)), expected)
    torch.export.save(program, tmp_path / "m.pt2")
    torch.save((X, program.module()(X)), tmp_path / "data.pt")
    code = (
        "import sys, torch\n"
        f"x, expected = torch.load({str(tmp_path / 'data.pt')!r})\n"
        f"assert torch.equal(torch.export.load({str(tmp_path / 'm.pt2')!r}).module()(x), expected)\n"
        "assert 'amp_compiler' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.compiles
@pytest.mark.slow  # the program is torch.export's
def test_aotinductor_compiles_it(tmp_path):
    program = amp.export(small(), (X,), dtype="bf16")
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    expected = program.module()(X)
    result = torch._inductor.aoti_load_package(path)(X)
    assert float((result - expected).abs().max()) <= 2**-7 * float(expected.abs().max())


def test_torchs_onnx_exporter_is_told_of_ours_and_what_is_no_module_is_refused(caplog):
    pytest.importorskip("onnxscript")
    with pytest.raises(Exception, match=r"amp\.export_onnx"):
        torch.onnx.export(amp.compile(small(), dtype="bf16", backend="eager"), (X,), io.BytesIO(), dynamo=True)
    torch.onnx.export(amp.compile(small(), dtype="bf16", backend="eager"), (X,), io.BytesIO(), dynamo=False)
    assert "amp.export_onnx writes a file" in caplog.text
    with pytest.raises(amp.AmpError, match=r"amp\.convert_onnx"):
        amp.export("m.onnx", (X,))
