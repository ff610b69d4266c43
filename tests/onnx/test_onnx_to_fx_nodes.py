"""ONNX's own backend node tests, the float ones, through `onnx_to_fx`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx_helpers import node_tests

from amp_compiler import onnx_to_fx
from amp_compiler.errors import AmpError

# What torch holds without loss: floats, integers and booleans of the usual widths.
TYPES = {
    TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8, TensorProto.UINT16, TensorProto.INT16, TensorProto.INT32,
    TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT32, TensorProto.UINT64,
}  # fmt: skip

QUANTISED = "integer arithmetic of a quantised model: nothing in it is trained"
REFUSED = {
    **dict.fromkeys((
        "test_dequantizelinear", "test_dequantizelinear_axis", "test_dequantizelinear_blocked",
        "test_dequantizelinear_int16", "test_dequantizelinear_uint16", "test_dynamicquantizelinear",
        "test_dynamicquantizelinear_expanded",
        "test_dynamicquantizelinear_max_adjusted", "test_dynamicquantizelinear_max_adjusted_expanded",
        "test_dynamicquantizelinear_min_adjusted", "test_dynamicquantizelinear_min_adjusted_expanded",
        "test_qlinearconv", "test_qlinearmatmul_2D_int8_float32", "test_qlinearmatmul_2D_uint8_float32",
        "test_qlinearmatmul_3D_int8_float32", "test_qlinearmatmul_3D_uint8_float32", "test_quantizelinear",
        "test_quantizelinear_axis", "test_quantizelinear_blocked_asymmetric", "test_quantizelinear_blocked_symmetric",
        "test_quantizelinear_int16", "test_quantizelinear_uint16",
    ), QUANTISED),
    **dict.fromkeys((
        "test_adagrad", "test_adagrad_multiple", "test_adam", "test_adam_multiple", "test_momentum",
        "test_momentum_multiple", "test_nesterov_momentum",
    ), "an update inside the graph: here the optimizer is torch's"),
    **dict.fromkeys((
        "test_nonmaxsuppression_center_point_box_format", "test_nonmaxsuppression_flipped_coordinates",
        "test_nonmaxsuppression_identical_boxes", "test_nonmaxsuppression_iou_threshold_boundary",
        "test_nonmaxsuppression_limit_output_size", "test_nonmaxsuppression_single_box",
        "test_nonmaxsuppression_suppress_by_IOU", "test_nonmaxsuppression_suppress_by_IOU_and_scores",
        "test_nonmaxsuppression_two_batches", "test_nonmaxsuppression_two_classes",
    ), "boxes chosen by a loop over data, without a gradient"),
    **dict.fromkeys((
        "test_roialign_aligned_false", "test_roialign_aligned_true", "test_roialign_mode_max",
    ), "regions of such boxes"),
    **dict.fromkeys((
        "test_tfidfvectorizer_tf_batch_onlybigrams_skip0", "test_tfidfvectorizer_tf_batch_onlybigrams_skip5",
        "test_tfidfvectorizer_tf_batch_uniandbigrams_skip5", "test_tfidfvectorizer_tf_only_bigrams_skip0",
        "test_tfidfvectorizer_tf_onlybigrams_levelempty", "test_tfidfvectorizer_tf_onlybigrams_skip5",
        "test_tfidfvectorizer_tf_uniandbigrams_skip5",
    ), "counts of n-grams, without a gradient"),
    "test_ai_onnx_ml_tree_ensemble_set_membership": "a decision tree, without a gradient",
    "test_melweightmatrix": "a table that is stored, not trained",
    "test_scan_sum": "opset 8, whose Scan has another meaning",
}  # fmt: skip
RANDOM = {  # other random numbers than the reference's: only type and shape can be compared
    "test_bernoulli_seed", "test_bernoulli_seed_expanded", "test_training_dropout", "test_training_dropout_default",
    "test_training_dropout_default_mask", "test_training_dropout_mask",
}  # fmt: skip
UNSOUND = {"test_mvn"}  # ONNX's own full checker refuses it, in onnx 1.23
LEAST = 1236  # of 1296 with onnx 1.23


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
        made = module(*[torch.from_numpy(array(one).copy()) for one in inputs])
        made = made if isinstance(made, tuple) else (made,)
        assert len(made) == len(outputs)
        for mine, theirs in zip(made, map(array, outputs), strict=True):
            found = mine.detach().numpy()
            assert (found.dtype, found.shape) == (theirs.dtype, theirs.shape)
            if case.name not in RANDOM:
                np.testing.assert_allclose(found, theirs, rtol=max(case.rtol, 1e-5), atol=1e-5)


@pytest.mark.long
def test_the_float_node_tests_pass_but_for_what_is_listed():
    passed, refused, failed = 0, [], {}
    for case in float_cases():
        try:
            check(case)
            passed += 1
        except AmpError:
            refused.append(case.name)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is listed with its name
            failed[case.name] = f"{type(error).__name__}: {error}"
    print(f"{passed} passed, {len(refused)} refused, {len(failed)} failed")
    assert not failed
    assert sorted(refused) == sorted(REFUSED)
    assert passed >= LEAST


@pytest.mark.parametrize("name", sorted(RANDOM))
def test_random_ops_draw_from_torch(name):
    """Seeded by torch, the same numbers come again; ONNX's own seeds are another generator's."""
    case = next(one for one in float_cases() if one.name == name)
    module = onnx_to_fx(case.model)
    inputs = [torch.from_numpy(array(one).copy()) for one in case.data_sets[0][0]]
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        made = module(*inputs)
        results.append(made if isinstance(made, tuple) else (made,))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
