"""The YAML of docs/extending.md, add_op.md and write_pass.md is read, and the table lists what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.op_table import parse_op_table

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
PAGES = (PAGE, *(PAGE.with_name(name) for name in ("add_op.md", "write_pass.md")))
BLOCKS = [one for page in PAGES for one in re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)]


@pytest.mark.parametrize("block", BLOCKS)
def test_yaml_is_read(block: str, tmp_path: Path) -> None:
    if "families:" in block:
        assert parse_op_table(block, "ops.yaml").ops
        return
    path = tmp_path / "example.yaml"
    path.write_text(block, encoding="utf-8")
    assert all(rule.why for rule in load_rules(path).rules)


def test_the_table_lists_every_section() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\((\w+\.md)?(?:#(.*?))?\)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name, page, anchor in listed:
        title = name.capitalize().replace("onnx", "ONNX")
        text = PAGE.with_name(page or PAGE.name).read_text(encoding="utf-8")
        assert page == "write_pass.md" or (f"\n## {title}\n" in text and anchor == title.lower().replace(" ", "-"))
    here = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [name.capitalize() for name, page, _ in listed if not page] == here
