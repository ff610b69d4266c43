"""Casts that a conversion puts into exports of transformers, their bytes in a run, and what the conversion costs.

    python -m benchmarks.onnx_casts --peers /path/to/their/python

Each model has two layers and random weights, and is exported by `torch.onnx.export`. Counted are casts between floating
types in the converted FP16 model, with the bytes that they read and write in a run over the given inputs; the share of
nodes that make 16-bit values; and the relative error by true rounding after every node. `norms in FP32` is what the
preset `default` gives with softmax, means and norms in FP32; `fused` has opset 23, and norms and GELUs that are written
out in parts as one op each.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from onnx import TensorProto
from rich.console import Console
from rich.table import Table

from amp_compiler.ir.files import write_atomically
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from benchmarks.machine import machine_facts
from benchmarks.onnx_convert_peers import PROGRAMS, run_peer

RESULT = Path(__file__).parent / "results" / "onnx_casts.json"
PEER_LIMIT = 120.0  # seconds that a peer may take
OURS, FUSED, WIDE = "amp_compiler", "amp_compiler, fused", "norms in FP32"
_NORMS_IN_FP32 = {
    "version": 1,
    "extends": "default",
    "rules": [
        {"match": {"family": ["softmax", "normalization"]}, "precision": "fp32"},
        {"match": {"op": "onnx.ReduceMean"}, "precision": "fp32"},
    ],
}
_BYTES = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.BFLOAT16: 2, TensorProto.DOUBLE: 8}
_WORDS, _WIDTH, _LAYERS, _HEADS, _TOKENS, _PIXELS = 512, 128, 2, 4, 64, 64
_ENCODER = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "intermediate_size": 4 * _WIDTH,
}
_PICTURES = {**_ENCODER, "image_size": _PIXELS, "patch_size": 16}
_WHISPER = {
    "d_model": _WIDTH,
    **{f"{part}_layers": _LAYERS for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": _HEADS for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 4 * _WIDTH for part in ("encoder", "decoder")},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
_SWIN = {"image_size": _PIXELS, "patch_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
# By name: class of the model (its configuration is called alike), settings, inputs.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bert": ("BertModel", {**_ENCODER, "vocab_size": _WORDS}, ("input_ids",)),
    "roberta": ("RobertaModel", {**_ENCODER, "vocab_size": _WORDS}, ("input_ids",)),
    "distilbert": (
        "DistilBertModel",
        {"vocab_size": _WORDS, "dim": _WIDTH, "n_layers": _LAYERS, "n_heads": _HEADS, "hidden_dim": 4 * _WIDTH},
        ("input_ids",),
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": _WORDS, "n_embd": _WIDTH, "n_layer": _LAYERS, "n_head": _HEADS, "use_cache": False},
        ("input_ids",),
    ),
    "llama": (
        "LlamaForCausalLM",
        {**_ENCODER, "vocab_size": _WORDS, "num_key_value_heads": _HEADS, "use_cache": False},
        ("input_ids",),
    ),
    "t5": (
        "T5Model",
        {
            **{"vocab_size": _WORDS, "d_model": _WIDTH, "num_layers": _LAYERS, "num_heads": _HEADS},
            **{"d_kv": _WIDTH // _HEADS, "d_ff": 4 * _WIDTH, "use_cache": False},
        },
        ("input_ids", "decoder_input_ids"),
    ),
    "whisper": (
        "WhisperModel",
        {**_WHISPER, "vocab_size": _WORDS, "num_mel_bins": 80, "use_cache": False},
        ("input_features", "decoder_input_ids"),
    ),
    "vit": ("ViTModel", _PICTURES, ("pixel_values",)),
    "clip": ("CLIPVisionModel", _PICTURES, ("pixel_values",)),
    "swin": ("SwinModel", {**_SWIN, "window_size": 4}, ("pixel_values",)),
}
_CONFIG = {"GPT2LMHeadModel": "GPT2Config", "LlamaForCausalLM": "LlamaConfig", "CLIPVisionModel": "CLIPVisionConfig"}


class First(torch.nn.Module):
    """A model with inputs by position, and the first of its outputs."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.names, values, strict=True)))[0]


def export(name: str, folder: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a model of `MODELS` as an FP32 file; its path, and inputs for it."""
    kind, settings, names = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, _CONFIG.get(kind, kind.replace("Model", "Config")))(**settings)
    module = First(getattr(transformers, kind)(config).eval(), names).eval()
    drawn = {
        "pixel_values": torch.randn(1, 3, _PIXELS, _PIXELS),
        "input_features": torch.randn(1, 80, 3000),
        "input_ids": torch.randint(0, _WORDS, (1, _TOKENS)),
        "decoder_input_ids": torch.randint(0, _WORDS, (1, _TOKENS)),
    }
    inputs = tuple(drawn[one] for one in names)
    said = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(said), redirect_stderr(said), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, inputs, dynamo=True, input_names=list(names), output_names=["y"], verbose=False
        )
    path = folder / f"{name}.onnx"
    program.save(str(path))
    return path, {one: value.numpy() for one, value in zip(names, inputs, strict=True)}


def casts(path: Path) -> dict[str, Any]:
    """Casts between floating types in a file, the bytes that they read and write, and the share of low nodes."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True)
    graph = model.graph
    types = {one.name: one.type.tensor_type for one in (*graph.value_info, *graph.input, *graph.output)}
    count = size = low = 0
    for node in graph.node:
        outputs = [types[one] for one in node.output if one in types]
        low += any(one.elem_type in (TensorProto.FLOAT16, TensorProto.BFLOAT16) for one in outputs)
        source = types.get(node.input[0]) if node.op_type == "Cast" else None
        if source is None or not outputs or {source.elem_type, outputs[0].elem_type} - set(_BYTES):
            continue
        count += 1
        numbers = int(np.prod([dim.dim_value for dim in outputs[0].shape.dim] or [1]))
        size += numbers * (_BYTES[source.elem_type] + _BYTES[outputs[0].elem_type])
    return {"casts": count, "cast_bytes": size, "low": low / len(graph.node)}


def measure(name: str, folder: Path, peers: Path | None) -> dict[str, Any]:
    """One model: what each converter makes of it."""
    source, feeds = export(name, folder)
    row: dict[str, Any] = {"model": name, "nodes": len(onnx.load(source).graph.node)}
    settings: dict[str, dict[str, Any]] = {
        WIDE: {"rules": _NORMS_IN_FP32},
        OURS: {},
        FUSED: {"fuse": True, "opset": 23},
    }
    for variant, options in settings.items():
        target = folder / f"{name}.made.onnx"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert_onnx(source, target, dtype="fp16", **options)
        row[variant] = facts(source, target, feeds)
    for peer in PROGRAMS if peers is not None else ():
        target = folder / f"{name}.peer.onnx"
        outcome = run_peer(peers, peer, source, target, PEER_LIMIT)  # type: ignore[arg-type]
        row[peer] = {**outcome, **facts(source, target, feeds)} if "seconds" in outcome else outcome
        target.unlink(missing_ok=True)
    return row


def facts(source: Path, converted: Path, feeds: dict[str, np.ndarray] | None) -> dict[str, Any]:
    """What a conversion comes to: casts, the bytes that they move in a run, the share of low nodes, and the error.

    Args:
        source: the FP32 file.
        converted: the converted file.
        feeds: inputs for the error by true rounding; `None` does without it.
    """
    counts = casts(converted)
    if feeds is None:
        return counts
    return {**counts, "error": max(output.relative for output in verify(source, converted, [feeds]).outputs)}


def show(rows: list[dict[str, Any]]) -> Table:
    """Casts, their MB a run, error and share of low nodes, for each converter."""
    table = Table(title="FP16: casts, MB that they read and write in a run, relative error, share of 16-bit nodes")
    table.add_column("model")
    variants = [one for one in (WIDE, OURS, FUSED, *PROGRAMS) if one in rows[0]]
    for variant in variants:
        table.add_column(variant, justify="right")
    for row in rows:
        cells = []
        for variant in variants:
            facts = row[variant]
            cells.append(
                f"{facts['casts']}, {facts['cast_bytes'] / 1e6:.2f}, {facts['error']:.5f}, {facts['low']:.0%}"
                if "casts" in facts
                else facts["error"][:24]
            )
        table.add_row(row["model"], *cells)
    return table


def main() -> None:
    """Export, convert, count, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--peers", type=Path, help="interpreter of the peers' environment")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            rows.append(measure(name, Path(folder), options.peers))
            Console(stderr=True).print(f"{name}: done")
    facts = {"what": "casts of converted exports", **machine_facts(), "onnx": onnx.__version__, "rows": rows}
    write_atomically(options.json, json.dumps(facts, indent=1) + "\n")
    Console(width=150).print(show(rows))


if __name__ == "__main__":
    main()
