"""Digests of what conversion makes of many ONNX models: file, plan and notes, to compare two states of the code.

    PYTHONPATH=.:tests:tests/onnx python tools/onnx_digests.py before.json --exports FOLDER
    PYTHONPATH=.:tests:tests/onnx python tools/onnx_digests.py after.json --exports FOLDER --against before.json

The models are ONNX's backend node tests, the base and the damaged models of `tests/onnx/test_onnx_fuzz.py`, and those
in the folder of `--exports`. An error counts by its text. The second command prints what differs, and fails where
anything does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
from test_onnx_fuzz import bases, case

from amp_compiler.errors import AmpError
from amp_compiler.onnx.convert import convert_onnx

DAMAGED = 400
WAYS: dict[str, dict[str, Any]] = {
    "fp16": {},
    "fast": {"rules": "fast"},
    "bf16, low ends": {"dtype": "bf16", "keep_io_types": False},
    "safe": {"dtype": "bf16", "rules": "safe"},
    "fused": {"fuse": True, "opset": 23},
}


def models(exports: Path | None) -> Iterator[tuple[str, onnx.ModelProto | Path]]:
    """The models by name."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = collect_testcases(None)
    yield from ((f"node {one.name}", one.model) for one in cases if one.model is not None)
    known = bases()
    yield from ((f"base {index}", model) for index, model in enumerate(known))
    for number in range(DAMAGED):
        name, source = case(number, known)
        if isinstance(source, bytes):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "damaged.onnx")
                path.write_bytes(source)
                yield f"damaged {number} ({name})", path
        else:
            yield f"damaged {number} ({name})", source
    yield from ((path.stem, path) for path in sorted(exports.rglob("*.onnx") if exports else ()))


def digests(source: onnx.ModelProto | Path, folder: Path, options: dict[str, Any]) -> list[str]:
    """Digests of files, plan and notes; or the text of the error."""
    target = folder / "converted.onnx"
    for old in folder.iterdir():
        old.unlink()
    try:
        done = convert_onnx(source, target, check=False, **options)
    except AmpError as error:
        text = str(error).replace(str(folder), "FOLDER")
        return [text.replace(str(source.parent), "SOURCE") if isinstance(source, Path) else text]
    contents = [path.read_bytes() for path in sorted(folder.iterdir())]
    contents += [done.plan.to_json().encode(), repr((done.notes, done.changed)).encode()]
    return [hashlib.sha256(data).hexdigest()[:16] for data in contents]


def main() -> None:
    """Convert all, write the digests, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where the digests are written")
    parser.add_argument("--exports", type=Path, help="a folder of more models")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        now = {
            f"{name}, {way}": digests(source, Path(folder), settings)
            for name, source in models(options.exports)
            for way, settings in WAYS.items()
        }
    options.output.write_text(json.dumps(now, indent=0) + "\n")
    print(f"{len(now)} conversions")
    if options.against is not None:
        before = json.loads(options.against.read_text())
        wrong = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        for name in wrong:
            print(name, before.get(name), now.get(name))
        sys.exit(f"{len(wrong)} differ" if wrong else 0)


if __name__ == "__main__":
    main()
