"""Write the headline of the README and the tables of docs/benchmarks.md and of the notes from the results.

    python benchmarks/readme.py             # `--check` only compares

Every table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FILES = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in (
            "benchmarks.md",
            "fp8.md",
            "frameworks.md",
            "onnx_reference.md",
            "ranks_reference.md",
            "report.md",
            "tune.md",
        )
    ),
    RESULTS / "notes_cpu.md",
)


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def parity_table() -> str:
    """Accuracy and cast traffic beside torch.autocast, per model."""
    data = _load("autocast_parity")
    lines = [
        "| model | output error, autocast | ours / autocast | gradient error, autocast | ours / autocast"
        " | cast MB, autocast | ours / autocast |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["models"]:
        lines.append(
            f"| {row['model']} | {row['autocast_output_error']:.2e} | {row['output_ratio']:.2f} "
            f"| {row['autocast_grad_error']:.2e} | {row['grad_ratio']:.2f} "
            f"| {row['autocast_bytes'] / 1e6:.1f} | {row['bytes_ratio']:.2f} |"
        )
    return "\n".join(lines)


def fp8_table() -> str:
    """The loss of a small language model by preset, beside BF16."""
    rows = _load("fp8")["rows"]
    lines = [
        "| rules | loss | off BF16, standard errors of its mean | casts, MB a step | kept for the backward, MB |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| `{row['rules']}` | {row['loss']:.4f} | {row['errors_off']:+.2f} | {row['cast_bytes'] / 1e6:.2f}"
            f" | {row['kept_bytes'] / 1e6:.2f} |"
        )
    return "\n".join(lines)


def plan_table() -> str:
    """Planning and rewriting time against graph size."""
    rows = _load("plan")["rows"]
    lines = ["| rules | graph | nodes | planning, s | rewriting, s | µs per node |", "|---|---|---|---|---|---|"]
    for row in rows:
        rewriting = f"{row['rewrite_seconds']:.3f}" if "rewrite_seconds" in row else ""
        lines.append(
            f"| {row['rules']} | {row['graph']} | {row['nodes']:,} | {row['seconds']:.3f} | {rewriting} "
            f"| {row['us_per_node']:.0f} |"
        )
    return "\n".join(lines)


def _pairs(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any]]]:
    """By model and batch, the fastest mode of torch.compile and ours."""
    by_case: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault((row["model"], row["bound"]), []).append(row)
    return {
        case: (
            min((v for v in variants if v["variant"].startswith("torch.compile")), key=lambda v: v["step_ms"]),
            next(v for v in variants if v["variant"] == "amp_compiler"),
        )
        for case, variants in by_case.items()
    }


def _against_compile(rows: list[dict[str, Any]], first: str) -> str:
    """Ours beside the fastest mode of torch.compile: time, memory, first call, and the share of the GEMM floor."""
    floors = all("gemm_share" in row for row in rows)
    lines = [
        "| model | bound by | torch.compile, ms | ours, ms | ours / theirs | peak memory, ours / theirs"
        f" | {first}, ours / theirs |" + (" share of the GEMM floor, theirs | ours |" if floors else ""),
        "|---" * (9 if floors else 7) + "|",
    ]
    ratios = []
    for (model, bound), (theirs, ours) in _pairs(rows).items():
        ratios.append([ours[key] / theirs[key] for key in ("step_ms", "peak_bytes", "first_call_s")])
        time, memory, start = ratios[-1]
        lines.append(
            f"| {model} | {bound} | {theirs['step_ms']:.1f} | {ours['step_ms']:.1f} | {time:.2f} | {memory:.2f}"
            f" | {start:.2f} |" + (f" {theirs['gemm_share']:.0%} | {ours['gemm_share']:.0%} |" if floors else "")
        )
    time, memory, start = (statistics.geometric_mean(column) for column in zip(*ratios, strict=True))
    lines.append(f"| geometric mean | | | | {time:.2f} | {memory:.2f} | {start:.2f} |" + (" | |" if floors else ""))
    return "\n".join(lines)


def headline_table() -> str:
    """Three lines for the README: a training step, inference, numbers."""
    lines = ["| BF16 on a CPU | cases | ours / theirs, geometric mean |", "|---|---|---|"]
    for what, name in (
        ("a training step, beside `torch.compile` with `torch.autocast` and fused AdamW", "train_step_cpu"),
        ("inference, beside `torch.compile` with `torch.autocast`", "inference_cpu"),
    ):
        pairs = _pairs(_load(name)["rows"]).values()
        time, memory = (_mean(ours[key] / theirs[key] for theirs, ours in pairs) for key in ("step_ms", "peak_bytes"))
        lines.append(f"| {what} | {len(pairs)} | time {time:.2f}, peak memory {memory:.2f} |")
    rows = _load("autocast_parity")["models"]
    output, gradient, moved = (_mean(row[f"{key}_ratio"] for row in rows) for key in ("output", "grad", "bytes"))
    lines.append(
        f"| distance to FP32 and bytes moved by casts, beside `torch.autocast` | {len(rows)}"
        f" | outputs {output:.2f}, gradients {gradient:.2f}, bytes {moved:.2f} |"
    )
    return "\n".join(lines)


def _mean(ratios: Iterable[float]) -> float:
    return statistics.geometric_mean(ratios)


def machines_table() -> str:
    """On what each results file was made."""
    lines = ["| file | processor | threads | torch | date |", "|---|---|---|---|---|"]
    for name in (
        "train_step_cuda",
        "update_cuda",
        "train_step_cpu",
        "inference_cpu",
        "update_cpu",
        "profile_cpu",
        "range_profile_cpu",
        "autocast_parity",
        "plan",
        "fp8",
        "onnx_convert",
        "onnx_real",
    ):
        data = _load(name)
        processor, torch_version = data.get("gpu") or data["cpu"], data["versions"]["torch"]
        lines.append(f"| `{name}.json` | {processor} | {data['threads']} | {torch_version} | {data['date']} |")
    return "\n".join(lines)


def onnx_table() -> str:
    """CPU seconds to convert an ONNX file to fp16 and what comes of it, beside other converters."""
    rows = _load("onnx_convert")["rows"]
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    lines = [
        f"| model | nodes | MB | ours, s | without checks, s | {', s | '.join(peers)}, s | casts, MB | error | low |",
        "|---" * (len(peers) + 8) + "|",
    ]
    for row in rows:
        theirs = [row["peers"].get(peer, {}) for peer in peers]
        cells = [f"{one['seconds']:.2f}" if "seconds" in one else one.get("failed", "") for one in theirs]
        every = [row, *theirs]
        compared = (
            " / ".join(f"{one['casts']}, {one['cast_bytes'] / 1e6:.2f}" if "casts" in one else "–" for one in every),
            " / ".join(f"{one['error']:.5f}" if "error" in one else "–" for one in every),
            " / ".join(f"{one['low']:.0%}" if "low" in one else "–" for one in every),
        )
        lines.append(
            f"| {row['model']} | {row['nodes']:,} | {row['bytes'] / 1e6:.1f} | {row['convert']:.2f}"
            f" | {row['unchecked']:.2f} | {' | '.join((*cells, *compared))} |"
        )
    return "\n".join(lines)


def casts_table() -> str:
    """Casts that conversions put into exports of transformers, beside other converters."""
    rows = _load("onnx_casts")["rows"]
    variants = [key for key, value in rows[0].items() if isinstance(value, dict)]
    lines = [f"| model | {' | '.join(variants)} |", "|" + "---|" * (len(variants) + 1)]
    for row in rows:
        cells = [
            f"{facts['casts']}, {facts['cast_bytes'] / 1e6:.2f} MB, {facts['error']:.5f}, {facts['low']:.0%}"
            if "casts" in facts
            else facts["error"]
            for facts in (row[variant] for variant in variants)
        ]
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def real_table() -> str:
    """Real ONNX files: error by true rounding, casts, and size of the result, beside other converters."""
    rows = _load("onnx_real")["rows"]
    names = (
        "amp_compiler",
        "amp_compiler, calibrated",
        "amp_compiler, tuned",
        "onnxconverter-common",
        "onnxruntime float16",
        "ModelOpt AutoCast",
    )
    lines = [f"| file (nodes, MB) | {' | '.join(names)} | --verify: s, MB |", "|" + "---|" * (len(names) + 2)]
    for row in rows:
        cells = []
        for converted in (row.get(name, {}) for name in names):
            error = f"{converted['error']:.1e}" if converted.get("loads") and "error" in converted else "does not load"
            text = f"{error}, {converted['casts']}, {converted['megabytes']:.1f} MB" if "casts" in converted else ""
            cells.append("fails" if "failed" in converted and not text else text)
        took = row["verify"]
        head = f"{row['file']} ({row['nodes']}, {row['megabytes']:.1f})"
        lines.append(f"| {head} | {' | '.join(cells)} | {took['seconds']:.0f}, {took['megabytes']:.0f} |")
    return "\n".join(lines)


def first_step_table() -> str:
    """CPU seconds of the first training step beside torch.compile's, cold and warm."""
    rows = _load("first_step_cpu")["rows"]
    seconds = {(row["model"], row["start"], row["variant"]): row["cpu_s"] for row in rows}
    lines = ["| model | cold, torch.compile | ours | warm, torch.compile | ours |", "|---|---|---|---|---|"]
    ratios: dict[str, list[float]] = {"cold": [], "warm": []}
    for model in dict.fromkeys(row["model"] for row in rows):
        cells = []
        for start, known in ratios.items():
            theirs, ours = (seconds[model, start, variant] for variant in ("torch.compile", "amp_compiler"))
            cells += [f"{theirs:.1f}", f"{ours:.1f}"]
            known += [ours / theirs] if model != "lstm" else []  # which torch.compile leaves as it is
        lines.append(f"| {model} | {' | '.join(cells)} |")
    cold, warm = map(statistics.geometric_mean, ratios.values())
    lines.append(f"| ours / theirs, geometric mean without the LSTM | | {cold:.2f} | | {warm:.2f} |")
    return "\n".join(lines)


def frameworks_table() -> str:
    """Loops of other frameworks with their own BF16 and with ours."""
    lines = [
        "| framework | version | lines changed | losses, at most off | own, ms | ours, ms | resumed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in _load("frameworks_cpu")["rows"]:
        lines.append(
            f"| {row['framework']} | {row['version']} | {row['lines']} | {row['off']:.2%} | {row['own_ms']:.1f} "
            f"| {row['ours_ms']:.1f} | {'to the bit' if row['resumed'] else 'differs'} |"
        )
    return "\n".join(lines)


def low_weights_table() -> str:
    """Memory of 16-bit weights alone."""
    lines = ["| GPT-2 | behind the first call, MB | at most in a later call, MB |", "|---|---|---|"]
    for row in _load("low_weights_cpu")["rows"]:
        lines.append(f"| `{row['variant']}` | {row['held_mb']:.0f} | {row['peak_mb']:.0f} |")
    return "\n".join(lines)


def page_table() -> str:
    """Milliseconds to open the page of a plan, and what one does on it."""
    lines = [
        "| nodes | page, kB | open, ms | search, ms | unfold a module, ms | unfold all, ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in _load("page")["rows"]:
        times = (f"{row[f'{name}_ms']:,.0f}" for name in ("open", "search", "unfold", "unfold_all"))
        lines.append(f"| {row['nodes']:,} | {row['kilobytes']:,} | {' | '.join(times)} |")
    return "\n".join(lines)


def train_table() -> str:
    """Whole training steps on a CPU beside torch.compile."""
    return _against_compile(_load("train_step_cpu")["rows"], "first step")


def inference_table() -> str:
    """Inference on a CPU beside torch.compile."""
    return _against_compile(_load("inference_cpu")["rows"], "first call")


def cuda_train_table() -> str:
    """Whole training steps on a GPU beside torch.compile."""
    return _against_compile(_load("train_step_cuda")["rows"], "first step")


def cuda_update_table() -> str:
    """The optimizer phase on a GPU."""
    return update_table("cuda")


def update_table(device: str = "cpu") -> str:
    """The optimizer phase: time, bytes per parameter, bandwidth."""
    rows = [row for row in _load(f"update_{device}")["rows"] if row["variant"] != "copy"]
    lines = [
        "| gradients | update | ms | ratio to fused AdamW | bytes per parameter | GB/s | of a copy's bandwidth |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['gradients']} | {r['variant']} | {r['step_ms']:.1f} | {r['time_ratio']:.2f} | {r['bytes_per_parameter']}"
        f" | {r['gb_per_s']:.1f} | {r['copy_share']:.0%} |"
        for r in rows
    ]
    return "\n".join(lines)


def profile_table() -> str:
    """Where the time of a training step goes on a CPU, and the time that its matrix products need at the least."""
    rows = _load("profile_cpu")["rows"]
    floors = {(row["model"], row["bound"]): row["gemm_floor_ms"] for row in _load("train_step_cpu")["rows"]}
    kinds = [kind for kind in rows[0]["classes_ms"] if any(row["classes_ms"][kind] >= 0.05 for row in rows)]
    lines = [
        f"| model | bound by | variant | step | {' | '.join(kinds)} | GEMM floor | page faults |",
        "|---" * (len(kinds) + 6) + "|",
    ]
    for row in rows:
        times = [row["step_ms"], *(row["classes_ms"][kind] for kind in kinds), floors[row["model"], row["bound"]]]
        milliseconds = " | ".join(f"{time:.1f}" for time in times)
        lines.append(
            f"| {row['model']} | {row['bound']} | {row['variant']} | {milliseconds} | {row['page_faults']:,} |"
        )
    return "\n".join(lines)


def tune_table() -> str:
    """Nodes in FP32 and the error of `amp.tune` beside two other converters."""
    rows = _load("tune")["rows"]
    lines = [
        "| model | nodes | AutoCast: in FP32, error | ORT: in FP32, error | amp.tune: in FP32, error | runs |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = row["tune"]
        theirs = [_in_fp32(row.get(peer, {"failed": "not run"})) for peer in ("AutoCast", "ORT auto")]
        runs = f"{ours['runs']} (at most {ours['limit']})" if "runs" in ours else ""
        lines.append(f"| {row['model']} | {row['nodes']} | {theirs[0]} | {theirs[1]} | {_in_fp32(ours)} | {runs} |")
    return "\n".join(lines)


def _in_fp32(one: dict[str, Any]) -> str:
    if "failed" in one:
        return "fails"
    return f"{one['fp32']}, {one['error'] if isinstance(one['error'], str) else format(one['error'], '.2e')}"


def range_profile_table() -> str:
    """A training step alone and with its exponents counted."""
    lines = ["| model | type | parameters | values counted | step | profiled | ratio |", "|---" * 7 + "|"]
    lines += [
        f"| {row['model']} | {row['dtype']} | {row['parameters']:,} | {row['counted']:,} | {row['step_ms']:.0f}"
        f" | {row['profiled_ms']:.0f} | {row['ratio']:.2f} |"
        for row in _load("range_profile_cpu")["rows"]
    ]
    return "\n".join(lines)


def reduction_table() -> str:
    """Errors of gradients that are summed in 16 bits over simulated ranks, and losses behind a training with them."""
    kinds = [f"{name} {order}" for name in ("bf16", "fp16") for order in ("ring", "tree")]
    lines = [
        "| ranks | noise | BF16, ring | BF16, tree | FP16, ring | FP16, tree | loss, FP32 | BF16, ring | FP16, ring |",
        f"|---{'|---:' * 8}|",
    ]
    for row in _load("reduction")["rows"]:
        errors = " | ".join(f"{row[kind]:.1e}" for kind in kinds)
        losses = f"{row['loss']:.4f} ± {row['spread']:.4f} | {row['bf16 loss']:.4f} | {row['fp16 loss']:.4f}"
        lines.append(f"| {row['ranks']:,} | {row['noise']:.2f} | {errors} | {losses} |")
    return "\n".join(lines)


def scale_table() -> str:
    """The step of one rank of many: what is counted in its graph, and what others send and hold."""
    lines = [
        "| ranks | | messages | sent, GB | weights, GB | masters, moments, GB |",
        f"|---:|---|{'---:|' * 4}",
    ]
    for row in _load("scale")["rows"]:
        sizes = " | ".join(f"{row[key]:.4g}" for key in ("sent_gb", "weights_gb", "state_gb"))
        lines.append(f"| {row['ranks']:,} | {row['system']} | {row.get('messages', '')} | {sizes} |")
    return "\n".join(lines)


def ranks_table() -> str:
    """The step of several ranks beside torch's ways, over gloo."""
    data = _load("ranks_cpu")
    lines = [
        f"{data['rows'][0]['ranks']} ranks with a thread each, {data['cpu']}, torch {data['versions']['torch']}:",
        "",
        "| model | | step, ms (10% to 90%) | ours / this | between steps, MB | at most, MB | sent, MB |",
        f"|---|---|{'---:|' * 5}",
    ]
    for row in data["rows"]:
        times = f"{row['step_ms']:.0f} ({row['step_ms_10']:.0f} to {row['step_ms_90']:.0f}) | {row['ours_to_this']:.2f}"
        sizes = " | ".join(f"{row[key] / 1e6:.0f}" for key in ("state_bytes", "peak_bytes", "sent_bytes"))
        lines.append(f"| {row['model']} | {row['variant']} | {times} | {sizes} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "casts": casts_table,
    "real": real_table,
    "first_step": first_step_table,
    "fp8": fp8_table,
    "frameworks": frameworks_table,
    "low_weights": low_weights_table,
    "headline": headline_table,
    "machines": machines_table,
    "onnx": onnx_table,
    "page": page_table,
    "parity": parity_table,
    "plan": plan_table,
    "train": train_table,
    "cuda_train": cuda_train_table,
    "cuda_update": cuda_update_table,
    "tune": tune_table,
    "inference": inference_table,
    "update": update_table,
    "profile": profile_table,
    "range_profile": range_profile_table,
    "ranks": ranks_table,
    "reduction": reduction_table,
    "scale": scale_table,
}


def render(text: str) -> str:
    """A file's text with every table made anew."""
    for name, make in TABLES.items():
        if f"<!-- table: {name} -->" not in text:
            continue
        block = f"<!-- table: {name} -->\n{make()}\n<!-- end -->"
        text = re.sub(rf"<!-- table: {name} -->.*?<!-- end -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 where a table is not current")
    options = parser.parse_args()
    current = True
    for path in FILES:
        old = path.read_text(encoding="utf-8")
        new = render(old)
        current = current and old == new
        if not options.check:
            path.write_text(new, encoding="utf-8")
    return int(options.check and not current)


if __name__ == "__main__":
    sys.exit(main())
