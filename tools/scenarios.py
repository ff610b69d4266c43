"""What a new user does, from an empty folder and a built wheel: `make scenarios`, `python tools/scenarios.py PYTHON…`.

For each Python an environment is made, the wheel installed without extras, and each scenario run in a process of its
own, with the seconds that it took. Nothing outside of a temporary folder is written.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
HEAD = "import torch, amp_compiler as amp\nnet, x = torch.nn.Linear(64, 8), torch.ones(4, 64)\n"
STEP = (
    HEAD + "step = amp.training_step(net, lambda m, x: m(x).square().mean(), torch.optim.AdamW(net.parameters()),"
    " dtype='bf16'{})\nlosses = [float(step(x)) for _ in range(3)]\nassert losses[2] < losses[0], losses\n"
)
CONVERT = (
    "import onnx, amp_compiler as amp\n"
    "graph = onnx.parser.parse_graph('g (float[2,4] x, float[4,2] w) => (float[2,2] y) { y = MatMul(x, w) }')\n"
    "opset = [onnx.helper.make_opsetid('', 22)]\n"
    "onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), 'm.onnx')\n"
    "assert amp.convert_onnx('m.onnx', 'm.fp16.onnx').plan.nodes[0].precision == 'low'\n"
)
WITHOUT_ONNX = (
    "import amp_compiler as amp\n"
    "try:\n    amp.convert_onnx('m.onnx', 'n.onnx')\n"
    "except amp.OnnxError as error:\n    assert 'amp_compiler[onnx]' in error.hint\n"
    "else:\n    raise SystemExit('converted without ONNX')\n"
)


def snippets(page: str) -> str:
    """The Python blocks of a page, as a reader runs them one after the other."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))


# Name, what runs, and whether a C++ compiler is found.
CORE = [
    ("a plan", HEAD + "assert amp.explain(net, x, dtype='bf16').nodes\n", True),
    ("a compiled forward", HEAD + "assert amp.compile(net, dtype='bf16')(x).shape == (4, 8)\n", True),
    ("a training step", STEP.format(""), True),
    ("a training step without a compiler", STEP.format(", backend='eager'"), False),
    ("a step without Triton", "import sys\nsys.modules['triton'] = None\n" + STEP.format(", backend='eager'"), False),
    ("an ONNX call without ONNX", WITHOUT_ONNX, True),
    ("a tuned plan, by docs/tutorial.md", snippets("tutorial.md"), True),
    ("a rule of one's own, by docs/keep_fp32.md", snippets("keep_fp32.md"), True),
    ("a NaN found, by docs/find_nan.md", snippets("find_nan.md"), True),
]
ONNX = [
    ("a conversion, with the extra onnx", CONVERT, True),
    ("ONNX files converted, by docs/onnx.md", snippets("onnx.md"), True),
]


def run(python: Path, name: str, code: str, folder: Path, compiler: bool) -> bool:
    """Run a scenario, and print how long it took or how it failed."""
    keep = {"PATH": os.environ["PATH"] if compiler else str(python.parent), "HOME": str(folder), "TMPDIR": str(folder)}
    began = time.perf_counter()
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd=folder, env=keep)
    seconds = time.perf_counter() - began
    print(f"  {name:42} {f'{seconds:6.1f} s' if not done.returncode else 'failed'}", flush=True)
    if done.returncode:
        print(done.stderr[-1500:])
    return done.returncode == 0


def try_python(python: str, wheel: Path, folder: Path) -> bool:
    """Install the wheel for one Python and run all scenarios."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    interpreter = folder / "venv" / "bin" / "python"
    install = [interpreter, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    began = time.perf_counter()
    subprocess.run([*install, wheel], check=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    version = subprocess.run([interpreter, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"{version}: installed in {time.perf_counter() - began:.0f} s, {size / 1e9:.2f} GB with torch", flush=True)
    fine = [run(interpreter, name, code, folder, compiler) for name, code, compiler in CORE]
    subprocess.run([*install, f"{wheel}[onnx]"], check=True)
    fine += [run(interpreter, name, code, folder, compiler) for name, code, compiler in ONNX]
    return all(fine)


def main(pythons: list[str]) -> int:
    """Build the wheel, and try it with each Python; one that is not on this machine is named, and counts as failed."""
    if missing := [one for one in pythons if shutil.which(one) is None]:
        print(f"not tried, as this machine has none: {', '.join(missing)} (on Debian: apt-get install NAME NAME-venv)")
        pythons = [one for one in pythons if one not in missing]
        if not pythons:
            return 1
    with tempfile.TemporaryDirectory() as place:
        tree, out = Path(place) / "tree", Path(place) / "wheel"
        for name in ("amp_compiler", "passes", "rules"):
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, tree / name)
        subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", out, tree], check=True)
        (wheel,) = out.glob("*.whl")
        folders = [(one, Path(place) / f"python{number}") for number, one in enumerate(pythons)]
        for _, folder in folders:
            folder.mkdir()
        fine = [try_python(one, wheel, folder) for one, folder in folders]
        return 1 if missing or not all(fine) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [sys.executable]))
