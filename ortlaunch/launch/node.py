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

from ortlaunch.base.errors import LaunchError, RankError
from ortlaunch.rank import EXIT_SAVED, GRACE_SECONDS, VARIABLES

_NODE = ("JOB_COMPLETION_INDEX", "PET_NODE_RANK", "SKYPILOT_NODE_RANK", "DSTACK_NODE_RANK")
# torchrun's default port.
_PORT = "29500"
# Limit until the other nodes can resolve the first node's name: the cluster may have to add a node.
_NAME_SECONDS = 1800
# Seconds of waiting after which a line is printed.
_QUIET_SECONDS = 30
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def start_ranks_of_this_node_and_wait(argv: Sequence[str] | None = None) -> int:
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
    options = parser.parse_args(argv)
    try:
        shared = variables_shared_by_all_ranks(options.nodes, options.ranks, options.master)
        node = (
            require_node_index_in_environ(options.nodes, os.environ)
            if options.number is None
            else options.number
        )
        _wait_until_host_resolves_or_raise(
            options.master if options.nodes > 1 and node else "", options.name_seconds
        )
        return _wait_for_ranks_and_end_all_on_failure(
            _start_ranks_and_pass_signals_on(options.command, shared, node, options.ranks)
        )
    except (LaunchError, RankError) as error:
        print(f"ortlaunch: {error}", file=sys.stderr)
        return error.exit_status


def require_node_index_in_environ(node_count: int, environ: Mapping[str, str]) -> int:
    """Return the number of this node, from 0.

    Raises:
        RankError: the platform sets no number, contradictory ones, or one beyond `node_count`.
    """
    numbers_by_variable = {name: environ[name] for name in _NODE if name in environ}
    if not numbers_by_variable and node_count == 1:
        return 0
    if len(set(numbers_by_variable.values())) != 1:
        variables_text = (
            " ".join(f"{name}={value}" for name, value in numbers_by_variable.items())
            or f"none of {', '.join(_NODE)} is set"
        )
        advice = (
            "set one of them to 0, 1, ...; a Job of Kubernetes has it with completionMode: Indexed"
        )
        raise RankError(
            f"the number of this node (of {node_count}) is unknown: {variables_text}; {advice}"
        )
    name, value = next(iter(numbers_by_variable.items()))
    if not value.isdecimal() or int(value) >= node_count:
        raise RankError(f"{name}={value} is not one of {node_count} nodes, which count from 0")
    return int(value)


def variables_shared_by_all_ranks(
    node_count: int, ranks_per_node: int, master_host: str
) -> dict[str, str]:
    """Return the variables that all ranks share."""
    sizes = {
        "WORLD_SIZE": str(node_count * ranks_per_node),
        "LOCAL_WORLD_SIZE": str(ranks_per_node),
    }
    port = os.environ.get("PET_MASTER_PORT", _PORT)
    return {**sizes, "MASTER_ADDR": master_host or "127.0.0.1", "MASTER_PORT": port}


def _wait_until_host_resolves_or_raise(host_or_empty: str, limit_seconds: float) -> None:
    began = time.monotonic()
    is_quiet = True
    while host_or_empty:
        try:
            socket.getaddrinfo(host_or_empty, None)
            return
        except OSError as error:
            passed = time.monotonic() - began
            if passed > limit_seconds:
                raise LaunchError(
                    f"the first node's name {host_or_empty} does not resolve after {limit_seconds:g} s: {error}"
                ) from None
            if is_quiet and passed > min(_QUIET_SECONDS, limit_seconds / 2):
                is_quiet = False
                print(
                    f"ortlaunch: waiting for the first node's name {host_or_empty} to resolve, at most "
                    f"{limit_seconds:g} s",
                    flush=True,
                )
            time.sleep(min(1.0, limit_seconds / 4))


def _start_ranks_and_pass_signals_on(
    rank_command: Sequence[str],
    shared_variables: Mapping[str, str],
    node_index: int,
    ranks_per_node: int,
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks and return their processes.

    Each is in a session of its own, so that it gets signals from this process alone, also signals
    that are sent to this process's group.
    """
    # Variables of an outer launcher would contradict those that are set here.
    outer_variables = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    processes: list[subprocess.Popen[bytes]] = []
    # Signals that came before all ranks were started: later ranks must receive them as well.
    early_signals: list[int] = []

    def pass_on(signal_number: int, _frame: object) -> None:
        early_signals.append(signal_number)
        _send_signals(processes, signal_number)

    for name in _SIGNALS:
        signal.signal(name, pass_on)
    for local_rank in range(ranks_per_node):
        rank_variables = {
            "RANK": str(node_index * ranks_per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
        }
        process = subprocess.Popen(
            rank_command,
            env={**outer_variables, **shared_variables, **rank_variables},
            start_new_session=True,
        )
        _send_signals([process], *early_signals)
        processes.append(process)
    return processes


def _wait_for_ranks_and_end_all_on_failure(rank_processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all ranks; once one has failed, end the others.

    Returns:
        The first failing status, else 85 if ranks have saved, else 0.
    """
    running_processes = list(rank_processes)
    statuses = [0]
    deadline = float("inf")
    while running_processes:
        time.sleep(0.05)
        for process in [process for process in running_processes if process.poll() is not None]:
            running_processes.remove(process)
            statuses.append(_shell_exit_status(process.returncode))
            if statuses[-1] not in (0, EXIT_SAVED) and deadline == float("inf"):
                deadline = time.monotonic() + GRACE_SECONDS
                _send_signals(running_processes, signal.SIGTERM)
        if time.monotonic() > deadline:
            _send_signals(running_processes, signal.SIGKILL)
    return next((status for status in statuses if status not in (0, EXIT_SAVED)), max(statuses))


def _shell_exit_status(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _send_signals(processes: list[subprocess.Popen[bytes]], *signal_numbers: int) -> None:
    for process in processes:
        for signal_number in signal_numbers:
            process.send_signal(signal_number)


if __name__ == "__main__":
    sys.exit(start_ranks_of_this_node_and_wait())
