"""`make scenarios`, as far as it goes without an installation."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "tools" / "scenarios.py"


def test_a_python_that_is_not_there_is_named_and_counts_as_failed():
    done = subprocess.run([sys.executable, SCRIPT, "python0.1"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and not done.stderr
    assert done.stdout.startswith("not tried, as this machine has none: python0.1 (on Debian:")
