"""`python ortlaunch/start.py ortlaunch.launch.over_ssh AGENTS`: one command on each host, as if they were one command.

Each host's agent (launch/host_agent.py) gets what it runs, the variables' values and signals through its standard
input, so that nothing secret stands on a command line; when that input ends or is silent, it ends what it started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ortlaunch import start
from ortlaunch.launch.host_agent import BEAT, BEAT_SECONDS
from ortlaunch.launch.orphans import send
from ortlaunch.launch.ssh import needs_no_ssh, ssh
from ortlaunch.plan import Plan
from ortlaunch.process import heeded
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lost import Lost

_CONNECT_SECONDS = 10
_ALIVE_SECONDS = 4
_LOST = 255  # what ssh itself ends with
_MORE_SECONDS = 6.0  # than an agent and its launcher have to end


class HostAgent:
    """One host's, as this process sees it."""

    def __init__(self, host: str, argv: list[str]) -> None:
        self.host = host
        self.argv = argv
        command = start.command("ortlaunch.launch.host_agent", argv[0])
        self._process = subprocess.Popen(
            command if needs_no_ssh(host) else ssh(host, command, _CONNECT_SECONDS, _ALIVE_SECONDS),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, line: str) -> None:
        """Send it a line, if it still reads."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it has gone: its status says why

    def poll(self) -> int | None:
        """Its exit status, as a shell would have it, once it has ended."""
        status = self._process.poll()
        return 128 - status if status is not None and status < 0 else status

    def kill(self) -> None:
        """End it now; what it started sees the end of its input."""
        send(-self._process.pid, signal.SIGKILL)


def main() -> int:
    """Start every agent and wait for them; the first that fails ends the others. Returns its status."""
    work = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    asked: list[int] = []
    for number in heeded(
        (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    ):
        signal.signal(number, lambda number, frame: asked.append(number))
    environ = _values(work, os.environ)
    agents = [HostAgent(one["host"], one["argv"]) for one in work["agents"]]
    for agent in agents:
        agent.tell(json.dumps({"argv": agent.argv, "cwd": os.getcwd(), "env": environ}))
    return _wait(agents, asked, RunDir(Path(sys.argv[1]).parent))


def _values(work: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the ranks: those with a value of the plan's, and the named ones of this shell."""
    return {**{name: environ[name] for name in work["forward"] if name in environ}, **work["env"]}


def _wait(agents: list[HostAgent], asked: list[int], run: RunDir) -> int:
    first = 0
    deadline = float("inf")
    beat = 0.0
    while living := [agent for agent in agents if agent.poll() is None]:
        ended = next(((agent, agent.poll() or 0) for agent in agents if agent.poll()), None)
        if ended and not first:
            first = ended[1]
            if ended[1] == _LOST:
                _is_lost(ended[0].host, run)
            asked.append(signal.SIGTERM)
        while asked:
            number = asked.pop(0)
            for agent in living:
                agent.tell(str(int(number)))
            if number not in (signal.SIGUSR1, signal.SIGUSR2):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS + _MORE_SECONDS)
        if time.monotonic() > deadline:
            for agent in living:
                agent.kill()
        if time.monotonic() - beat > BEAT_SECONDS:
            beat = time.monotonic()
            for agent in living:
                agent.tell(BEAT)
        time.sleep(0.05)
    return first or next((status for agent in agents if (status := agent.poll())), 0)


def _is_lost(host: str, run: RunDir) -> None:
    """Say it, and leave it as the cause: ranks that see it end without a grace, for nothing can be saved without it."""
    words = (
        f"ssh to {host} ended with status {_LOST}: it could not connect, or the connection was lost"
    )
    print(f"ortlaunch: {words}", file=sys.stderr, flush=True)
    rank = next((node.first_rank for node in Plan.read(run.plan).nodes if node.host == host), 0)
    Lost(rank, host, words).write(run)


if __name__ == "__main__":
    sys.exit(main())
