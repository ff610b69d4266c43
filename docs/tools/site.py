"""Hooks of mkdocs: files of the repository that stand outside of docs/ become pages, and their links lead to pages.

A link to a file that is no page (a script, a folder of examples) becomes its text, because the site does not hold it. A
link to a file that does not exist is an error, as is any other warning (`strict` in mkdocs.yml).
"""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from pages import PAGES

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)]*)?\)")
_FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=["']((?:https?:)?//[^"']+)""")
_PICTURE = re.compile(r"""(?P<head><(?:img|source)\b[^>]*?\b(?:src|srcset)=")(?P<target>[^":]+)""")
_EXAMPLE = re.compile(r"^( +)Example:\n", re.MULTILINE)  # mkdocstrings knows it in the plural alone
_VALUE_CLASS = "from amp_compiler.ir.value_class import value_class"  # which what reads the sources knows by this name:
_DATACLASS = "from dataclasses import dataclass as value_class"
_NEEDS = re.compile(r"^(```python) needs=\S+")  # for the tests: Markdown has no such word behind a language
_VERBATIM = re.compile(r"(```.*?```|<!--.*?-->)", re.DOTALL)


def on_startup(**_: Any) -> None:
    """Lay the sources out as they are installed: the reference is made from them, without importing them.

    At the very start, because what makes the reference forgets folders that are not there when it is configured.
    """
    package = ROOT / "build" / "docs" / "amp_compiler"
    shutil.rmtree(package, ignore_errors=True)
    for source, target in ((ROOT / "amp_compiler", package), (ROOT / "passes", package / "passes")):
        for path in source.rglob("*.py"):
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8").replace(_VALUE_CLASS, _DATACLASS)
            copy.write_text(_EXAMPLE.sub(r"\1Examples:\n", text), encoding="utf-8")


def on_config(config: Any) -> Any:
    """Every page says of which version it is."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config["copyright"] = f"amp_compiler {version}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside of docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between pages; an edit link leads to the file itself."""
    here = _origin(page.file.src_uri)
    host = (config["repo_url"] or "").rstrip("/")
    page.edit_url = f"{host}/edit/main/{here}" if host else None
    parts = _VERBATIM.split(markdown)
    return "".join(
        _NEEDS.sub(r"\1", part) if part.startswith(("```", "<!--")) else _rewritten(part, here) for part in parts
    )


def on_post_build(config: Any) -> None:
    """Refuse a site that a browser would have to fetch something for."""
    for page in sorted(Path(config.site_dir).rglob("*.html")):
        match = _FETCHED.search(page.read_text(encoding="utf-8"))
        if match:
            raise PluginError(f"{page.name} fetches {match[1]}: every asset must be part of the site")


def _rewritten(text: str, here: PurePosixPath) -> str:
    """The same text with links between pages, and to the pictures of the site."""
    text = _PICTURE.sub(lambda one: f"{one['head']}{_inside(one['target'], here)}", text)
    return _LINK.sub(lambda one: _link(one, here), text)


def _link(match: re.Match[str], here: PurePosixPath) -> str:
    """One link, rewritten."""
    target = match["target"]
    if not target or "://" in target:
        return match[0]
    inside = _inside(target, here)
    if inside is None:
        return match["text"]
    return f"{match['image']}[{match['text']}]({inside}{match['anchor'] or ''})"


def _inside(target: str, here: PurePosixPath) -> str | None:
    """Where the site has what a link of a file leads to; none where it is no part of the site."""
    path = PurePosixPath(os.path.normpath(here.parent / target))
    if not (ROOT / path).exists():
        raise PluginError(f"{here}: the link to {target} leads nowhere")
    return PAGES.get(str(path)) or (str(path.relative_to("docs")) if path.parts[0] == "docs" else None)


def _origin(page: str) -> PurePosixPath:
    """Where in the repository a page stands."""
    outside = {inside: source for source, inside in PAGES.items()}
    return PurePosixPath(outside.get(page) or f"docs/{page}")
