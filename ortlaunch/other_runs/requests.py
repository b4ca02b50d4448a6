"""Requests to a run from another process: to save and stop, save and continue, or restart."""

from __future__ import annotations

import getpass
import signal
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ortlaunch import recipe
from ortlaunch.errors import InputError, LaunchError
from ortlaunch.launch import JobState
from ortlaunch.launch.failure import End, first_failure
from ortlaunch.launch.stop import write_request
from ortlaunch.launch_plan import Plan
from ortlaunch.other_runs.queued import is_queued
from ortlaunch.other_runs.status import Status, read_status
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.units import counted

_POLL_SECONDS = 0.2
# Exit statuses of a run that completed, saved, or was interrupted by its user.
_GOOD = (0, EXIT_SAVED, 128 + signal.SIGINT)


class StopResult(NamedTuple):
    """The result of a request to stop."""

    text: str
    """A text for a person: what was requested, or how the run ended."""
    exit_status: int
    """0 if the run stopped well or, without waiting, if the request was made; else 1."""

    def __str__(self) -> str:
        return self.text


def stop(run: RunDir, wait: bool = True) -> StopResult:
    """Request a run to save and stop; with `wait`, return after its end.

    Raises:
        InputError: it is no run, has nothing to save, or belongs to another user.
    """
    status = read_status(run)
    if status.state.is_end:
        return StopResult(f"nothing to stop: it has ended\n{status}", 0)
    if status.state is JobState.RUNNING:
        _require_training(run, "stop")
        _write_request(run, status, "stop")
    elif is_queued(status.job):
        saved = (
            f"its last checkpoint is of step {step}"
            if (step := _newest(run))
            else "it has no checkpoint"
        )
        raise InputError(f"{run}: is queued, and {saved}; `ortlaunch cancel` removes it")
    else:
        # Its command measures or prepares, and reads no request.
        _wake(status, run, signal.SIGTERM)
    if not wait:
        return StopResult(f"stop requested: {run}", 0)
    while not (status := read_status(run)).state.is_end:
        if not status.certain and run.stopped.exists():
            return StopResult(f"stopped: {run}", 0)
        if not status.certain and (end := _recorded_end(run, status)):
            return StopResult(end.last, 0 if end.status in _GOOD else 1)
        time.sleep(_POLL_SECONDS)
    return StopResult(str(status), 0 if status.job.exit_status in _GOOD else 1)


def checkpoint(run: RunDir) -> int:
    """Request a run to save after its next step, wait, and return the step of that checkpoint.

    Raises:
        InputError: it does not train now, or belongs to another user.
        LaunchError: it ended, or could not save.
    """
    status = read_status(run)
    if status.state is not JobState.RUNNING:
        raise InputError(f"{run}: {status.state.value}; only a training run can save")
    _require_training(run, "checkpoint")
    before = _newest(run)
    _write_request(run, status, "checkpoint")
    # Rank 0 removes the request once it has saved, or failed to save.
    while run.save_request.exists():
        if read_status(run).state.is_end:
            raise LaunchError(f"{run}: ended before it saved\n{read_status(run)}")
        if not status.certain and (end := _recorded_end(run, status)):
            raise LaunchError(f"{run}: ended before it saved\n{end.last}")
        time.sleep(_POLL_SECONDS)
    after = _newest(run)
    if after == before:
        raise LaunchError(f"{run}: could not save; see {run.log(0, 'out')}")
    return after


def restart(run: RunDir) -> str:
    """Request an elastic run to save and start again on all hosts that are available now.

    Returns:
        A line with the hosts.

    Raises:
        InputError: it does not train now, its hosts are fixed, or it belongs to another user.
        LaunchError: it ended.
    """
    status = read_status(run)
    if status.state is not JobState.RUNNING:
        raise InputError(f"{run}: {status.state.value}; only a training run can be restarted")
    _require_training(run, "restart")
    if recipe.load(run.recipe).recipe.launch.elastic is None:
        raise InputError(
            f"{run}: launch.nodes is not {{min, max}}, so its hosts are fixed; to restart it, "
            "use `ortlaunch stop`, then `ortlaunch train` with this --run-dir"
        )
    by = f"`ortlaunch restart` of {getpass.getuser()} on host {socket.gethostname()}"
    _write(run, run.restart_request, by)
    # No signal: it would end the command, too. Rank 0 reads the request within half a second.
    _write(run, run.stop_request, by)
    while run.restart_request.exists():
        if read_status(run).state.is_end:
            raise LaunchError(f"{run}: ended and was not restarted\n{read_status(run)}")
        time.sleep(_POLL_SECONDS)
    nodes = Plan.read(run.plan).nodes
    hosts = ", ".join(node.host for node in nodes)
    return f"restarted after step {_newest(run)} on {counted(len(nodes), 'host')}: {hosts}"


def _write_request(run: RunDir, status: Status, verb: str) -> None:
    """Write the request, and send a signal to the run's command if it is on this host."""
    # Without the signal, rank 0 reads the request within half a second.
    path = run.stop_request if verb == "stop" else run.save_request
    _write(run, path, f"`ortlaunch {verb}` of {getpass.getuser()} on host {socket.gethostname()}")
    _wake(status, run, signal.SIGUSR1 if verb == "stop" else signal.SIGUSR2)


def _write(run: RunDir, path: Path, by: str) -> None:
    try:
        write_request(path, by)
    except PermissionError:
        raise InputError(
            f"{run}: belongs to another user; only that user or root may send it a request"
        ) from None


def _wake(status: Status, run: RunDir, number: int) -> None:
    if status.job.process.is_here and not is_queued(status.job):
        try:
            status.job.process.send(number)
        except PermissionError:
            raise InputError(
                f"{run}: belongs to another user; only that user or root may send it a request"
            ) from None


def _recorded_end(run: RunDir, status: Status) -> End | None:
    """Return the end of a run whose processes are on another host; None if it has not ended."""
    # No process may be left to write this end into job.json.
    first = first_failure(run)
    if first is not None:
        return End(first["exit_status"], f"{run}: {first['summary']}")
    started = datetime.fromisoformat(status.job.started).timestamp()
    trained = run.summary.exists() and run.summary.stat().st_mtime >= started
    return End(0, f"nothing to stop: it has ended\ndone: {run}") if trained else None


def _require_training(run: RunDir, verb: str) -> None:
    if not run.plan.exists():
        raise InputError(
            f"{run}: its ranks have not started, so there is nothing to save; `ortlaunch "
            "cancel` ends it"
        )
    plan = Plan.read(run.plan)
    if not plan.traits.saves:
        raise InputError(
            f"{run}: runs {plan.task}, which saves nothing; use `ortlaunch cancel`, not `{verb}`"
        )


def _newest(run: RunDir) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    saved = run.complete_checkpoints()
    return saved[-1][0] if saved else 0
