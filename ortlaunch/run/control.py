"""The control side of a run: what was resolved -> choices -> run folder -> processes -> verdict.

Everything that `ortlaunch train` does before and after the ranks live. Never imports torch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ortlaunch import doctor
from ortlaunch.cache import foreign
from ortlaunch.diagnose.report import with_verdict
from ortlaunch.doctor import hosts
from ortlaunch.errors import LaunchError
from ortlaunch.launch import JobState, Request, backend
from ortlaunch.launch.failure import explain_end
from ortlaunch.launch.record import JobRecord
from ortlaunch.launchers import LAUNCHERS
from ortlaunch.output import ERASE, terminal_width
from ortlaunch.planning.describe import describe
from ortlaunch.rank import JOB_VARIABLE
from ortlaunch.recipe import Recipe
from ortlaunch.resolve import provenance, resume
from ortlaunch.resolve.prepare import check_folder, claimed, earlier, launch_id, request_of, run_folder, write_run
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import AUTOMATIC, ResumeOptions
from ortlaunch.run import checkup, elastic, micro_size
from ortlaunch.run.job_file import JobFile
from ortlaunch.run.restarts import Ended, supervise
from ortlaunch.run_folder.folder import PROGRESS_VARIABLE, RunDir, write_text
from ortlaunch.run_folder.lock import RunLock
from ortlaunch.runs import registry
from ortlaunch.runs.finished import nothing_left, with_next
from ortlaunch.units import duration

_JOIN_SECONDS, _POD_SECONDS = 120, 1800  # a pod's image may have to be pulled


def train(resolved: ResolvedRun, chosen: Path | None, options: ResumeOptions = AUTOMATIC) -> int:
    """Prepare the folder, start the ranks, wait, say how it ended; returns the exit status."""
    with RunLock() as lock:
        return _train(resolved, chosen, lock, options.checked())


def _train(resolved: ResolvedRun, chosen: Path | None, lock: RunLock, options: ResumeOptions) -> int:
    started, run, inside = time.monotonic(), run_folder(chosen, resolved, os.environ), resolved.world.inside
    if run.recipe.exists() and inside is None:
        lock.take(run)  # before anything is measured
    before = earlier(run, resolved) if inside is None or inside.rank == 0 else None
    resolved = _with_engine(_with_known_size(resolved, run), run, before, options)
    if _says_that_nothing_is_left(resolved, run, before, options):
        return 0
    if inside is not None:
        return _be_a_rank(resolved, run, before, lock, options)
    beginning = _check_means(resolved, run, before, options)
    _say(beginning.lines)
    run = claimed(run) if chosen is None else run
    lock.take(run)
    with JobFile(run, resolved.plan.launcher, resolved.plan.saves) as file:
        if micro_size.is_asked(resolved.file.recipe):
            found = micro_size.find(resolved.file.recipe, resolved.plan, run)
            resolved = resolved.with_choice(micro_size.override(found))
        resume.apply(run, beginning, options)
        whole = resolved
        resolved = _on_hosts(whole, run)
        request = _prepare(resolved, run)
        os.environ[PROGRESS_VARIABLE] = width = str(terminal_width() or "")
        launcher = backend(resolved.plan.launcher)

        def start(attempt: int) -> Ended:
            sent = request if attempt == 1 else _written(_on_hosts(whole, run, True), run, again=True)
            file.starts()
            early = file.keep_signals()
            job = launcher.submit(sent)
            job.early = early
            run.restart_request.unlink(missing_ok=True)
            end = explain_end(run, launcher.wait(job), job.signal, job.ended_by, job.oom_kills, shown=True)
            print(end=ERASE if width else "", flush=True)  # the live line of a rank that was killed
            return Ended(end, job.signal is not None)

        end, stopped = supervise(run, resolved.file.recipe.launch.max_restarts, file, start)
        took = f", in {duration(time.monotonic() - started)}"
        failed = bool(end.status)
        last = with_verdict(run, end.status, end.text) if failed else end.text + took
        if end.stopped or not failed:
            last = with_next(last, sys.argv[1:], resolved.file.recipe, run, end.stopped)
        file.end(end.status, last, stopped=stopped)
    print(last, file=sys.stderr if end.status else sys.stdout, flush=True)
    return end.status


def _on_hosts(resolved: ResolvedRun, run: RunDir, again: bool = False) -> ResolvedRun:
    """The run on hosts that were looked at: what would let ranks of several fail or wait for ever is found before."""
    plan, recipe = resolved.plan, resolved.file.recipe
    if recipe.launch.elastic is None and (again or len(plan.nodes) == 1 or not recipe.launch.preflight):
        return resolved
    if "SLURM_JOB_ID" in os.environ:
        _say(["launch.preflight: not inside a job of Slurm's, where hosts are not reached by ssh: ortlaunch doctor"])
        return resolved
    asked = checkup.asked_of(resolved, Path(os.path.abspath(run.path)))
    if recipe.launch.elastic is None:
        hosts.require(asked)
        return resolved
    resolved, lines = elastic.on_present(resolved, asked, again)
    _say(lines)
    return resolved


def _says_that_nothing_is_left(
    resolved: ResolvedRun, run: RunDir, before: Recipe | None, options: ResumeOptions
) -> bool:
    """A finished run is left as it is, but for a job.json that does not record its end."""
    left = None if options.begins_earlier else nothing_left(resolved.file.recipe, run)
    if left is None or (resolved.world.inside is not None and resolved.world.inside.rank > 0):
        return left is not None
    job = JobRecord.read(run)
    if job is not None and job.backend in LAUNCHERS and not job.state.is_end:  # its command was killed, its ranks ended
        job.at_end(JobState.SUCCEEDED, 0, f"done: {run}").write(run)
    _say(
        [*_check_means(resolved, run, before, options).lines, with_next(left, sys.argv[1:], resolved.file.recipe, run)]
    )
    return True


def _with_known_size(resolved: ResolvedRun, run: RunDir) -> ResolvedRun:
    """`micro_size: auto` with the number that an earlier start in this run folder found."""
    if not micro_size.is_asked(resolved.file.recipe):
        return resolved
    found = micro_size.known(resolved.file.recipe, resolved.plan, run)
    if found is None and resolved.world.inside is not None:
        micro_size.refuse_inside()
    return resolved if found is None else resolved.with_choice(micro_size.override(found))


def _with_engine(resolved: ResolvedRun, run: RunDir, before: Recipe | None, options: ResumeOptions) -> ResolvedRun:
    """Engine auto decided; a rank above 0 starts what rank 0 has decided."""
    inside = resolved.world.inside
    if resolved.file.recipe.engine.name != "auto" or (inside is not None and inside.rank > 0):
        return resolved
    from ortlaunch.bench import auto

    return auto.choose(resolved, run, check=lambda: _check_means(resolved, run, before, options))


def _be_a_rank(resolved: ResolvedRun, run: RunDir, before: Recipe | None, lock: RunLock, options: ResumeOptions) -> int:
    """This process is a rank already: rank 0 prepares the folder, then each becomes the worker."""
    rank = resolved.world.inside
    assert rank is not None
    mark = run.ready / (launch_id(rank, os.environ) or "launch")
    if rank.rank == 0:
        mark.unlink(missing_ok=True)
        beginning = _check_means(resolved, run, before, options)
        _say(beginning.lines)
        lock.take(run, keep=True)
        JobRecord.begun(run, "inside", JobState.RUNNING).write(run)
        registry.add(run)
        resume.apply(run, beginning, options)
        _prepare(resolved, run)
        for path, text in request_of(resolved.plan, run).files:
            write_text(Path(path), text)
        write_text(mark, "")
    seconds = _POD_SECONDS if os.environ.get(JOB_VARIABLE, "").startswith("kubernetes:") else _JOIN_SECONDS
    deadline = time.monotonic() + seconds
    while not mark.exists():
        if time.monotonic() > deadline:
            raise LaunchError(f"rank 0 did not prepare {run} within {seconds} s; is it on a disk that all hosts share?")
        time.sleep(0.05)
    argv = request_of(resolved.plan, run).argv
    os.execve(argv[0], argv, {**os.environ, **dict(resolved.plan.env)})


def _check_means(resolved: ResolvedRun, run: RunDir, before: Recipe | None, options: ResumeOptions) -> resume.Beginning:
    """What the run takes is there, or an error says what to type; nothing has been written yet."""
    doctor.require(resolved.file.recipe, resolved.plan)
    request_of(resolved.plan, run)
    said = check_folder(run, before, resolved)
    return resume.beginning(run, resolved, before, options).after(said)


def _prepare(resolved: ResolvedRun, run: RunDir) -> Request:
    """Write the run folder, say what will run."""
    request = _written(resolved, run)
    provenance.record(run, resolved.command.path)
    _say([*resolved.notes, describe(resolved.plan, resolved.file.recipe), f"run folder: {run}"])
    if why := foreign(run.path):
        _say(
            [f"run folder: {why}: who can write there can run code as this user while the ranks start (docs/trust.md)"]
        )
    return request


def _written(resolved: ResolvedRun, run: RunDir, again: bool = False) -> Request:
    return write_run(run, resolved.file.recipe, resolved.plan, resolved.choice, again)


def _say(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)
