"""Start one command on each host, as if they were one: `start.py ortlaunch.launch.over_ssh AGENTS`.

Each host's agent (launch/host_agent.py) receives its command, the variables' values and signals
through its standard input, so that no secret appears on a command line. When that input ends or is
silent, the agent ends its command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ortlaunch.base import machine, module_start
from ortlaunch.base.process import signals_to_handle
from ortlaunch.launch.host_agent import EXTRA_GRACE_SECONDS, HEARTBEAT_LINE, HEARTBEAT_SECONDS
from ortlaunch.launch.orphans import send_signal
from ortlaunch.launch.ssh import needs_no_ssh, ssh_argv
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import GRACE_SECONDS
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lost_host import LostHost

_CONNECT_SECONDS = 10
_ALIVE_SECONDS = 4
# The status with which ssh reports an error of its own.
_SSH_ERROR_STATUS = 255


class HostAgent:
    """The agent of one host, as this process controls it."""

    def __init__(self, host: str, argv: list[str]) -> None:
        self.host = host
        self.argv = argv
        command = module_start.module_command("ortlaunch.launch.host_agent", argv[0])
        # A session of its own: Ctrl-C must reach the agent through this process alone.
        self._process = subprocess.Popen(
            command
            if needs_no_ssh(host)
            else ssh_argv(host, command, _CONNECT_SECONDS, _ALIVE_SECONDS),
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def send_line_if_agent_reads(self, message: str) -> None:
        """Send the agent a line, if it still reads."""
        assert self._process.stdin is not None
        # An agent that has ended gives the cause by its exit status.
        with contextlib.suppress(OSError):
            self._process.stdin.write(f"{message}\n".encode())
            self._process.stdin.flush()

    def poll(self) -> int | None:
        """Return the agent's exit status as a shell reports it; None while the agent runs."""
        status = self._process.poll()
        return 128 - status if status is not None and status < 0 else status

    def kill(self) -> None:
        """Kill the agent's process here; the end of its input ends the command on the host."""
        send_signal(-self._process.pid, signal.SIGKILL)


def start_host_agents_and_relay_signals() -> int:
    """Start all agents and wait for them; the first that fails ends the others.

    Returns:
        The exit status of the first agent that failed, else 0.
    """
    job_message = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    received_signals: list[int] = []
    for signal_number in signals_to_handle(
        (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    ):
        signal.signal(
            signal_number, lambda signal_number, frame: received_signals.append(signal_number)
        )
    # The ranks' variables: the forwarded ones of this shell, and those of the plan.
    forwarded = {name: os.environ[name] for name in job_message["forward"] if name in os.environ}
    machine.raise_open_file_limit_to_hard_limit()
    try:
        agents = [HostAgent(agent["host"], agent["argv"]) for agent in job_message["agents"]]
    except OSError as error:
        # The agents that were started end with their input, which ends with this process.
        hosts = len(job_message["agents"])
        print(f"ortlaunch: {hosts} hosts take as many open files and processes: {error}; raise "
              "`ulimit -n` and `ulimit -u`", file=sys.stderr, flush=True)  # fmt: skip
        return 1
    shared_fields = {
        "cwd": os.getcwd(),
        "env": {**forwarded, **job_message["env"]},
        "grace_seconds": job_message["grace_seconds"],
    }
    for agent in agents:
        agent.send_line_if_agent_reads(json.dumps({"argv": agent.argv, **shared_fields}))
    return _send_heartbeats_and_signals_and_end_all_on_failure(
        agents, received_signals, RunDir(Path(sys.argv[1]).parent)
    )


def _send_heartbeats_and_signals_and_end_all_on_failure(
    agents: list[HostAgent], received_signals: list[int], run: RunDir
) -> int:
    first_failed_status = 0
    deadline = float("inf")
    last_heartbeat_time = 0.0
    while living := [agent for agent in agents if agent.poll() is None]:
        failed_agent = next(((agent, agent.poll() or 0) for agent in agents if agent.poll()), None)
        if failed_agent and not first_failed_status:
            first_failed_status = failed_agent[1]
            if failed_agent[1] == _SSH_ERROR_STATUS:
                _print_and_record_lost_host(failed_agent[0].host, run)
            # The run cannot continue without the ranks of one host: end those of the others.
            received_signals.append(signal.SIGTERM)
        while received_signals:
            signal_number = received_signals.pop(0)
            for agent in living:
                agent.send_line_if_agent_reads(str(int(signal_number)))
            # SIGUSR1 and SIGUSR2 are notices; only the other signals start the time to end.
            if signal_number not in (signal.SIGUSR1, signal.SIGUSR2):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS + EXTRA_GRACE_SECONDS)
        if time.monotonic() > deadline:
            for agent in living:
                agent.kill()
        if time.monotonic() - last_heartbeat_time > HEARTBEAT_SECONDS:
            last_heartbeat_time = time.monotonic()
            for agent in living:
                agent.send_line_if_agent_reads(HEARTBEAT_LINE)
        time.sleep(0.05)
    return first_failed_status or next((status for agent in agents if (status := agent.poll())), 0)


def _print_and_record_lost_host(host_name: str, run: RunDir) -> None:
    # Ranks that see the record end without a grace: nothing can be saved without the lost host.
    message = (
        f"ssh to {host_name} ended with status {_SSH_ERROR_STATUS}: it could not connect, "
        "or the connection was lost"
    )
    print(f"ortlaunch: {message}", file=sys.stderr, flush=True)
    rank = next(
        (node.first_rank for node in Plan.read(run.plan).nodes if node.host == host_name), 0
    )
    LostHost(rank, host_name, message).write_as_cause_unless_recorded(run)


if __name__ == "__main__":
    sys.exit(start_host_agents_and_relay_signals())
