"""Real architectures, small: one graph, and no further off FP32 than `torch.autocast` is."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import amp_compiler as amp

IDS = {"input_ids": torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))}
IMAGES = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))}
TEXT = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": 0}

MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "bert": (lambda: hf.BertForMaskedLM(hf.BertConfig(**TEXT, intermediate_size=48)), IDS),
    "roberta": (lambda: hf.RobertaModel(hf.RobertaConfig(**TEXT, intermediate_size=48)), IDS),
    "distilbert": (
        lambda: hf.DistilBertModel(hf.DistilBertConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, hidden_dim=48)),
        IDS,
    ),
    "electra": (lambda: hf.ElectraModel(hf.ElectraConfig(**TEXT, embedding_size=32, intermediate_size=48)), IDS),
    "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4)), IDS),
    "opt": (
        lambda: hf.OPTForCausalLM(hf.OPTConfig(**TEXT, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32)),
        IDS,
    ),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, **HEADS)), IDS),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT, **HEADS)), IDS),
    "gemma": (lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**TEXT, **HEADS, head_dim=8)), IDS),
    "mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, **HEADS, num_local_experts=4, num_experts_per_tok=2)),
        IDS,
    ),
    "mamba": (
        lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4)),
        IDS,
    ),
    "t5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
        ),
        {**IDS, "decoder_input_ids": IDS["input_ids"]},
    ),
    "vit": (
        lambda: hf.ViTModel(hf.ViTConfig(**_without(TEXT, "vocab_size"), image_size=32, patch_size=8)),
        IMAGES,
    ),
    "resnet": (
        lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        IMAGES,
    ),
    "segformer": (
        lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[3, 3],
                strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
            )
        ),
        IMAGES,
    ),
}  # fmt: skip


ALIKE = ("roberta", "distilbert", "electra", "vit", "opt", "gpt2", "qwen2", "gemma", "llama")  # as BERT and Mixtral are


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def results(output: Any) -> list[Tensor]:
    result = [one for one in torch.utils._pytree.tree_leaves(dict(output)) if isinstance(one, Tensor)]
    return [one for one in result if one.is_floating_point()]


def error(matches: list[Tensor], exact: list[Tensor]) -> float:
    return max(float((one.float() - two).norm() / two.norm()) for one, two in zip(matches, exact, strict=True))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ALIKE)) for name in MODELS])
def test_it_is_one_graph_at_autocasts_error(name: str) -> None:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs = {**inputs, "use_cache": False}  # type: ignore[dict-item]
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    with torch.no_grad():
        exact, ours = results(model(**inputs)), results(compiled(**inputs))
        with torch.autocast("cpu", torch.bfloat16):
            theirs = results(model(**inputs))
    assert compiled.execution == "as one graph"
    assert error(ours, exact) <= 1.25 * error(theirs, exact) < 0.1
    assert any(node.precision == "low" for node in compiled.plan.nodes)
