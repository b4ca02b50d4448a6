"""A start on many hosts needs as many open files: `over_ssh` raises the limit, or names it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ortlaunch import start

pytestmark = pytest.mark.timeout(60)
# Each host takes one open file of the command: its agent's standard input.
_HOSTS = 14
# Three are the standard streams, so 14 agents do not fit.
_FILES = 16


@pytest.mark.parametrize(("limit", "starts"), [("-S", True), ("-SH", False)])
def test_a_limit_of_open_files(limit: str, starts: bool, tmp_path: Path) -> None:
    """A soft limit is raised; a hard one is named, without a traceback of any process."""
    # This host stands for all of them: an agent on it needs no ssh.
    agents = [{"host": "localhost", "argv": [sys.executable, "-c", "print('began')"]}] * _HOSTS
    (tmp_path / "agents.json").write_text(
        json.dumps({"agents": agents, "forward": [], "env": {}}), encoding="utf-8"
    )
    command = start.command("ortlaunch.launch.over_ssh", sys.executable)
    words = " ".join([*command, f"{tmp_path}/agents.json"])
    done = subprocess.run(
        ["bash", "-c", f"ulimit {limit} -n {_FILES}; exec {words}"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stdout.count("began")) == ((0, _HOSTS) if starts else (1, 0))
    assert ("14 hosts take as many open files" in done.stderr) != starts
