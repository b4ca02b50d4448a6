"""Agents on hosts: as many open files as hosts, and no command that outlives its other side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ortlaunch.base import module_start

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
        json.dumps({"agents": agents, "forward": [], "env": {}, "grace_seconds": 1.0}),
        encoding="utf-8",
    )
    command = module_start.module_command("ortlaunch.launch.over_ssh", sys.executable)
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


def test_a_command_that_is_deaf(tmp_path: Path) -> None:
    """A command that does not end on SIGTERM is killed after the grace, once nobody listens."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('began', flush=True); time.sleep(50)"
    work = {
        "argv": [sys.executable, "-c", deaf],
        "cwd": str(tmp_path),
        "env": {},
        "grace_seconds": -5.5,
    }
    command = module_start.module_command("ortlaunch.launch.host_agent", sys.executable)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as agent:
        try:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.write(json.dumps(work) + "\n")
            agent.stdin.flush()
            assert agent.stdout.readline() == "began\n"
            # As when the connection is lost.
            agent.stdin.close()
            began = time.monotonic()
            assert agent.wait(timeout=30) == 143
            assert time.monotonic() - began < 20
        finally:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
