"""What measures on a GPU: its words, what it carries along, its table of tests."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tools" / "on_gpu.sh"
TEXT = SCRIPT.read_text(encoding="utf-8")
WORDS = ("prepare", "first", "second", "step")


def test_it_is_a_script_that_bash_can_read():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    assert SCRIPT.stat().st_mode & 0o100


def test_what_it_runs_exists():
    named = re.findall(r"(?<![\w/.])(?:benchmarks|tests|tools)/[\w./*]*\w", TEXT)
    assert {"tools/gpu_facts.py", "benchmarks/update.py", "benchmarks/train_step.py"} <= set(named)
    assert not [name for name in named if not list(ROOT.glob(name))]


def test_it_runs_every_test_that_needs_a_gpu():
    named = {path for pattern in re.findall(r"(tests/[\w/]*\*[\w.*]*)", TEXT) for path in ROOT.glob(pattern)}
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text(encoding="utf-8")}
    assert named == marked - {Path(__file__)} and len(named) >= 5


def test_no_word_takes_longer_than_nine_minutes():
    limits = {word: [int(limit) for limit in re.findall(r"within (\d+)", body)] for word, body in
              re.findall(r"^(\w+)\(\) \{(.*?)^\}", TEXT, flags=re.MULTILINE | re.DOTALL)}  # fmt: skip
    assert all(0 < sum(limits[word]) <= 525 for word in WORDS[1:])  # and some seconds to install the wheels


def test_what_it_carries_along_has_a_tested_version():
    (listed,) = re.findall(r"^LACKING=\((.*)\)$", TEXT, flags=re.MULTILINE)
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert all(f"\n{name}==" in pinned for name in listed.split())


XML = """<testsuites><testsuite>
<testcase classname="tests.ops.test_kernels_gpu" name="test_bits[adam]" time="1.5">
 <properties><property name="GB/s" value="4100"/></properties></testcase>
<testcase classname="tests.ops.test_kernels_gpu" name="test_norm" time="0.5">
 <failure message="assert 1 == 2&#10;more">...</failure></testcase>
<testcase classname="tests.ops.test_kernels_gpu" name="test_quiet" time="0.25"/>
</testsuite></testsuites>"""


@pytest.fixture
def table(monkeypatch):
    main = runpy.run_path(str(ROOT / "tools" / "test_table.py"))["main"]

    def call(*arguments) -> int:
        monkeypatch.setattr(sys, "argv", ["test_table.py", *map(str, arguments)])
        return main()

    return call


def test_the_table_of_tests_is_short(table, tmp_path, capsys):
    path = tmp_path / "kernels.xml"
    path.write_text(XML, encoding="utf-8")
    assert table(path, "--json", tmp_path / "t.json") == 0
    assert capsys.readouterr().out.splitlines() == [
        "passed      1.5 s  test_kernels_gpu: test_bits[adam]  GB/s 4100",
        "failure     0.5 s  test_kernels_gpu: test_norm  assert 1 == 2",
        "kernels    1 failure, 2 passed, 2 s",
    ]
    assert [one["outcome"] for one in json.loads((tmp_path / "t.json").read_text())["kernels"]] == [
        "passed", "failure", "passed",
    ]  # fmt: skip
