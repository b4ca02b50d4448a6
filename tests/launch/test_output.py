"""Tests of a run's output: escapes for the terminal, and an output that nobody reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ortlaunch.base.output import ERASE, tolerate_lost_output_streams_within_block
from tests.launch.tiny import ORTLAUNCH
from tests.makers import CUSTOM


def test_what_a_terminal_would_obey_is_printed_as_text(capfd: pytest.CaptureFixture[str]) -> None:
    """Escape characters are printed as text, but for the command's own progress line."""
    # They may come from an exception or a variable, and would be executed by the terminal.
    with tolerate_lost_output_streams_within_block():
        print("a\x1b]0;t\x07\r\nb\r\x9b1m\u202ec\td", end=ERASE)
        print("\x1b[2J", file=sys.stderr)
    assert capfd.readouterr() == (f"a\\x1b]0;t\\x07\r\nb\\r\\x9b1m\\u202ec\td{ERASE}", "\\x1b[2J\n")


# A full disk, and a closed stream.
_LOST = ("> /dev/full", ">&-")


@pytest.mark.parametrize(
    "output", ["| head -1 > /dev/null", *(pytest.param(o, marks=pytest.mark.slow) for o in _LOST)]
)
def test_a_run_goes_on_where_nobody_reads_its_output(output: str, tmp_path: Path) -> None:
    """A run whose output cannot be written completes, and reports that on stderr."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def data():\n    return [{'input': torch.ones(4)}] * 4\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, input):\n        return super().forward(input).mean()\n"
        "def model():\n    return Net(4, 1)\n"
    )
    (tmp_path / "good.yaml").write_text(yaml.safe_dump(CUSTOM))
    # PIPESTATUS has the status of `ortlaunch`, not of `head`.
    typed = f"{ORTLAUNCH} train good.yaml --run-dir run {output}; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(
        ["bash", "-c", typed],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert list((tmp_path / "run" / "export").iterdir())
    # A stream that the user closed needs no report.
    assert ("; the run continues, its logs are in its folder" in ended.stderr) == (output != ">&-")
