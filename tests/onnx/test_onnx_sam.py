"""SAM from transformers, small and with random weights: it is exported, converted, loads, and errs as autocast does."""

from __future__ import annotations

import functools
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx_models import run

import amp_compiler as amp
from amp_compiler.ir.dtypes import low_type
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.exporting.exporter import quiet_exporter

pytestmark = pytest.mark.long

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
PIXELS = 64
VISION = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64,
    "image_size": PIXELS, "patch_size": 8, "window_size": 4, "global_attn_indexes": [1], "num_pos_feats": 8,
    "initializer_range": 0.1,
}  # fmt: skip
PROMPT = {
    "hidden_size": 16, "image_size": PIXELS, "patch_size": 8, "image_embedding_size": 8, "mask_input_channels": 8,
}  # fmt: skip
DECODER = {
    "hidden_size": 16, "mlp_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "iou_head_hidden_dim": 16,
}  # fmt: skip


class Sam(torch.nn.Module):
    """Image and points in, masks and scores out; without points the encoder alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, image, points=None):
        if points is None:
            return (self.model.vision_encoder(image).last_hidden_state,)
        found = self.model(pixel_values=image, input_points=points)
        return found.pred_masks, found.iou_scores


@functools.cache
def sam():
    from transformers import SamConfig, SamModel

    torch.manual_seed(0)
    config = SamConfig(vision_config=VISION, prompt_encoder_config=PROMPT, mask_decoder_config=DECODER)
    model = SamModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "rel_pos" in name or "pos_embed" in name:  # zero as initialised, which would hide their part
                parameter.normal_(std=0.1)
    return Sam(model).eval()


@functools.cache
def exported(part):
    inputs = (torch.randn(1, 3, PIXELS, PIXELS), torch.rand(1, 1, 2, 2) * PIXELS)[: 1 if part == "encoder" else 2]
    with quiet_exporter(), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.onnx.export(sam(), inputs, dynamo=True, verbose=False).model_proto, inputs


def errors(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return [float(torch.linalg.norm(one.float() - two) / torch.linalg.norm(two)) for one, two in pairs]


@pytest.mark.parametrize("dtype", list(TORCH))
@pytest.mark.parametrize("part", [pytest.param("encoder", marks=pytest.mark.slow), "whole"])
def test_sam_loads_and_errs_at_most_twice_as_much_as_autocast(part, dtype):
    source, inputs = exported(part)
    done = amp.convert_onnx(source, dtype=dtype)
    onnx.checker.check_model(done.model, full_check=True)
    # The CPU provider has no kernel for convolutions in BF16, and no other complaint.
    assert done.refusal is None if dtype == "fp16" else done.refusal.kernel
    products = [node for node in done.plan.nodes if node.op in ("onnx.Conv", "onnx.MatMul", "onnx.Gemm")]
    kept = [node.reason.partition(", so")[0] for node in products if node.precision != "low"]
    assert kept == [] if part == "encoder" else ["angles" in reason for reason in kept] == [True]
    with torch.no_grad():
        wanted = sam()(*inputs)
        with torch.autocast("cpu", TORCH[dtype]):
            theirs = errors(sam()(*inputs), wanted)
    feeds = dict(zip([value.name for value in source.graph.input], [one.numpy() for one in inputs], strict=True))
    ours = [output.relative for output in verify(source, done.model, [feeds]).outputs]
    assert all(one <= 2 * other for one, other in zip(ours, theirs, strict=True)), (ours, theirs)
    assert all(one >= low_type(dtype).format.eps / 64 for one in ours), "nothing was rounded"
    if dtype == "fp16":
        made = errors([torch.from_numpy(np.asarray(one)) for one in run(done.model, feeds)], wanted)
        assert all(one <= 2 * other for one, other in zip(made, theirs, strict=True)), (made, theirs)
