"""Start one node's ranks, on a platform that starts nodes.

    python -m ortlaunch.launch.node --nodes 4 --ranks 8 -- COMMAND...

Each node reads its number from its environment (an indexed Job of Kubernetes, Kubeflow Trainer,
SkyPilot, dstack). Its ranks get torchrun's variables. Unlike torchrun, it exits with the first
failing rank's status, of which 85 requests another start, and it gives ranks that are requested to
stop the time to save. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from ortlaunch.errors import LaunchError, RankError
from ortlaunch.rank import EXIT_SAVED, GRACE_SECONDS, VARIABLES

_NODE = ("JOB_COMPLETION_INDEX", "PET_NODE_RANK", "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK")
# torchrun's default port.
_PORT = "29500"
# Limit until the other nodes can resolve the first node's name: the cluster may have to add a node.
_NAME_SECONDS = 1800
# Seconds of waiting after which a line is printed.
_QUIET_SECONDS = 30
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main(words: Sequence[str] | None = None) -> int:
    """Start this node's ranks, wait for them and return the node's exit status."""
    parser = argparse.ArgumentParser(prog="ortlaunch.launch.node")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True, help="on each node")
    parser.add_argument(
        "--number", type=int, help="of this node; without it the platform's variable"
    )
    parser.add_argument(
        "--master", default=os.environ.get("PET_MASTER_ADDR", ""), help="rank 0's host"
    )
    parser.add_argument(
        "--name-seconds",
        type=float,
        default=_NAME_SECONDS,
        help="how long the others wait until rank 0's host name resolves",
    )
    parser.add_argument("command", nargs="+")
    asked = parser.parse_args(words)
    try:
        shared = shared_variables(asked.nodes, asked.ranks, asked.master)
        node = node_index(asked.nodes, os.environ) if asked.number is None else asked.number
        _wait_for_name(asked.master if asked.nodes > 1 and node else "", asked.name_seconds)
        return _wait(_started(asked.command, shared, node, asked.ranks))
    except (LaunchError, RankError) as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        return error.exit_status


def node_index(nodes: int, environ: Mapping[str, str]) -> int:
    """Return the number of this node, from 0.

    Raises:
        RankError: the platform sets no number, contradictory ones, or one beyond `nodes`.
    """
    found = {name: environ[name] for name in _NODE if name in environ}
    if not found and nodes == 1:
        return 0
    if len(set(found.values())) != 1:
        said = (
            " ".join(f"{name}={value}" for name, value in found.items())
            or f"none of {', '.join(_NODE)} is set"
        )
        mend = (
            "set one of them to 0, 1, ...; a Job of Kubernetes has it with completionMode: Indexed"
        )
        raise RankError(f"the number of this node (of {nodes}) is unknown: {said}; {mend}")
    name, value = next(iter(found.items()))
    if not value.isdecimal() or int(value) >= nodes:
        raise RankError(f"{name}={value} is not one of {nodes} nodes, which count from 0")
    return int(value)


def shared_variables(nodes: int, ranks: int, master: str) -> dict[str, str]:
    """Return the variables that all ranks share."""
    sizes = {"WORLD_SIZE": str(nodes * ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    port = os.environ.get("PET_MASTER_PORT", _PORT)
    return {**sizes, "MASTER_ADDR": master or "127.0.0.1", "MASTER_PORT": port}


def _wait_for_name(host: str, seconds: float) -> None:
    began = time.monotonic()
    is_quiet = True
    while host:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            passed = time.monotonic() - began
            if passed > seconds:
                raise LaunchError(
                    f"the first node's name {host} does not resolve after {seconds:g} s: {error}"
                ) from None
            if is_quiet and passed > min(_QUIET_SECONDS, seconds / 2):
                is_quiet = False
                print(
                    f"ortlaunch: waiting for the first node's name {host} to resolve, at most "
                    f"{seconds:g} s",
                    flush=True,
                )
            time.sleep(min(1.0, seconds / 4))


def _started(
    command: Sequence[str], shared: Mapping[str, str], node: int, ranks: int
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks and return their processes.

    Each is in a session of its own, so that it gets signals from this process alone, also signals
    that are sent to this process's group.
    """
    # Variables of an outer launcher would contradict those that are set here.
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    started: list[subprocess.Popen[bytes]] = []
    # Signals that came before all ranks were started: later ranks must receive them as well.
    early: list[int] = []

    def pass_on(received: int, frame: object) -> None:
        early.append(received)
        _send(started, received)

    for name in _SIGNALS:
        signal.signal(name, pass_on)
    for local in range(ranks):
        own = {"RANK": str(node * ranks + local), "LOCAL_RANK": str(local)}
        process = subprocess.Popen(command, env={**clean, **shared, **own}, start_new_session=True)
        _send([process], *early)
        started.append(process)
    return started


def _wait(started: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; once one has failed, end the others.

    Returns:
        The first failing status, else 85 if ranks have saved, else 0.
    """
    left = list(started)
    statuses = [0]
    deadline = float("inf")
    while left:
        time.sleep(0.05)
        for process in [process for process in left if process.poll() is not None]:
            left.remove(process)
            statuses.append(_code(process.returncode))
            if statuses[-1] not in (0, EXIT_SAVED) and deadline == float("inf"):
                deadline = time.monotonic() + GRACE_SECONDS
                _send(left, signal.SIGTERM)
        if time.monotonic() > deadline:
            _send(left, signal.SIGKILL)
    return next((status for status in statuses if status not in (0, EXIT_SAVED)), max(statuses))


def _code(status: int) -> int:
    return 128 - status if status < 0 else status


def _send(processes: list[subprocess.Popen[bytes]], *signals: int) -> None:
    for process in processes:
        for each in signals:
            process.send_signal(each)


if __name__ == "__main__":
    sys.exit(main())
