"""`onnx_to_fx`: ONNX's own backend node tests, the float ones, and forms of operators that later opsets changed."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper, parser
from onnx_models import node_tests

import amp_compiler as amp
from amp_compiler import onnx_to_fx
from amp_compiler.errors import AmpError

# What torch holds without loss: floats, integers and booleans of the usual widths.
TYPES = {
    TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.INT32,
    TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip

REFUSED = {  # patterns of names
    r"(dynamic)?(de)?quantizelinear|qlinear": "integer arithmetic of a quantised model: nothing in it is trained",
    r"adagrad|adam|(nesterov_)?momentum": "an update inside the graph: here the optimizer is torch's",
    "nonmaxsuppression": "boxes chosen by a loop over data, without a gradient",
    "roialign": "regions of such boxes",
    "tfidfvectorizer": "counts of n-grams, without a gradient",
    "ai_onnx_ml_tree_ensemble_set_membership": "a decision tree, without a gradient",
    "melweightmatrix": "a table that is stored, not trained",
    "scan_sum": "opset 8, whose Scan has another meaning",
}
RANDOM = {  # other random numbers than the reference's: only type and shape can be compared
    "test_bernoulli_seed", "test_bernoulli_seed_expanded", "test_training_dropout", "test_training_dropout_default",
    "test_training_dropout_default_mask", "test_training_dropout_mask",
}  # fmt: skip
UNSOUND = {"test_mvn"}  # ONNX's own full checker refuses it, in onnx 1.23
LEAST, EACH = 1236, 150  # of 1296 models, and of 168 ops, with onnx 1.23


def float_cases() -> Iterator[Any]:
    """Node tests whose inputs and outputs are tensors of `TYPES`, a float one among them."""
    for case in node_tests():
        values = [*case.model.graph.input, *case.model.graph.output]
        kinds = {value.type.tensor_type.elem_type for value in values if value.type.HasField("tensor_type")}
        tensors = all(value.type.HasField("tensor_type") for value in values)
        if tensors and kinds <= TYPES and TensorProto.FLOAT in kinds:
            yield case


def array(value: Any) -> np.ndarray:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else np.asarray(value)


def check(case: Any) -> None:
    """Raises what goes wrong, `AmpError` for a refusal."""
    module = onnx_to_fx(case.model, check=case.name not in UNSOUND)
    for inputs, outputs in case.data_sets:
        built = module(*[torch.from_numpy(array(one).copy()) for one in inputs])
        built = built if isinstance(built, tuple) else (built,)
        assert len(built) == len(outputs)
        for mine, theirs in zip(built, map(array, outputs), strict=True):
            result = mine.detach().numpy()
            assert (result.dtype, result.shape) == (theirs.dtype, theirs.shape)
            if case.name not in RANDOM:
                np.testing.assert_allclose(result, theirs, rtol=max(case.rtol, 1e-5), atol=1e-5)


def first_of_each_op() -> dict[str, Any]:
    """The node tests whose model is one node, the first for each op."""
    single = {
        case.model.graph.node[0].op_type: case for case in reversed([*float_cases()]) if len(case.model.graph.node) == 1
    }
    return single


@pytest.mark.long
@pytest.mark.parametrize("all_of_them", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["each op", "all"])
def test_the_float_node_tests_pass_but_for_what_is_listed(all_of_them):
    passed, refused, failed = 0, [], {}
    for case in float_cases() if all_of_them else first_of_each_op().values():
        try:
            check(case)
            passed += 1
        except AmpError:
            refused.append(case.name)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is listed with its name
            failed[case.name] = f"{type(error).__name__}: {error}"
    print(f"{passed} passed, {len(refused)} refused, {len(failed)} failed")
    assert not failed
    unlisted = [name for name in refused if not re.match(f"test_({'|'.join(REFUSED)})", name)]
    assert not unlisted
    assert passed >= (LEAST if all_of_them else EACH)


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_random_ops_draw_from_torch(name):
    """Seeded by torch, the same numbers come again; ONNX's own seeds are another generator's."""
    case = next(one for one in float_cases() if one.name == name)
    module = onnx_to_fx(case.model)
    inputs = [torch.from_numpy(array(one).copy()) for one in case.data_sets[0][0]]
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        result = module(*inputs)
        results.append(result if isinstance(result, tuple) else (result,))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


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
    opset, inputs, built, body = form
    model = parser.parse_model(f'<ir_version: 7, opset_import: ["" : {opset}]> g ({inputs}) => ({built}) {{ {body} }}')
    shape = [one.dim_value for one in model.graph.input[0].type.tensor_type.shape.dim]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4), requires_grad=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {"x": x.detach().numpy()})
    result = amp.onnx_to_fx(model)(x)
    np.testing.assert_allclose(result.detach().numpy(), wanted, rtol=1e-5, atol=1e-6)
    result.square().sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


SELU = {1: (1.6732, 1.0507), 6: (1.67326319217681884765625, 1.05070102214813232421875)}  # defaults by opset


@pytest.mark.parametrize("attributes", ["", "<alpha=0.5, gamma=3.0>"])
@pytest.mark.parametrize("opset", SELU)
def test_selu(opset, attributes):
    """That of opset 1 has no function body, and none of ONNX Runtime's kernels."""
    head = f'<ir_version: 7, opset_import: ["" : {opset}]> g (float[3] x) => (float[3] y)'
    graph_module = amp.onnx_to_fx(parser.parse_model(f"{head} {{ y = Selu{attributes}(x) }}"))
    result = graph_module(torch.tensor([-1.0, 0.0, 200.0]))
    alpha, gamma = (0.5, 3.0) if attributes else SELU[opset]
    np.testing.assert_allclose(result.numpy(), [gamma * alpha * np.expm1(-1.0), 0, gamma * 200], rtol=1e-6)
