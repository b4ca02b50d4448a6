"""The control side of a run, in order: choices, checks, folder, start, verdict.

It does all that `ortlaunch train` does before and after the ranks run. It never imports torch.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ortlaunch.diagnose.report import with_verdict
from ortlaunch.launch import backend
from ortlaunch.launch.failure import explain_end
from ortlaunch.launch.restarts import Ended, supervise
from ortlaunch.output import ERASE, print_lines, terminal_width
from ortlaunch.resolve.prepare import prepare
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import AUTOMATIC, ResumeOptions
from ortlaunch.run import choices, inside
from ortlaunch.run.elastic import on_fit_hosts
from ortlaunch.run.finished import with_next
from ortlaunch.run.job_file import JobFile
from ortlaunch.run.preparation import (
    check,
    claimed,
    finished,
    mark_of,
    record_finished,
    run_folder,
    unclaimed,
)
from ortlaunch.run_folder.folder import PROGRESS_VARIABLE
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.units import duration


def train(resolved: ResolvedRun, chosen: Path | None, options: ResumeOptions = AUTOMATIC) -> int:
    """Prepare the folder, start the ranks, wait, print the verdict and return the exit status."""
    options = options.checked()
    with RunLock() as lock:
        return _train(resolved, chosen, lock, options)


def _train(
    resolved: ResolvedRun, chosen: Path | None, lock: RunLock, options: ResumeOptions
) -> int:
    started = time.monotonic()
    rank = resolved.world.inside
    claims = chosen is None and (rank is None or rank.world_size == 1)
    proposed = run_folder(chosen, resolved, os.environ)
    run = unclaimed(proposed, chosen) if claims else proposed
    # A run from Python has its folder, and the caller watches the lock.
    if (run.lock.exists() or run.output.exists()) and (rank is None or rank.rank == 0):
        # Before anything is measured: a living run in the folder must end this command at once. A
        # requeued turn waits for the earlier one, which may save a checkpoint meanwhile.
        lock.acquire(run, keep=rank is not None, patience_seconds=inside.patience_seconds())
    mark = mark_of(run, rank) if rank is not None else None
    if rank is not None and mark is not None:
        # Other ranks start with the choices and the plan of rank 0.
        if rank.rank > 0:
            return 0 if finished(resolved, run, options) else inside.follow(mark, run)
        # With the mark of an earlier launch, other ranks would start from that launch's files.
        mark.unlink(missing_ok=True)

    # First the known choices and the checks: a run that cannot start should fail before minutes of
    # measuring.
    resolved, beginning, done = check(resolved, run, options)
    if done:
        record_finished(run)
        print_lines([*beginning.lines, done])
        return 0
    if rank is not None and mark is not None:
        if claims:
            run = claimed(proposed)
            mark = mark_of(run, rank)
        return inside.lead(resolved, mark, run, lock, beginning)
    if choices.engine_is_open(resolved):
        measured = choices.with_measured_engine(resolved)
        # The engine may have requirements of its own.
        resolved, beginning, _ = check(measured, run, options)

    run = claimed(proposed) if claims else run
    lock.acquire(run)
    with JobFile(run, resolved.world.launcher, resolved.traits.saves) as file:
        print_lines(beginning.lines)
        whole = choices.with_found_size(resolved, run)
        # Ranks write the progress line in this width; empty where the output is no terminal.
        os.environ[PROGRESS_VARIABLE] = width = str(terminal_width() or "")
        launcher = backend(whole.world.launcher)

        def start(attempt: int) -> Ended:
            now, lines = on_fit_hosts(whole, run, attempt > 1)
            request = prepare(now, run, lines, beginning if attempt == 1 else None)
            file.starts()
            early = file.keep_signals()
            job = launcher.submit(request)
            job.early = early
            run.restart_request.unlink(missing_ok=True)
            end = explain_end(
                run, launcher.wait(job), job.signal, job.ended_by, job.oom_kills, shown=True
            )
            # Clear the progress line of a rank that was killed.
            print(end=ERASE if width else "", flush=True)
            return Ended(end, job.signal is not None)

        end, stopped = supervise(run, whole.file.recipe.launch.max_restarts, file.failed, start)
        took = f", in {duration(time.monotonic() - started)}"
        failed = bool(end.status)
        last = with_verdict(run, end) if failed else end.text + took
        if end.stopped or not failed:
            last = with_next(last, whole.typed, whole.file.recipe, run, end.stopped)
        file.end(end.status, last, end.failure, stopped or end.stopped)
    print(last, file=sys.stderr if end.status else sys.stdout, flush=True)
    return end.status
