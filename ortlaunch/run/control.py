"""The control side of a run, in order: choices, checks, folder, start, verdict.

It does all that `ortlaunch train` does before and after the ranks run. It never imports torch.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from ortlaunch.base.output import ERASE, print_lines, terminal_width
from ortlaunch.base.units import clock_duration
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.launch.processes import forward_signals_until_job_ends, write_files_and_start_job
from ortlaunch.launch.restarts import (
    EndedAttempt,
    start_ranks_and_restart_after_faults_or_on_request,
)
from ortlaunch.resolve.prepare import set_aside_and_write_run_files_and_print_plan_unless_restart
from ortlaunch.resolve.resolve import ResolvedRun
from ortlaunch.resolve.resume import AUTOMATIC_RESUME, ResumeOptions
from ortlaunch.run import choices, rank_under_launcher
from ortlaunch.run.elastic import check_hosts_and_return_shrunk_run_and_lines
from ortlaunch.run.job_file import JobFile
from ortlaunch.run.preparation import (
    create_run_folder_or_numbered_one,
    nothing_to_train_text_with_command_or_none,
    ready_marker_path,
    record_success_unless_recorded,
    requested_or_absent_folder_for_checks,
    requested_or_proposed_run_folder,
    startable_run_beginning_and_done_text_or_refuse,
)
from ortlaunch.run.run_completion import continue_command_if_train_was_typed
from ortlaunch.run_folder.folder import PROGRESS_VARIABLE
from ortlaunch.run_folder.lock import RunLock


def lock_folder_and_run_training(
    resolved: ResolvedRun,
    requested_folder: Path | None,
    resume_options: ResumeOptions = AUTOMATIC_RESUME,
) -> int:
    """Prepare the folder, start the ranks, wait, print the verdict and return the exit status."""
    resume_options = resume_options.require_known_allow_names()
    with RunLock() as lock:
        return _prepare_start_and_report_training(resolved, requested_folder, lock, resume_options)


def _prepare_start_and_report_training(
    resolved: ResolvedRun,
    requested_folder: Path | None,
    lock: RunLock,
    resume_options: ResumeOptions,
) -> int:
    started = time.monotonic()
    rank = resolved.world.enclosing_rank
    must_claim_folder = requested_folder is None and (rank is None or rank.world_size == 1)
    proposed_folder = requested_or_proposed_run_folder(requested_folder, resolved, os.environ)
    run = (
        requested_or_absent_folder_for_checks(proposed_folder, requested_folder)
        if must_claim_folder
        else proposed_folder
    )
    # A run from Python has its folder, and the caller watches the lock.
    if (run.lock.exists() or run.output.exists()) and (rank is None or rank.rank == 0):
        # Before anything is measured: a living run in the folder must end this command at once. A
        # requeued turn waits for the earlier one, which may save a checkpoint meanwhile.
        lock.lock_and_record_holder_or_refuse(
            run,
            survives_exec=rank is not None,
            living_holder_wait_seconds=rank_under_launcher.max_wait_seconds_for_requeued_job(),
        )
    ready_mark = ready_marker_path(run, rank) if rank is not None else None
    if rank is not None and ready_mark is not None:
        # Other ranks start with the choices and the plan of rank 0.
        if rank.rank > 0:
            return (
                0
                if nothing_to_train_text_with_command_or_none(resolved, run, resume_options)
                else rank_under_launcher.wait_for_rank0_and_become_worker(ready_mark, run)
            )
        # With the mark of an earlier launch, other ranks would start from that launch's files.
        ready_mark.unlink(missing_ok=True)

    # First the known choices and the checks: a run that cannot start should fail before minutes of
    # measuring.
    resolved, beginning, finished_text = startable_run_beginning_and_done_text_or_refuse(
        resolved, run, resume_options
    )
    if finished_text:
        record_success_unless_recorded(run)
        print_lines([*beginning.text_lines, finished_text])
        return 0
    if rank is not None and ready_mark is not None:
        if must_claim_folder:
            run = create_run_folder_or_numbered_one(proposed_folder)
            ready_mark = ready_marker_path(run, rank)
        return rank_under_launcher.prepare_folder_and_become_rank0_worker(
            resolved, ready_mark, run, lock, beginning
        )
    if resolved.recipe_file.recipe.engine.name == "auto":
        measured_run = choices.measure_cache_and_apply_engine(resolved)
        # The engine may have requirements of its own.
        resolved, beginning, _ = startable_run_beginning_and_done_text_or_refuse(
            measured_run, run, resume_options
        )

    run = create_run_folder_or_numbered_one(proposed_folder) if must_claim_folder else run
    lock.lock_and_record_holder_or_refuse(run)
    with JobFile(run, resolved.world.launcher, resolved.traits.saves) as file:
        print_lines(beginning.text_lines)
        run_on_all_hosts = choices.search_and_apply_micro_size_if_auto(resolved, run)
        # Ranks write the progress line in this width; empty where the output is no terminal.
        os.environ[PROGRESS_VARIABLE] = width = str(terminal_width() or "")

        def start_ranks(attempt_number: int) -> EndedAttempt:
            usable_run, lines = check_hosts_and_return_shrunk_run_and_lines(
                run_on_all_hosts, run, attempt_number > 1
            )
            request = set_aside_and_write_run_files_and_print_plan_unless_restart(
                usable_run, run, lines, beginning if attempt_number == 1 else None
            )
            file.record_start_of_ranks()
            early_signals = file.start_collecting_signals_for_ranks()
            job = write_files_and_start_job(request)
            job.early_signals = early_signals
            run.restart_request.unlink(missing_ok=True)
            verdict = conclude_run(
                run,
                forward_signals_until_job_ends(job),
                job.user_signal,
                job.foreign_signal,
                job.oom_kills,
                rank0_output_was_shown=True,
            )
            # Clear the progress line of a rank that was killed.
            print(end=ERASE if width else "", flush=True)
            return EndedAttempt(verdict, job.user_signal is not None)

        verdict, stopped = start_ranks_and_restart_after_faults_or_on_request(
            run,
            run_on_all_hosts.recipe_file.recipe.launch.max_restarts,
            file.record_attempts_and_stop_collecting_signals,
            start_ranks,
        )
        if verdict.exit_status == 0:
            duration_text = clock_duration(time.monotonic() - started)
            verdict = replace(verdict, message=f"{verdict.message}, in {duration_text}")
        if verdict.can_continue or verdict.exit_status == 0:
            verdict = replace(
                verdict,
                continue_command=continue_command_if_train_was_typed(
                    run_on_all_hosts.typed_arguments,
                    run_on_all_hosts.recipe_file.recipe,
                    run,
                    verdict.can_continue,
                ),
            )
        file.record_end_or_print_disk_error(verdict, stopped or verdict.can_continue)
    print(verdict.render(), file=sys.stderr if verdict.exit_status else sys.stdout, flush=True)
    return verdict.exit_status
