"""Every environment variable that is read stands in docs/compatibility.md, and no other."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


def sources(*folders: str) -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, check=True, text=True)
    yield from (ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def variables_read(path: Path) -> Iterator[str]:
    """Names that code reads from the environment, wherever in a call or an index of it they stand."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cpp", ".h"):
        yield from re.findall(r'getenv\("(\w+)"', text)
    for node in ast.walk(ast.parse(text)) if path.suffix == ".py" else ():
        name = None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
            name = node.args[0]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            name = node.slice
        if name is not None:
            assert isinstance(name, ast.Constant), f"{path}:{node.lineno}: name the variable where it is read"
            yield name.value


def test_every_variable_that_is_read_is_on_the_page():
    read = {name for path in sources("amp_compiler", "passes", "rules") for name in variables_read(path)}
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", PAGE, flags=re.MULTILINE))
    assert {"AMP_LOG", "CXX"} < read
    assert read == table


def test_every_variable_of_ours_is_on_the_page():
    texts = [path.read_text(encoding="utf-8") for path in sources("*.py", "*.sh", "*.yaml", "Makefile", ".ci/run")]
    named = {name for text in texts for name in re.findall(r"\bAMP_[A-Z]+(?:_[A-Z]+)*\b", text)}
    assert {one for one in named if not one.startswith("AMP_TEST")} <= set(re.findall(r"`(\w+)[`=]", PAGE))
