"""The control side of a run, top to bottom: choices -> check -> folder -> start -> verdict.

Everything that `ortlaunch train` does before and after the ranks live. Never imports torch.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ortlaunch.diagnose.report import with_verdict
from ortlaunch.launch import backend
from ortlaunch.launch.failure import explain_end
from ortlaunch.output import ERASE, print_lines, terminal_width
from ortlaunch.resolve import resume
from ortlaunch.resolve.prepare import claimed, run_folder
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import AUTOMATIC, ResumeOptions
from ortlaunch.run import choices, inside
from ortlaunch.run.elastic import on_fit_hosts
from ortlaunch.run.job_file import JobFile
from ortlaunch.run.preparation import check, finished, leave_finished, prepare
from ortlaunch.run.restarts import Ended, supervise
from ortlaunch.run_folder.folder import PROGRESS_VARIABLE, RunDir
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.runs.finished import with_next
from ortlaunch.units import duration


def train(resolved: ResolvedRun, chosen: Path | None, options: ResumeOptions = AUTOMATIC) -> int:
    """Prepare the folder, start the ranks, wait, say how it ended; returns the exit status."""
    options = options.checked()
    run, rank = run_folder(chosen, resolved, os.environ), resolved.world.inside
    with RunLock() as lock:
        if rank is not None:
            return inside.train(resolved, rank, run, lock, options)
        if run.recipe.exists():
            lock.take(run)  # before anything is measured
        return _train(resolved, run, chosen is None, lock, options)


def _train(resolved: ResolvedRun, run: RunDir, is_new: bool, lock: RunLock, options: ResumeOptions) -> int:
    started = time.monotonic()

    # Choices that take no run folder; what would keep the run from starting is found before minutes of measuring.
    resolved = choices.known(resolved, run)
    beginning = check(resolved, run, options)
    if done := finished(resolved, run, options):
        return leave_finished(resolved, run, beginning.lines, done)
    if choices.engine_is_open(resolved):
        resolved = choices.with_measured_engine(resolved)
        beginning = check(resolved, run, options)
    print_lines(beginning.lines)

    run = claimed(run) if is_new else run
    lock.take(run)
    with JobFile(run, resolved.world.launcher, resolved.traits.saves) as file:
        whole = choices.with_found_size(resolved, run)
        resume.apply(run, beginning, options)
        os.environ[PROGRESS_VARIABLE] = width = str(terminal_width() or "")
        launcher = backend(whole.world.launcher)

        def start(attempt: int) -> Ended:
            now, lines = on_fit_hosts(whole, run, attempt > 1)
            print_lines(lines)
            request = prepare(now, run, attempt > 1)
            file.starts()
            early = file.keep_signals()
            job = launcher.submit(request)
            job.early = early
            run.restart_request.unlink(missing_ok=True)
            end = explain_end(run, launcher.wait(job), job.signal, job.ended_by, job.oom_kills, shown=True)
            print(end=ERASE if width else "", flush=True)  # the live line of a rank that was killed
            return Ended(end, job.signal is not None)

        end, stopped = supervise(run, whole.file.recipe.launch.max_restarts, file, start)
        took = f", in {duration(time.monotonic() - started)}"
        failed = bool(end.status)
        last = with_verdict(run, end.status, end.text) if failed else end.text + took
        if end.stopped or not failed:
            last = with_next(last, sys.argv[1:], whole.file.recipe, run, end.stopped)
        file.end(end.status, last, stopped=stopped)
    print(last, file=sys.stderr if end.status else sys.stdout, flush=True)
    return end.status
