"""Forms of operators that later opsets changed, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import parser

import amp_compiler as amp

SELU = {1: (1.6732, 1.0507), 6: (1.67326319217681884765625, 1.05070102214813232421875)}  # defaults by opset
FORMS = {  # opset, inputs of the graph, its body
    "softmax over all later axes": (11, "float[2,3,4] x", "float[2,3,4] y", "y = Softmax<axis=1>(x)"),
    "log-softmax by default": (11, "float[2,3,4] x", "float[2,3,4] y", "y = LogSoftmax(x)"),
    "clip by attributes": (9, "float[2,3,4] x", "float[2,3,4] y", "y = Clip<min=-0.5, max=0.25>(x)"),
    "squeeze by attribute": (11, "float[2,1,4] x", "float[2,4] y", "y = Squeeze<axes=[1]>(x)"),
    "unsqueeze by attribute": (11, "float[2,4] x", "float[1,2,4,1] y", "y = Unsqueeze<axes=[0,3]>(x)"),
    "slice by attributes": (9, "float[4,5] x", "float[2,3] y", "y = Slice<starts=[1,-4], ends=[3,-1], axes=[0,1]>(x)"),
    "pad by attributes": (9, "float[2,3] x", "float[3,6] y", "y = Pad<pads=[1,0,0,3], value=1.5>(x)"),
    "edge pad": (9, "float[1,1,4,4] x", "float[1,1,6,7] y", "y = Pad<mode=\"edge\", pads=[0,0,1,2,0,0,1,1]>(x)"),
    "sum over attribute axes": (11, "float[2,3,4] x", "float[2,4] y", "y = ReduceSum<axes=[1], keepdims=0>(x)"),
    "sum over all": (11, "float[2,3,4] x", "float y", "y = ReduceSum<keepdims=0>(x)"),
    "split by attribute": (11, "float[2,6] x", "float[2,4] y", "a, y = Split<axis=1, split=[2,4]>(x)"),
    "dropout at inference": (9, "float[2,6] x", "float[2,6] y", "y = Dropout<ratio=0.7>(x)"),
    "upsample": (
        9, "float[1,2,3,3] x", "float[1,2,6,9] y",
        "s = Constant<value = float[4] {1,1,2,3}>() y = Upsample<mode=\"nearest\">(x, s)",
    ),
    "resize of opset 10": (
        10, "float[1,2,3,3] x", "float[1,2,6,6] y",
        "s = Constant<value = float[4] {1,1,2,2}>() y = Resize<mode=\"linear\">(x, s)",
    ),
    "batch normalisation": (
        9, "float[2,3,4,4] x", "float[2,3,4,4] y",
        "s = Constant<value = float[3] {1,2,3}>() b = Constant<value = float[3] {0,1,-1}>()"
        "m = Constant<value = float[3] {0.1,0.2,0.3}>() v = Constant<value = float[3] {1,2,0.5}>()"
        "y = BatchNormalization<epsilon=0.001>(x, s, b, m, v)",
    ),
    "the largest three": (
        10, "float[3,6] x", "float[3,3] y", "k = Constant<value = int64[1] {3}>() y, i = TopK<axis=1>(x, k)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=[name.replace(" ", "-") for name in FORMS])
def test_older_forms(form):
    opset, given, made, body = form
    model = parser.parse_model(f'<ir_version: 7, opset_import: ["" : {opset}]> g ({given}) => ({made}) {{ {body} }}')
    shape = [one.dim_value for one in model.graph.input[0].type.tensor_type.shape.dim]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4), requires_grad=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"x": x.detach().numpy()})
    found = amp.onnx_to_fx(model)(x)
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)
    found.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize("attributes", ["", "<alpha=0.5, gamma=3.0>"])
@pytest.mark.parametrize("opset", SELU)
def test_selu(opset, attributes):
    """That of opset 1 has no function body, and none of ONNX Runtime's kernels."""
    head = f'<ir_version: 7, opset_import: ["" : {opset}]> g (float[3] x) => (float[3] y)'
    found = amp.onnx_to_fx(parser.parse_model(f"{head} {{ y = Selu{attributes}(x) }}"))(
        torch.tensor([-1.0, 0.0, 200.0])
    )
    alpha, gamma = (0.5, 3.0) if attributes else SELU[opset]
    np.testing.assert_allclose(found.numpy(), [gamma * alpha * np.expm1(-1.0), 0, gamma * 200], rtol=1e-6)
