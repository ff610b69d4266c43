"""The guide for NVCaffe and DeepSpeed: its files give the rules that stand beside them, and its Python runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amp_compiler.policy.importing.files import import_file
from amp_compiler.policy.loader import load_rules

PAGE = Path(__file__).parent.parent / "docs" / "migrate_caffe_deepspeed.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
SOURCES = {"prototxt": ("net.prototxt", "net.yaml"), "json": ("ds_config.json", "ds.yaml")}


def test_files_give_the_rules_beside_them_and_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    target, ran = Path(), 0
    for language, block in BLOCKS:
        if language in SOURCES:
            source, target = map(Path, SOURCES[language])
            source.write_text(block, encoding="utf-8")
        elif language == "yaml":
            assert import_file(source).to_text() == block, "write the page's YAML anew"
            target.write_text(block, encoding="utf-8")
            assert load_rules(str(target))
        elif language == "python":
            assert "\nassert " in block, "an example shows by itself that it works"
            exec(compile(block, PAGE.name, "exec", dont_inherit=True), scope)
            ran += 1
    assert ran == 3 and target.name == "ds.yaml"
