"""What the docs make from the code is current, links lead somewhere, snippets run, pages are short and found."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import amp_compiler as amp
from amp_compiler.cli import main as cli
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.op_table import parse_op_table
from amp_compiler.policy.targets import parse_table

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "docs" / "tools"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / one / "README.md" for one in ("passes", "rules"))]
)


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    monkeypatch.syspath_prepend(str(TOOLS))
    names = {path.stem for path in TOOLS.glob("*.py")} - {"site"}
    yield __import__
    for name in names & set(sys.modules):
        del sys.modules[name]


@pytest.fixture
def pages(tools: Callable[[str], Any]) -> Any:
    return tools("pages")


def test_what_is_made_from_the_code_is_current(tools: Callable[[str], Any]) -> None:
    for path, make in tools("generate").FILES.items():
        assert path.read_text(encoding="utf-8") == make(), f"{path.relative_to(ROOT)} is not current: run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_that_are_named_exist(page: Path) -> None:
    """A path in backticks is one from the root, or one inside the package."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"`([\w./-]+/[\w.-]*\.(?:py|yaml|md|cpp|h|json|txt))`", text):
        places = (ROOT / target, ROOT / "amp_compiler" / target, page.parent / target)
        assert any(place.exists() for place in places), target


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    places = {"pipelines": "passes.pipeline", "callbacks": "diagnose.callbacks"}  # the module itself
    missing = [name for name in amp.__all__ if f"::: amp_compiler.{places.get(name, name)}\n" not in text + "\n"]
    assert not missing


# Pages whose snippets a test of their own runs; those of all others run here, one after the other.
ELSEWHERE = {
    "README.md": "tests/test_readme.py",
    "migrate.md": "tests/test_migrate.py",
    "frameworks.md": "tests/integrations/test_framework_recipes.py",
    "live.md": "tests/diagnose/test_callbacks.py",
    "ranks.md": "tests/ranks/checkpoint_scenarios.py",
}
HERE = {
    "tutorial.md": "1 of 3 nodes that round stays in FP32",
    "keep_fp32.md": "low head",
    "loss_scale.md": "a static loss scale of",
    "find_nan.md": "1 node in FP32 fixes it",
    "onnx.md": "nodes in FP16",
    "onnx_reference.md": "target cuda: 0 nodes without a kernel",
    "tune.md": "1 of 5 nodes that round stays in FP32",
    "cut.md": "relu",
    "fp8.md": "[False, True, False]",
    "api.md": "",
    "cli.md": "",
    "report.md": "",
    "extending.md": "",
    "add_op.md": "",
    "write_pass.md": "",
    "pipelines.md": "aten.to.dtype(p_model_weight, torch.bfloat16)",
}


@pytest.mark.parametrize("name", HERE)
def test_the_snippets_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pages: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (page,) = [one for one in pages.pages() if one.name == name]
    path = tmp_path / name
    path.write_text("\n".join(page.snippets), encoding="utf-8")
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert HERE[name] in " ".join(printed.split())
    if name in ("tutorial.md", "find_nan.md", "tune.md"):
        shown = re.findall(r"^```text\n(.*?)^```$", page.text, re.DOTALL | re.MULTILINE)
        parts = [part for block in shown for part in block.split("…\n")]
        assert parts and all(part in printed.replace(name, "attention.py") for part in parts)
    assert name != "tune.md" or f"```yaml\n{(tmp_path / 'tuned.yaml').read_text()}```" in page.text
    for file, text in page.files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    for line in page.commands:
        monkeypatch.setattr(sys, "argv", shlex.split(line, comments=True))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert (stop.value.code or 0) == line.startswith("amp-compiler diff"), capsys.readouterr().err


def test_the_first_script_of_several_processes_runs_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: Any
) -> None:
    (page,) = [one for one in pages.pages() if one.name == "ranks.md"]
    script = page.snippets[0].replace('dtype="bf16"', 'dtype="bf16", backend="eager"')
    begin = dist.init_process_group
    place = f"file://{tmp_path}/store"
    monkeypatch.setattr(dist, "init_process_group", lambda kind: begin(kind, init_method=place, rank=0, world_size=1))
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, page.name, "exec", dont_inherit=True), scope)
    assert scope["loss"].isfinite() and not dist.is_initialized()


def test_every_snippet_is_run_by_a_test(pages: Any) -> None:
    for page in pages.pages():
        if page.snippets and page.name not in HERE:
            name = page.path.name
            assert name in (ROOT / ELSEWHERE[name]).read_text(encoding="utf-8"), name


def test_every_page_is_in_the_navigation_and_of_a_kind(pages: Any) -> None:
    listed = {page.path for page in pages.pages()}
    assert {*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in pages.PAGES)} == listed
    assert {page.kind for page in pages.pages()} == set(pages.KINDS)


def test_no_page_is_long_but_for_reference(pages: Any) -> None:
    assert not {page.name: page.words for page in pages.pages() if page.kind != "Reference" and page.words > 1500}


def test_every_message_of_an_error_says_what_to_do(tools: Callable[[str], Any]) -> None:
    """Two are reasons that `step.execution` tells, and no error."""
    reasons = {"a size or number is another than captured: …", "gathered gradients are used up"}
    messages = tools("error_catalogue").messages()
    assert len(messages) > 550 and {one.what for one in messages if not one.hint} == reasons
    assert not [one for one in messages if one.hint and not re.search(r"\w", one.hint)], "no hint is `…` alone"

    for words in ("matches no known op", "it is no mapping", "there is no such folder", "names no element type"):
        assert any(words in one.what for one in messages), f"a helper makes it: {words}"


# ---- docs/systems.md names tests, the YAML of pages on extensions is read

SYSTEMS = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", SYSTEMS)))
EXTENDING = ROOT / "docs" / "extending.md"
BLOCKS = [
    pytest.param(one, id=f"{page.stem}-{number}")
    for page in PAGES
    if page.name != "migrate.md"  # whose test imports them
    for number, one in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("file", "name"), NAMED, ids="::".join)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_row_names_a_test() -> None:
    rows = [line for line in SYSTEMS.splitlines() if line.startswith("|") and not line.startswith(("| there", "|---"))]
    assert rows
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::test_\w+`", row)] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_yaml_is_read(block: str, tmp_path: Path) -> None:
    if "families:" in block or "kernels:" in block:
        assert (parse_op_table if "families:" in block else parse_table)(block, "table.yaml").ops
        return
    path = tmp_path / "example.yaml"
    path.write_text(block if "version:" in block else f"version: 1\n{block}", encoding="utf-8")
    assert load_rules(path).rules


def test_the_table_lists_every_section() -> None:
    extending = EXTENDING.read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(.*?)\]\((\w+\.md)?(?:#(.*?))?\)", extending, flags=re.MULTILINE)
    for name, page, anchor in listed:
        title = name.capitalize().replace("onnx", "ONNX")
        text = EXTENDING.with_name(page or EXTENDING.name).read_text(encoding="utf-8")
        assert page == "write_pass.md" or (f"\n## {title}\n" in text and anchor == title.lower().replace(" ", "-"))
    here = re.findall(r"^## (.*)$", extending, flags=re.MULTILINE)
    assert [name.capitalize() for name, page, _ in listed if not page] == here


# ---- docs/compatibility.md lists every environment variable that is read, and no other

VARIABLES = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")


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
    table = set(re.findall(r"^\| `([A-Z_]+)` \|", VARIABLES, flags=re.MULTILINE))
    assert {"AMP_LOG", "CXX"} < read
    assert read == table


def test_every_variable_of_ours_is_on_the_page():
    texts = [path.read_text(encoding="utf-8") for path in sources("*.py", "*.sh", "*.yaml", "Makefile", ".ci/run")]
    named = {name for text in texts for name in re.findall(r"\bAMP_[A-Z]+(?:_[A-Z]+)*\b", text)}
    assert {one for one in named if not one.startswith("AMP_TEST")} <= set(re.findall(r"`(\w+)[`=]", VARIABLES))
