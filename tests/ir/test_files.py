"""Files are written whole or not at all."""

import pytest

from amp_compiler.errors import AmpError
from amp_compiler.ir.files import write_atomically


def test_content_replaces_what_was_there(tmp_path):
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    write_atomically(str(path), "new")
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("name", ["missing/plan.json", "folder"])
def test_a_place_that_cannot_be_written_is_named_and_nothing_is_left_behind(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(AmpError, match=name):
        write_atomically(tmp_path / name, "text")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_failure_keeps_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, 3)
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1
