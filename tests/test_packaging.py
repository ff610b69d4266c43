"""The installed package holds what it needs, and the repository holds nothing of the machine it was made on."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Distributions whose installed version is the platform's choice, not the constraints file's.
PLATFORM_CHOICE = {"onnxruntime-gpu", "onnxruntime"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def constraints(folder: Path = ROOT) -> dict[str, str]:
    lines = (folder / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normalized(name): version for name, version in pairs}


def requirement_names() -> set[str]:
    return {
        normalized(re.split(r"[^A-Za-z0-9_.-]", text, maxsplit=1)[0])
        for text in metadata.requires("amp_compiler") or []
    }


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory) -> set[str]:
    """Names of the files in a wheel that is built from a copy of the sources."""
    setuptools = pytest.importorskip("setuptools", minversion="77")
    assert setuptools
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("amp_compiler", "passes", "rules"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_the_rules_and_what_the_page_is_made_of(wheel_files):
    rules = {f"rules/{name}" for name in ("ops.yaml", "default.yaml", "schema.json", "README.md", "targets/cpu.yaml")}
    known = {f"policy/importing/{name}.yaml" for name in ("caffe", "deepspeed")}
    page = {f"report/page/{path.name}" for path in (ROOT / "amp_compiler" / "report" / "page").iterdir()}
    assert "report/page/page.html" in page
    assert {f"amp_compiler/{name}" for name in rules | known | page} <= wheel_files


def test_the_licence_names_those_of_the_libraries_of_the_page():
    held = json.loads((ROOT / "amp_compiler/report/page/libraries.json").read_text(encoding="utf-8"))["packages"]
    named = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["license"].split(" AND ")
    assert {one["license"] for one in held} | {"Apache-2.0"} == set(named)


def test_the_wheel_holds_every_module_and_nothing_else(wheel_files):
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "amp_compiler").rglob("*.py")}
    for folder in ("passes", "rules"):
        sources |= {f"amp_compiler/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in wheel_files if name.endswith(".py")} == sources
    assert "amp_compiler/py.typed" in wheel_files


def test_the_core_is_light_and_the_extras_hold_the_rest():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: {normalized(re.split(r"[^A-Za-z0-9_.-]", one)[0]) for one in listed}
        for name, listed in project["optional-dependencies"].items()
    }
    core = {normalized(re.split(r"[^A-Za-z0-9_.-]", one)[0]) for one in project["dependencies"]}
    assert core == {"torch", "numpy", "networkx", "pydantic", "ruamel-yaml", "rich", "typer"}
    assert extras["cuda"] - extras["onnx"] == {"triton", "onnxruntime-gpu"} and extras["onnx"] < extras["cuda"]
    assert project["optional-dependencies"]["all"] == ["amp_compiler[onnx,demo,plot,tensorboard]"]


def test_the_metadata_names_the_pythons_that_were_tried():
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    tried = set(re.findall(r"^\| Python (3\.\d+) \|", page, flags=re.MULTILINE))
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    assert {one.rpartition(" :: ")[2] for one in classifiers if ":: Python :: " in one} == tried


def test_entry_points():
    entries = {entry.name: entry for entry in metadata.entry_points(group="console_scripts")}
    assert entries["amp-compiler"].value == "amp_compiler.cli.main:main"
    assert callable(entries["amp-compiler"].load())
    dynamo = {entry.name: entry for entry in metadata.entry_points(group="torch_dynamo_backends")}
    assert callable(dynamo["amp_compiler"].load())


def test_every_requirement_has_a_tested_version():
    missing = requirement_names() - set(constraints()) - PLATFORM_CHOICE - {"amp-compiler"}
    assert not missing
    assert "onnxruntime-gpu" in constraints()


def test_constraints_name_exact_public_versions():
    result = constraints()
    assert result["torch"] == "2.13.0"
    assert not [name for name, version in result.items() if "+" in version]


def test_requirements_are_installed_as_constrained():
    result = Path(sys.prefix)
    if not (result / ".installed").exists():
        pytest.skip("this environment was not made by `make`")
    wrong = {}
    # One for another version of torch has its own list, as `make test-torch211` writes it.
    for name, version in constraints(result if (result / "constraints.txt").exists() else ROOT).items():
        try:
            installed = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        if installed != version:
            wrong[name] = (installed, version)
    assert not wrong


def tracked_files() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.split("\0") if name]


def test_no_machine_paths_in_tracked_files():
    # Spelled in parts, so that this file is not a finding of its own.
    places = "|".join(("wor" + "k", "roo" + "t", "tm" + "p", "op" + "t", "home/(?!me/)"))
    pattern = re.compile(rf"(?<![\w./-])/(?:{places})/?\w")
    result = []
    for path in tracked_files():
        if not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                result.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not result
