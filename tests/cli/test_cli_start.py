"""Who asks for help, or mistypes, does not wait for torch: nothing heavy is imported before a command needs it."""

import subprocess
import sys
import tomllib
from pathlib import Path

from amp_compiler import __version__

ROOT = Path(__file__).parents[2]
HELP = "--help", "--version", "explain --help", "convert --help", "find-nonfinite -h", "env -h", "rules check --help"
WRONG = "explian", "explain", "explain m:f --formt json", "explain m:f --dtype fp8", "demo --epochs 0"
QUICK = [words.split() for words in (*HELP, *WRONG)]
# Not pydantic, which typer itself reads options with.
HEAVY = ("torch", "numpy", "networkx", "ruamel", "onnx", "onnx_ir", "onnxruntime", "transformers", "sklearn")


def test_help_and_usage_errors_import_nothing_heavy_and_rule_sets_are_listed_without_torch():
    """One process for all of them: each line names the arguments and the heavy libraries that are there behind them."""
    code = (
        "import sys, contextlib, io\n"
        "from amp_compiler.cli.main import main\n"
        f"for arguments in {QUICK!r}:\n"
        "    sys.argv = ['amp-compiler', *arguments]\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        try:\n"
        "            main()\n"
        "        except SystemExit as stop:\n"
        "            code = stop.code\n"
        f"    print(arguments, [name for name in {HEAVY!r} if name in sys.modules], code)\n"
        "from amp_compiler.cli.main import app\n"
        "app(['rules', 'list'], standalone_mode=False)\n"
        "assert not {'torch', 'numpy', 'onnx'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    codes = [0] * len(HELP) + [2] * len(WRONG)
    assert done.stdout.splitlines()[: len(QUICK)] == [
        f"{arguments} [] {code}" for arguments, code in zip(QUICK, codes, strict=True)
    ]
    assert "default" in done.stdout.partition(str(QUICK[-1]))[2]


def test_the_version_is_printed():
    command = Path(sys.executable).with_name("amp-compiler")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"amp-compiler {__version__}\n"


def test_the_version_is_that_of_the_sources():
    """`pyproject.toml` is where it is written; a checkout whose environment is older says so here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert __version__ == project["version"]
    assert project["requires-python"] == ">=3.11"
