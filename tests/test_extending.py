"""The examples of docs/extending.md, add_op.md, write_pass.md and pipelines.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.op_table import parse_op_table

PAGE = Path(__file__).parent.parent / "docs" / "extending.md"
PAGES = (PAGE, *(PAGE.with_name(name) for name in ("add_op.md", "write_pass.md")))
SECTIONS = {
    title: text
    for page in PAGES
    for title, text in re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page.read_text(encoding="utf-8"), flags=re.M | re.S)
}


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (title, block)
        for title, text in SECTIONS.items()
        for block in re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)
    ]


@pytest.mark.parametrize(("title", "block"), blocks("python"), ids=lambda value: value if "\n" not in value else "")
def test_an_example_runs(title: str, block: str) -> None:
    assert "\nassert " in block, "an example shows by itself that it works"
    exec(compile(block, f"{PAGE.name}: {title}", "exec", dont_inherit=True), {"__name__": "__main__"})


@pytest.mark.parametrize(("title", "block"), blocks("yaml"), ids=lambda value: value if "\n" not in value else "")
def test_yaml_is_read(title: str, block: str, tmp_path: Path) -> None:
    if "families:" in block:
        assert parse_op_table(block, "ops.yaml").ops
        return
    path = tmp_path / "example.yaml"
    path.write_text(block, encoding="utf-8")
    assert all(rule.why for rule in load_rules(path).rules)


def test_the_page_of_pipelines_runs(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, object] = {"__name__": "__main__"}
    text = PAGE.with_name("pipelines.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "pipelines.md", "exec", dont_inherit=True), scope)
    assert "aten.to.dtype(p_model_weight, torch.bfloat16)" in capsys.readouterr().out


def test_the_table_lists_every_section() -> None:
    listed = re.findall(r"^\| \[(.*?)\]\((\w+\.md)?(?:#(.*?))?\)", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for name, page, anchor in listed:
        title = name.capitalize().replace("onnx", "ONNX")
        text = PAGE.with_name(page or PAGE.name).read_text(encoding="utf-8")
        assert page == "write_pass.md" or (f"\n## {title}\n" in text and anchor == title.lower().replace(" ", "-"))
    here = re.findall(r"^## (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert [name.capitalize() for name, page, _ in listed if not page] == here
