"""Modules are started without the current folder on sys.path, in every Python version."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from ortlaunch.base import module_start

MODULE = "import json, sys\nprint(json.dumps([__name__, sys.argv, sys.path]))\n"


def test_a_module_is_started_as_by_m(tmp_path: Path) -> None:
    """A started module is `__main__`, gets its arguments, and does not import from the folder."""
    installed = tmp_path / "installed"
    installed.mkdir()
    (installed / "mine.py").write_text(MODULE)
    # A module of the current folder that would hide the standard one, and end the process.
    (tmp_path / "json.py").write_text("raise SystemExit(77)")
    command = [*module_start.module_command("mine"), "one", "--two"]
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    result = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    name, argv, path = json.loads(result.stdout)
    assert (name, argv) == ("__main__", [str(installed / "mine.py"), "one", "--two"])
    assert path[0] == str(installed)
    assert {"", ".", str(tmp_path), str(Path(module_start.__file__).parent)} & set(path) == set()


LETTERS = """
import sys
from ortlaunch.base.output import tolerate_lost_output_streams_within_block
print("größer")
sys.stdout.flush()
sys.stdout.reconfigure(errors="strict")
# As the command does, which needs no start.py.
with tolerate_lost_output_streams_within_block():
    print("日本")
    print("ß", file=sys.stderr)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_letters_that_the_terminal_lacks(encoding: str, tmp_path: Path) -> None:
    """A letter that an encoding lacks is written as an escape, and ends neither rank nor command."""
    (tmp_path / "letters.py").write_text(LETTERS, encoding="utf-8")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        module_start.module_command("letters"), env=environ, capture_output=True, check=False
    )
    expected = "größer\n日本\n".encode(encoding, "backslashreplace")
    assert (done.stdout, done.returncode) == (expected, 0), done.stderr
