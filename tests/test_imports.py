"""Who imports whom: arrows go from a layer to layers below it, and each outside library has its place.

A new module must be given its place in `LAYERS`. Imports inside functions count too; the few that go upwards, so that a
method can offer what a higher module does, are listed in `LAZY`. Imports for type checking alone do not count.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "amp_compiler"
FOLDERS = {PACKAGE: ROOT / "amp_compiler", f"{PACKAGE}.passes": ROOT / "passes", f"{PACKAGE}.rules": ROOT / "rules"}

# From the bottom up. A module may import from lower lines only; a package (`report`) stands for all of its modules,
# which may import each other. `""` is the package itself.
LAYERS = (
    ("errors",),
    ("dtypes", "files", "mincut", "yamltree"),
    ("graph",),
    ("graph_text_parse", "passbase", "policy"),
    ("graph_text", "matching", "optable", "plan", "typing_rules", "fx_tools"),
    ("draft", "rulemodel", "runtime", "report"),
    ("fx_text",),
    ("backends",),
    ("semantics", "rulesource", "state_types", "writes"),
    ("follow", "rulefile", "master_weights"),
    ("follow_cut", "follow_reasons"),
    ("onnx_check",),
    ("passes", "frontends", "rules"),
    ("traced_calls", "traced_state"),
    ("traced_optimizers",),
    ("pipeline", "settings", "optimizers", "signature", "step_state"),
    ("input_form",),
    ("program", "onnx_plan", "step_products", "step_commits"),
    ("step_program", "pieces", "step_split", "step_weights"),
    ("compiled_module", "step_build", "step_report"),
    ("step_readings",),
    ("compile", "training", "onnx_convert"),
    ("onnx_export",),
    ("",),
    ("demo", "model_spec", "cli_convert"),
    ("cli",),
    ("__main__",),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
LAZY = {("graph", "graph_text"), ("plan", "report"), ("rulemodel", "rulesource")}
FORBIDDEN = (  # (importer, imported, why)
    ("frontends", "passes", "a frontend carries a plan out and knows no pass"),
    ("passes", "frontends", "a pass works on the neutral graph or on FX, whoever made it"),
    *(
        (low, rule, "backends, runtime and the running of ONNX models know no rules")
        for low in ("backends", "runtime", "onnx_check")
        for rule in ("policy", "rulefile", "rulemodel", "rulesource", "optable", "matching", "passes", "rules")
    ),
)
TORCH = (
    "fx_tools", "fx_text", "optimizers", "step_state", "step_program", "step_build", "compiled_module", "pieces", "signature",
    "compile", "training", "onnx_export", "program", "settings", "demo", "model_spec", "cli", "frontends*", "backends*",
    "runtime*", "report.autocast_counter", "passes.*", "step_report", "step_split", "step_readings", "input_form",
    "master_weights", "state_types", "step_weights", "traced_calls",
    "traced_state", "traced_optimizers", "writes", "step_products", "step_commits",
)  # fmt: skip
ONNX = ("frontends.onnx*", "onnx_*", "model_spec", "cli")
NEUTRAL_PASSES = ("passes", "passes.classify", "passes.assign_precision", "passes.place_casts")


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(part for part in parts if part != "__init__")
            yield name.removeprefix(PACKAGE).removeprefix("."), path


def imports(path: Path) -> set[str]:
    """Full names of what a file imports, wherever in it the import stands, but for type checking alone."""
    found = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the import of {node.module} in full"
            module = node.module or ""
            # `from package import module` names a module too, where there is one of that name
            found.update(f"{module}.{alias.name}" if module == PACKAGE else module for alias in node.names)
        else:
            pending += ast.iter_child_nodes(node)
    return found


def own(name: str) -> str | None:
    """The layer entry of an imported name of this package; `None` for other libraries."""
    if name.partition(".")[0] != PACKAGE:
        return None
    first = name.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]
    return first if first in RANK or any(first == known.partition(".")[0] for known, _ in ALL) else ""


ALL = list(modules())


@pytest.mark.parametrize(("name", "path"), ALL, ids=[name or PACKAGE for name, _ in ALL])
def test_arrows_go_down(name: str, path: Path) -> None:
    mine = name.partition(".")[0]
    assert mine in RANK, f"give '{mine}' a place in LAYERS of {__file__}"
    for imported in sorted(imports(path)):
        other = own(imported)
        if other is None or other == mine or (mine, other) in LAZY:
            continue
        assert other in RANK, f"give '{other}' a place in LAYERS of {__file__}"
        assert RANK[other] < RANK[mine], f"{name} imports {imported}, which stands no lower"


@pytest.mark.parametrize(("name", "path"), ALL, ids=[name or PACKAGE for name, _ in ALL])
def test_what_must_not_know_each_other_does_not(name: str, path: Path) -> None:
    found = imports(path)
    others = {own(imported) for imported in found}
    for importer, imported, why in FORBIDDEN:
        assert not (name.partition(".")[0] == importer and imported in others), f"{name} imports {imported}: {why}"
    bare = {imported.partition(".")[0] for imported in found} & {"passes", "rules", "tests"}
    assert not bare, f"{name} imports {bare} without the name of the package"


@pytest.mark.parametrize(("name", "path"), ALL, ids=[name or PACKAGE for name, _ in ALL])
def test_torch_and_onnx_have_their_place(name: str, path: Path) -> None:
    libraries = {imported.partition(".")[0] for imported in imports(path)}
    if "torch" in libraries:
        assert name not in NEUTRAL_PASSES and any(fnmatch(name, allowed) for allowed in TORCH), f"{name} imports torch"
    if libraries & {"onnx", "onnx_ir", "onnxruntime", "onnxscript"}:
        assert any(fnmatch(name, allowed) for allowed in ONNX), f"{name} imports onnx"


def test_the_order_of_the_design_holds() -> None:
    chain = ["errors", "dtypes", "graph", "policy", "rulefile", "passes", "pipeline", "compile", "cli"]
    assert [RANK[name] for name in chain] == sorted(RANK[name] for name in chain)
    assert RANK["graph"] < RANK["passbase"] < RANK["passes"]
    assert RANK["compile"] == RANK["training"] == RANK["onnx_convert"]


def test_importing_the_package_imports_no_onnx() -> None:
    """A user without ONNX models must not wait for it, nor need it; what is ONNX is imported when it is first used."""
    code = (
        "import sys, amp_compiler\n"
        "found = {'onnx', 'onnx_ir', 'onnxruntime', 'onnxscript', 'onnxruntime_extensions'} & set(sys.modules)\n"
        "assert not found, found\n"
        "assert {'convert_onnx', 'export_onnx'} <= set(dir(amp_compiler))\n"
        "amp_compiler.convert_onnx\n"
        "assert 'onnx' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
