"""Check a run before its start. No process is started here."""

from __future__ import annotations

from ortlaunch import doctor
from ortlaunch.launch import JobState
from ortlaunch.launch.record import JobRecord
from ortlaunch.launchers import LAUNCHERS
from ortlaunch.output import print_lines
from ortlaunch.resolve import resume
from ortlaunch.resolve.prepare import check_folder, check_launcher, earlier
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import Beginning, ResumeOptions
from ortlaunch.run.finished import nothing_left, with_next
from ortlaunch.run_folder.folder import RunDir


def check(
    resolved: ResolvedRun, run: RunDir, options: ResumeOptions
) -> tuple[Beginning, str | None]:
    """Check that the run can start; write nothing and make no plan.

    Returns:
        The beginning of the run, with the lines to print about it, and the result of `finished`.

    Raises:
        InputError, PlanError, MissingDependency: the run cannot start; the message has the remedy.
    """
    done = finished(resolved, run, options)
    before = earlier(run, resolved)
    doctor.require(resolved.file.recipe, resolved.world)
    check_launcher(resolved.world, run)
    lines = check_folder(run, before, resolved)
    return resume.beginning(run, resolved, before, options).after(lines), done


def finished(resolved: ResolvedRun, run: RunDir, options: ResumeOptions) -> str | None:
    """Return the line to print if no step is left to train; None if the ranks have to run."""
    return None if options.begins_earlier else nothing_left(resolved.file.recipe, run)


def leave_finished(resolved: ResolvedRun, run: RunDir, lines: tuple[str, ...], done: str) -> int:
    """Print that the run is complete, and return its exit status."""
    job = JobRecord.read(run)
    # The earlier command was killed after its ranks had ended, so job.json still has it running.
    if job is not None and job.backend in LAUNCHERS and not job.state.is_end:
        job.at_end(JobState.SUCCEEDED, 0, f"done: {run}").write(run)
    last = with_next(done, resolved.typed, resolved.file.recipe, run)
    print_lines([*lines, last])
    return 0
