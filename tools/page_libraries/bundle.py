"""Makes the libraries of the page of a plan, `amp_compiler/report/page/libraries.min.js`, and `libraries.json` of them.

npm fetches the versions of `package-lock.json` and refuses what has another hash than stands there; esbuild bundles the
parts that the page uses. Node 20 or newer and a package registry are needed, for this alone: what is made is part of
the repository.

    python tools/page_libraries/bundle.py           # make both files
    python tools/page_libraries/bundle.py --check   # make them elsewhere, and fail where they differ
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "amp_compiler" / "report" / "page"
BUNDLE, ABOUT = "libraries.min.js", "libraries.json"
ESBUILD = (
    "--bundle", "--minify", "--format=iife", "--global-name=Libraries", "--target=es2020", "--legal-comments=none",
    "--charset=utf8", "--log-level=warning",
)  # fmt: skip


def make(folder: Path) -> None:
    """Write both files into a folder."""
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        for name in ("package.json", "package-lock.json", "entry.mjs"):
            shutil.copy(HERE / name, work / name)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=work, check=True)
        out, meta = work / BUNDLE, work / "meta.json"
        command = ["npx", "esbuild", "entry.mjs", *ESBUILD, f"--outfile={out}", f"--metafile={meta}"]
        subprocess.run(command, cwd=work, check=True)
        packages = bundled(work, json.loads(meta.read_text())["inputs"])
        text = notice(work, packages) + out.read_text(encoding="utf-8")
    about = {
        "made": f"esbuild {version('esbuild')}, by tools/page_libraries/bundle.py",
        "sha256": hashlib.sha256(text.encode("utf-8")).hexdigest(),
        "packages": packages,
    }
    (folder / BUNDLE).write_text(text, encoding="utf-8")
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def bundled(work: Path, inputs: dict[str, object]) -> list[dict[str, str]]:
    """Name, version, licence and hash of every package of which something is in the bundle."""
    names = sorted({package_of(path) for path in inputs} - {""})
    packages = []
    for name in names:
        package = json.loads((work / "node_modules" / name / "package.json").read_text(encoding="utf-8"))
        facts = {"name": name, "version": package["version"], "license": package["license"]}
        packages.append({**facts, "integrity": locked(name)["integrity"]})
    return packages


def package_of(path: str) -> str:
    """The package that a file in `node_modules` belongs to."""
    _, inside, rest = path.rpartition("node_modules/")
    parts = rest.split("/")
    return "/".join(parts[: 2 if rest.startswith("@") else 1]) if inside else ""


def locked(name: str) -> dict[str, str]:
    """What the lock file says of a package."""
    lock = json.loads((HERE / "package-lock.json").read_text(encoding="utf-8"))
    package: dict[str, str] = lock["packages"][f"node_modules/{name}"]
    return package


def version(name: str) -> str:
    """The version that is locked."""
    return locked(name)["version"]


def notice(work: Path, packages: list[dict[str, str]]) -> str:
    """A comment with the licences, each once: above it whose it is, for packages that differ in that alone."""
    texts: dict[str, dict[str, list[str]]] = {}
    for package in packages:
        (file,) = (work / "node_modules" / package["name"]).glob("LICENSE*")
        owners, _, text = file.read_text(encoding="utf-8").strip().replace("*/", "* /").partition("\n\n")
        names = texts.setdefault(text, {}).setdefault(owners, [])
        names.append(f"{package['name']} {package['version']}")
    heads = {
        text: "\n\n".join(f"{', '.join(names)}\n\n{owners}" for owners, names in held.items())
        for text, held in texts.items()
    }
    return "/*\n" + "\n\n".join(f"{head}\n\n{text}" for text, head in heads.items()) + "\n*/\n"


def main() -> int:
    """Make the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with what is in the repository")
    if not parser.parse_args().check:
        make(PAGE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        same = all((Path(folder) / name).read_bytes() == (PAGE / name).read_bytes() for name in (BUNDLE, ABOUT))
    print("as in the repository" if same else "other than in the repository")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
