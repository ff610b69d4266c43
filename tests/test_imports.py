"""Who imports whom: the rooms of the house, and where each outside library has its place.

Imports inside functions count too. Imports for type checking alone do not.
"""

import ast
import functools
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import networkx

ROOT = Path(__file__).parent.parent
PACKAGE = "amp_compiler"
FOLDERS = {PACKAGE: ROOT / "amp_compiler", f"{PACKAGE}.passes": ROOT / "passes", f"{PACKAGE}.rules": ROOT / "rules"}

# The whole table: a room, and the rooms that it may import. `""` is the package itself.
ROOMS = {
    "errors": "",
    "ir": "errors",
    "report": "errors ir",
    "policy": "errors ir",
    "planner": "errors ir policy",
    "ops": "errors ir",
    "fx": "errors ir ops",
    "passes": "errors ir policy planner ops fx",
    "backends": "errors ir ops fx passes",
    "onnx": "errors ir policy planner ops fx passes",
    "forward": "errors ir policy planner ops fx passes backends onnx",
    "ranks": "errors policy ops fx passes forward",
    "training": "errors ir policy planner ops fx passes backends onnx forward ranks",
    "diagnose": "errors ir policy planner ops fx passes backends onnx forward training",
    "": "errors ir report policy planner ops fx passes backends onnx forward training diagnose",
    "cli": "errors ir report policy planner ops fx passes backends onnx forward training diagnose",
    "integrations": "errors ir report policy planner ops fx passes backends onnx forward training diagnose",
    "__main__": "cli",
}
NO_TORCH = (
    "errors",
    "ir*",
    "report*",
    "policy*",
    "planner*",
    "passes",
    "passes.base",
    "passes.pipeline",
    "passes.plan*",
    "passes.onnx_plan*",
)
ONNX = ("onnx*", "cli*")
PRIVATE = "fx.torch_private"
# Named as if private, and documented: what every ATen node's target is, and what a graph holds in `meta["val"]`.
PUBLIC = re.compile(
    r"torch\.(_ops|_foreach_\w+|_logging|_assert\w*|_dynamo\.exc|_subclasses\.fake_tensor)\b|torch\.utils\._pytree"
)


def modules() -> Iterator[tuple[str, Path]]:
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            name = ".".join(part for part in parts if part != "__init__")
            yield name.removeprefix(PACKAGE).removeprefix("."), path


ALL = list(modules())
NAMES = {name for name, _ in ALL}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Full names of what a file imports, wherever in it the import stands, but for type checking alone."""
    result = set()
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += node.orelse
        elif isinstance(node, ast.Import):
            result.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write the import of {node.module} in full"
            module = node.module or ""
            # `from package import module` names a module too, where there is one of that name
            inner = {f"{module}.{alias.name}" for alias in node.names}
            result |= {one for one in inner if one.removeprefix(f"{PACKAGE}.") in NAMES} or {module}
        else:
            pending += ast.iter_child_nodes(node)
    return frozenset(result)


def own(name: str) -> str | None:
    """The module of this package that an imported name is; `None` for other libraries."""
    return name.removeprefix(PACKAGE).removeprefix(".") if name.partition(".")[0] == PACKAGE else None


def room(module: str) -> str:
    return module.partition(".")[0]


def test_a_module_imports_what_its_room_may() -> None:
    wrong = []
    for name, path in ALL:
        result = imports(path)
        for other in sorted(one for imported in result if (one := own(imported)) is not None):
            known = (room(name), other) == ("cli", "") or room(other) in (room(name), "rules")
            if room(name) != "rules" and not known and room(other) not in ROOMS[room(name)].split():
                wrong.append(f"{name} imports {other}")
        bare = {imported.partition(".")[0] for imported in result} & {"passes", "rules", "tests"}
        wrong += [f"{name} imports {one} without the name of the package" for one in sorted(bare)]
    assert not wrong


def test_torch_and_onnx_have_their_place() -> None:
    wrong = []
    for name, path in ALL:
        libraries = {imported.partition(".")[0] for imported in imports(path)}
        if "torch" in libraries and any(fnmatch(name, rule) for rule in NO_TORCH):
            wrong.append(f"{name} imports torch")
        onnx = libraries & {"onnx", "onnx_ir", "onnxruntime", "onnxscript"}
        if onnx and not any(fnmatch(name, rule) for rule in ONNX):
            wrong.append(f"{name} imports {min(onnx)}")
    assert not wrong


def test_private_torch_is_touched_in_one_place() -> None:
    wrong = []
    for name, path in ALL:
        chains = {chain for node in ast.walk(parsed(path)) if (chain := chain_of(node)).startswith("torch.")}
        private = {one for one in chains | imports(path) if re.match(r"torch(\.\w+)*\._[a-z]", one)}
        private = {one for one in private if not PUBLIC.match(one) and not one.startswith("torch.ops.")}
        if private and not name.startswith(PRIVATE):
            wrong.append(f"{name} touches {sorted(private)}: that belongs into fx/torch_private")
    assert not wrong


def chain_of(node: ast.AST) -> str:
    """`torch.nn.Module` for the attribute of an attribute of a name; empty for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def test_no_circle_of_imports() -> None:
    """Not even within a room: every module can be read before those that import it."""
    graph: networkx.DiGraph = networkx.DiGraph()
    for name, path in ALL:
        others = {one for imported in imports(path) if (one := own(imported)) is not None}
        graph.add_edges_from((name, other) for other in others if other in NAMES and other != name)
    circles = [sorted(part) for part in networkx.strongly_connected_components(graph) if len(part) > 1]
    assert not circles


def test_what_plans_does_not_ask_for_what_kind_of_graph_it_plans() -> None:
    """How a graph is run stands in `PrecisionGraph.execution`, by what it says; no device is compared with a name."""
    for name, path in ALL:
        if room(name) not in ("planner", "policy") and not name.startswith(("passes.plan", "passes.onnx_plan")):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                named = any(isinstance(side, ast.Constant) and side.value in ("onnx", "cpu", "cuda") for side in sides)
                assert not (named and "device" in ast.unparse(node)), f"{name}: {ast.unparse(node)}"
            elif isinstance(node, ast.Attribute):
                requested = node.attr == "folds" or ast.unparse(node).endswith("graph.is_file")
                assert not requested, f"{name}: {ast.unparse(node)}"
