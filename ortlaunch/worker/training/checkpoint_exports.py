"""`checkpoint.export`: each checkpoint as a model, written by a process beside training.

Rank 0 starts the process of `ortlaunch export`, one at a time, on the complete checkpoint. So an
export changes nothing in the training's process. The next start makes exports that an end of the
run prevented.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from ortlaunch.base.errors import MissingDependency
from ortlaunch.run_folder.export_records import ExportLine
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import append_json_line, read_json_lines_with_keys
from ortlaunch.run_folder.records import json_values_of_record
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import ExportRequest
from ortlaunch.worker.checkpoint.saver import automatic_export_folders
from ortlaunch.worker.session import Session

# Seconds between two checks while the end of a run waits.
_POLL_SECONDS = 0.2


class _RunningExport(NamedTuple):
    request: ExportRequest
    process: subprocess.Popen[str]
    output: IO[str]
    errors: IO[str]
    files: contextlib.ExitStack
    """Closes both."""


class CheckpointExports:
    """The exports of one run's checkpoints; without `checkpoint.export` it does nothing.

    Raises:
        MissingDependency: a package is not installed, on any rank.
    """

    def __init__(self, session: Session) -> None:
        self.run = session.run
        self.progress = session.progress
        self.formats = session.recipe.checkpoint.export
        if "onnx" in self.formats:
            for package in ("onnx", "onnxruntime"):
                if find_spec(package) is None:
                    raise MissingDependency(
                        f'checkpoint.export: onnx needs {package}: pip install "ortlaunch[ort-cpu]", '
                        "or onnx and onnxruntime"
                    )
        self.queued_exports: deque[tuple[int, str]] = deque()
        self.running_export: _RunningExport | None = None
        self.writes = session.group.rank == 0
        # Those whose writer was killed, too.
        if self.writes:
            for step, _ in self.run.complete_checkpoints():
                self.queue_all_or_missing_exports_on_rank_0(step, only_missing=True)

    def queue_all_or_missing_exports_on_rank_0(
        self, checkpoint_step: int, only_missing: bool = False
    ) -> None:
        """Request the exports of a complete checkpoint."""
        if self.writes:
            for export_format in self.formats:
                if not (
                    only_missing and self.run.export_folder(checkpoint_step, export_format).exists()
                ):
                    self.queued_exports.append((checkpoint_step, export_format))

    def steps_being_exported(self) -> tuple[int, ...]:
        """Return the steps of checkpoints that must stay until their export is complete."""
        return (self.running_export.request.step,) if self.running_export else ()

    def report_ended_and_start_next_export(self) -> bool:
        """Record an export that has ended, and start the next one.

        Returns:
            Whether one has ended, so that its checkpoint need not stay.
        """
        has_ended = (
            self.running_export is not None and self.running_export.process.poll() is not None
        )
        if self.running_export is not None and has_ended:
            self._report_ended_export_and_clean_up(self.running_export)
        while self.running_export is None and self.queued_exports:
            self._start_export_or_report_why_not(*self.queued_exports.popleft())
        return has_ended

    def wait_until_all_exports_end(self) -> None:
        """Wait until every requested export has ended, on rank 0."""
        self.report_ended_and_start_next_export()
        if self.running_export is not None:
            self.progress.begin_and_show_activity("exporting checkpoints")
        while self.running_export is not None:
            time.sleep(_POLL_SECONDS)
            # The training's rank works, although it makes no step.
            self.progress.shared_progress.restart_stall_clock()
            self.report_ended_and_start_next_export()

    def close(self) -> None:
        """End an export that is still being written, and remove its files."""
        if self.running_export is None:
            return
        with self.running_export.files:
            self.running_export.process.kill()
            self.running_export.process.wait()
        shutil.rmtree(_partial_export_folder(self.running_export.request), ignore_errors=True)
        print(
            f"{_export_name(self.running_export.request)}: ended; the next start repeats it",
            flush=True,
        )

    def _start_export_or_report_why_not(self, checkpoint_step: int, export_format: str) -> None:
        folder = self.run.export_folder(checkpoint_step, export_format)
        request = ExportRequest(
            str(self.run), checkpoint_step, str(folder.absolute()), export_format, automatic=True
        )
        if checkpoint_step not in dict(self.run.complete_checkpoints()):
            print(f"{_export_name(request)}: left out: checkpoint.keep has removed it", flush=True)
            return
        # An earlier start trained another checkpoint of this step.
        if folder in automatic_export_folders(self.run, checkpoint_step):
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            self._print_and_append_export_failure(
                request, f"{folder} exists already, by `ortlaunch export`"
            )
            return
        try:
            self.running_export = _start_export_process(request)
        # No process, or no file for its output: a full disk, or too little memory.
        except OSError as error:
            self._print_and_append_export_failure(request, str(error))

    def _report_ended_export_and_clean_up(self, ended_export: _RunningExport) -> None:
        self.running_export = None
        with ended_export.files:
            ended_export.output.seek(0)
            ended_export.errors.seek(0)
            if ended_export.process.returncode == 0:
                print(ended_export.output.read().strip(), flush=True)
            else:
                lines = ended_export.errors.read().strip().splitlines() or ["no message"]
                reason = lines[-1].removeprefix("ortlaunch: ")
                self._print_and_append_export_failure(
                    ended_export.request,
                    f"{reason} (exit status {ended_export.process.returncode})",
                )
                shutil.rmtree(_partial_export_folder(ended_export.request), ignore_errors=True)

    def _print_and_append_export_failure(self, request: ExportRequest, reason: str) -> None:
        print(
            f"NOT EXPORTED: {_export_name(request)}: {reason}; training is not affected", flush=True
        )
        line = ExportLine(
            request.step, request.format, request.folder, automatic=True, error=reason
        )
        # On a full disk the log alone has it.
        with contextlib.suppress(OSError):
            append_json_line(self.run.exports, json_values_of_record(line))


def _start_export_process(request: ExportRequest) -> _RunningExport:
    with contextlib.ExitStack() as opened:
        output = opened.enter_context(tempfile.TemporaryFile("w+"))
        errors = opened.enter_context(tempfile.TemporaryFile("w+"))
        # Its own session, because a signal to the run's processes is not for it. It ends with this
        # process (worker/single_process.py).
        process = subprocess.Popen(
            tasks.task_command(request), text=True, stdin=subprocess.PIPE, stdout=output, stderr=errors,
            start_new_session=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        # One that has ended already is reported by its exit status.
        with contextlib.suppress(BrokenPipeError), process.stdin as process_input:  # type: ignore[union-attr]
            process_input.write(json.dumps(request._asdict()))
        # They stay open until the export has ended.
        return _RunningExport(request, process, output, errors, opened.pop_all())


def unrepeated_failed_export_count(run: RunDir) -> int:
    """Return how many automatic exports failed and were not repeated."""
    lines = read_json_lines_with_keys(run.exports, "step", "format", "folder").values
    newest = {(line["step"], line["format"]): line for line in lines if line.get("automatic")}
    return sum(bool(line.get("error")) for line in newest.values())


def _export_name(request: ExportRequest) -> str:
    return f"checkpoint.export: step {request.step} as {request.format}"


def _partial_export_folder(request: ExportRequest) -> Path:
    """Return the folder of an incomplete export (worker/export/export_checkpoint.py)."""
    return Path(f"{request.folder}.partial")
