"""The peers' converters, as programs for the interpreter of an environment of their own.

Each program is given the input's and the output's path, and prints the CPU seconds from file to file, without imports.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_FRAME = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
source, target = sys.argv[1:3]
import onnx
{imports}
begun = time.process_time()
model = {convert}
onnx.save(model, target)
seconds = time.process_time() - begun
from importlib.metadata import version
print("RESULT" + json.dumps({{"seconds": seconds, "version": version("{package}")}}))
"""

PROGRAMS = {
    "onnxconverter-common": _FRAME.format(
        imports="from onnxconverter_common import float16",
        convert="float16.convert_float_to_float16(onnx.load(source), keep_io_types=True)",
        package="onnxconverter-common",
    ),
    "onnxruntime float16": _FRAME.format(
        imports="from onnxruntime.transformers import float16",
        convert="float16.convert_float_to_float16(onnx.load(source), keep_io_types=True)",
        package="onnxruntime",
    ),
    "ModelOpt AutoCast": _FRAME.format(
        imports="from modelopt.onnx.autocast import convert_to_mixed_precision",
        convert="convert_to_mixed_precision(source, low_precision_type='fp16', keep_io_types=True)",
        package="nvidia-modelopt",
    ),
}


def run_peer(python: Path, name: str, source: Path, target: Path, limit: float) -> dict[str, Any]:
    """Convert with one peer.

    Args:
        python: the interpreter of the peers' environment.
        name: a key of `PROGRAMS`.
        source: the FP32 model.
        target: where the peer writes.
        limit: seconds after which it is stopped.

    Returns:
        `seconds` and `version`, or `error` with the last line that it printed.
    """
    return run_program(python, PROGRAMS[name], (source, target), limit)


def run_program(python: Path, program: str, arguments: Sequence[Path | str], limit: float) -> dict[str, Any]:
    """Run a program that prints a line `RESULT` with JSON behind it.

    Args:
        python: the interpreter of the peers' environment.
        program: its text.
        arguments: what it is given.
        limit: seconds after which it is stopped.

    Returns:
        What it printed, or `error` with its last line.
    """
    command = [str(python), "-c", program, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {limit:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no result"])[-1][:200]}
    facts: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT"))
    return facts
