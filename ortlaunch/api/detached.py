"""Start an `ortlaunch` command that outlives its caller."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ortlaunch.base import module_start
from ortlaunch.base.errors import RunError
from ortlaunch.base.forked_process import ForkedProcess
from ortlaunch.launch.prepared import PreparedProcess
from ortlaunch.launch.processes import command_prefix_to_end_with_parent
from ortlaunch.planning.world import LaunchOptions
from ortlaunch.run_folder import lock
from ortlaunch.run_folder.folder import RunDir

_POLL_SECONDS = 0.05
# Lines at the end of a command's output that an error shows.
_SHOWN_LINES = 20


def launch_options_as_command_arguments(launch_options: LaunchOptions) -> list[str]:
    """Return launch options as words of the command line."""
    values = {
        "launcher": launch_options.launcher,
        "nproc-per-node": launch_options.processes_per_node,
        "hostfile": launch_options.hostfile,
        "include": launch_options.include,
        "exclude": launch_options.exclude,
    }
    return [f"--{name}={value}" for name, value in values.items() if value is not None]


def start_detached_and_await_job_file_or_raise(
    command_arguments: Sequence[str],
    run: RunDir,
    extra_environ: Mapping[str, str],
    returns_once_run_is_locked: bool = False,
    ends_with_caller: bool = False,
    prepared_process: PreparedProcess | None = None,
) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start an `ortlaunch` command in a session of its own; return once its job.json is written.

    Args:
        command_arguments: arguments of the command.
        run: its run folder, whose output.txt gets its output.
        extra_environ: variables beside those of this process.
        returns_once_run_is_locked: whether the run folder's lock is enough.
        ends_with_caller: whether it gets SIGTERM when this process ends, also after kill -9.
        prepared_process: the process that forks it, unless it refuses to.

    Raises:
        RunError: the command ended with an error before that.
    """
    run.path.mkdir(parents=True, exist_ok=True)
    previous_write_time = _write_time_ns(run.job)
    argv = [*module_start.module_command("ortlaunch"), *command_arguments]
    environ = {**os.environ, **extra_environ}
    process: subprocess.Popen[bytes] | ForkedProcess | None = None
    if prepared_process is not None:
        process = prepared_process.fork_command_or_record_refusal(argv[2:], environ, run.output)
    if process is None:
        with run.output.open("ab") as output:
            # No signal of a terminal or of a notebook's kernel reaches another session.
            process = subprocess.Popen(
                [*command_prefix_to_end_with_parent(), argv[0], *argv]
                if ends_with_caller
                else argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )
        # Without it the ended command would be a zombie of this process.
        threading.Thread(target=process.wait, daemon=True).start()
    while process.poll() is None and _write_time_ns(run.job) == previous_write_time:
        command = lock.process_that_last_locked_run(run)
        if returns_once_run_is_locked and command is not None and command.pid == process.pid:
            break
        time.sleep(_POLL_SECONDS)
    status = process.poll()
    if status and _write_time_ns(run.job) == previous_write_time:
        raise RunError(last_output_lines(run), status)
    return process


def _write_time_ns(path: Path) -> int | None:
    """Return when a file was written; None if it does not exist."""
    return path.stat().st_mtime_ns if path.exists() else None


def last_output_lines(run: RunDir) -> str:
    """Return the last lines of output.txt."""
    lines = run.output.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
    return "\n".join(lines).removeprefix("ortlaunch: ")
