"""tools/plain_words.py, which `make check` runs: each limit is crossed by one planted line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "plain_words.py"
PLAIN = '''"""Count the ranks of a run, and return them by host."""

# Hosts without a rank are left out, for the launcher refuses them.
HOSTS = 2


def ranks() -> list[int]:
    """Return the ranks of this host."""
    found = []
    left = 0
    left, found = found, left
    return found
'''


@pytest.mark.parametrize(
    ("planted", "rate"),
    [
        ("", ""),
        ("# The rank is told.", "tell/say/ask"),
        ("# This is what the rank is.", "what per 1,000"),
        (f"LONG = {'9' * 100}", "over 100 columns"),
        ("one, two = 1, 2", "paired assignments"),
        ('"""What a rank is."""', "docstrings that begin"),
    ],
)
def test_a_planted_line_crosses_a_limit(planted: str, rate: str, tmp_path: Path) -> None:
    """The exit status is 1, and the rate is marked with its limit."""
    (tmp_path / "module.py").write_text(PLAIN + planted + "\n")
    done = subprocess.run(
        [sys.executable, str(TOOL), str(tmp_path)], capture_output=True, text=True, check=False
    )
    marked = [line for line in done.stdout.splitlines() if "(limit" in line]
    assert done.returncode == bool(planted), done.stdout + done.stderr
    assert any(rate in line for line in marked) is bool(planted), done.stdout
