"""Send requests to a run of another process: stop, save a checkpoint, or restart.

A request is a file in the run folder, which rank 0 reads. For a stop and for a checkpoint, a signal
to the run's command makes the ranks read it at once.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ortlaunch import recipe
from ortlaunch.base.errors import InputError, LaunchError
from ortlaunch.base.process import user_name_or_number
from ortlaunch.base.units import count_with_noun
from ortlaunch.launch import JobState
from ortlaunch.launch.stop import write_stop_request
from ortlaunch.launch_plan import Plan
from ortlaunch.rank import EXIT_SAVED
from ortlaunch.run_folder.error_record import first_error_record
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.verdict import Verdict
from ortlaunch.started_runs.queued import is_queued
from ortlaunch.started_runs.status import Status, read_status

_POLL_SECONDS = 0.2
# Exit statuses of a run that completed, saved, or was interrupted by its user.
_GOOD_STATUSES = (0, EXIT_SAVED, 128 + signal.SIGINT)


class StopResult(NamedTuple):
    """The result of a request to stop."""

    text: str
    """The request, or how the run ended, as text for the terminal."""
    exit_status: int
    """0 if the run completed or saved or, without waiting, if the request was sent; else 1."""

    def __str__(self) -> str:
        return self.text


def request_stop_and_wait_if_asked(
    run: RunDir, waits_for_end: bool = True, sender: str | None = None
) -> StopResult:
    """Request a run to save and stop; with `waits_for_end`, return after its end.

    Args:
        sender: the sender, as the run's verdict names it; None: `ortlaunch stop` of this user.

    Raises:
        InputError: the folder is not a run folder, or the run is queued, saves no checkpoints, or
            belongs to another user.
    """
    status = read_status(run)
    if status.state.is_end:
        return StopResult(f"nothing to stop: it has ended\n{status}", 0)
    if status.state is JobState.RUNNING:
        _refuse_run_that_saves_nothing(run, "stop")
        _write_request_and_signal_command_on_this_host(run, status, "stop", sender)
    elif is_queued(status.job):
        checkpoint_text = (
            f"its last checkpoint is of step {step}"
            if (step := run.newest_checkpoint_step_or_zero())
            else "it has no checkpoint"
        )
        raise InputError(f"{run}: is queued, and {checkpoint_text}; `ortlaunch cancel` removes it")
    else:
        # The run is being prepared: no rank reads requests yet, so its command is ended.
        _signal_command_if_on_this_host(status, run, signal.SIGTERM)
    if not waits_for_end:
        return StopResult(f"stop requested: {run}", 0)
    while not (status := read_status(run)).state.is_end:
        if not status.certain and run.stopped.exists():
            return StopResult(f"stopped: {run}", 0)
        if not status.certain and (verdict := _recorded_end_or_none(run, status)):
            return StopResult(verdict.message, 0 if verdict.exit_status in _GOOD_STATUSES else 1)
        time.sleep(_POLL_SECONDS)
    return StopResult(str(status), 0 if status.job.exit_status in _GOOD_STATUSES else 1)


def request_checkpoint_and_wait(run: RunDir) -> int:
    """Request a run to save after its next step, wait, and return the step of that checkpoint.

    Raises:
        InputError: the run is not training, or belongs to another user.
        LaunchError: the run ended, or could not save.
    """
    status = read_status(run)
    if status.state is not JobState.RUNNING:
        raise InputError(f"{run}: {status.state.value}; only a training run can save")
    _refuse_run_that_saves_nothing(run, "checkpoint")
    step_before = run.newest_checkpoint_step_or_zero()
    _write_request_and_signal_command_on_this_host(run, status, "checkpoint")
    # Rank 0 removes the request once it has saved, or failed to save.
    while run.save_request.exists():
        if read_status(run).state.is_end:
            raise LaunchError(f"{run}: ended before it saved\n{read_status(run)}")
        if not status.certain and (verdict := _recorded_end_or_none(run, status)):
            raise LaunchError(f"{run}: ended before it saved\n{verdict.message}")
        time.sleep(_POLL_SECONDS)
    step_after = run.newest_checkpoint_step_or_zero()
    if step_after == step_before:
        raise LaunchError(f"{run}: could not save; see {run.rank_log_path(0, 'out')}")
    return step_after


def request_restart_and_wait(run: RunDir) -> str:
    """Request an elastic run to save and start again on all hosts that are available now.

    Returns:
        A line with the hosts.

    Raises:
        InputError: the run is not training, is not elastic, or belongs to another user.
        LaunchError: the run ended.
    """
    status = read_status(run)
    if status.state is not JobState.RUNNING:
        raise InputError(f"{run}: {status.state.value}; only a training run can be restarted")
    _refuse_run_that_saves_nothing(run, "restart")
    if recipe.load_recipe(run.recipe).recipe.launch.elastic is None:
        raise InputError(
            f"{run}: launch.nodes is not {{min, max}}, so its hosts are fixed; to restart it, "
            "use `ortlaunch stop`, then `ortlaunch train` with this --run-dir"
        )
    sender = f"`ortlaunch restart` of {user_name_or_number()} on host {socket.gethostname()}"
    _write_request_file_or_refuse(run, run.restart_request, sender)
    # Without a signal, which would end the command, too. Rank 0 reads the file every half second.
    _write_request_file_or_refuse(run, run.stop_request, sender)
    while run.restart_request.exists():
        if read_status(run).state.is_end:
            raise LaunchError(f"{run}: ended and was not restarted\n{read_status(run)}")
        time.sleep(_POLL_SECONDS)
    nodes = Plan.read(run.plan).nodes
    host_names = ", ".join(node.host for node in nodes)
    return (
        f"restarted after step {run.newest_checkpoint_step_or_zero()} on "
        f"{count_with_noun(len(nodes), 'host')}: {host_names}"
    )


def _write_request_and_signal_command_on_this_host(
    run: RunDir, run_status: Status, command_verb: str, sender: str | None = None
) -> None:
    # The signal saves up to half a second, the interval in which rank 0 reads requests.
    path = run.stop_request if command_verb == "stop" else run.save_request
    sender_text = (
        f"`ortlaunch {command_verb}` of {user_name_or_number()} on host {socket.gethostname()}"
    )
    _write_request_file_or_refuse(run, path, sender or sender_text)
    _signal_command_if_on_this_host(
        run_status, run, signal.SIGUSR1 if command_verb == "stop" else signal.SIGUSR2
    )


@contextlib.contextmanager
def explain_refused_permission(run: RunDir) -> Iterator[None]:
    """Raise InputError if the block may not control a run, because it is another user's."""
    try:
        yield
    except PermissionError:
        raise InputError(
            f"{run}: belongs to another user; only that user or root may stop, save or cancel it"
        ) from None


def _write_request_file_or_refuse(run: RunDir, request_path: Path, sender: str) -> None:
    with explain_refused_permission(run):
        write_stop_request(request_path, sender)


def _signal_command_if_on_this_host(run_status: Status, run: RunDir, signal_number: int) -> None:
    if run_status.job.process.is_here and not is_queued(run_status.job):
        with explain_refused_permission(run):
            run_status.job.process.send_signal_if_alive(signal_number)


def _recorded_end_or_none(run: RunDir, run_status: Status) -> Verdict | None:
    """Return the end of a run whose command is on another host; None if it has not ended."""
    # The ranks' own records are read: if the command was killed, job.json never gets the end.
    first_record = first_error_record(run)
    if first_record is not None:
        return Verdict(first_record.exit_status, f"{run}: {first_record.summary}")
    return (
        Verdict(0, f"nothing to stop: it has ended\ndone: {run}")
        if run_status.job.has_completed_training(run)
        else None
    )


def _refuse_run_that_saves_nothing(run: RunDir, command_verb: str) -> None:
    if not run.plan.exists():
        raise InputError(
            f"{run}: its ranks have not started, so there is nothing to save; `ortlaunch "
            "cancel` ends it"
        )
    plan = Plan.read(run.plan)
    if not plan.traits.saves:
        raise InputError(
            f"{run}: runs {plan.task}, which saves nothing; use `ortlaunch cancel`, not `{command_verb}`"
        )
