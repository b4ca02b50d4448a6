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
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import IO, NamedTuple

from ortlaunch import tasks
from ortlaunch.errors import MissingDependency
from ortlaunch.run_folder.export_records import ExportLine
from ortlaunch.run_folder.folder import RunDir
from ortlaunch.run_folder.lines import append_json_line, read_json_lines
from ortlaunch.run_folder.records import as_json
from ortlaunch.tasks import ExportRequest
from ortlaunch.worker.checkpoint.saving import automatic_exports
from ortlaunch.worker.session import Session

# Seconds between two checks while the end of a run waits.
_POLL_SECONDS = 0.2


class _Running(NamedTuple):
    """An export that is being written."""

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
        for package in ("onnx", "onnxruntime") if "onnx" in self.formats else ():
            if find_spec(package) is None:
                raise MissingDependency(
                    f'checkpoint.export: onnx needs {package}: pip install "ortlaunch[ort-cpu]", '
                    "or onnx and onnxruntime"
                )
        # Called after each export, which kept its checkpoint from removal.
        self.released: Callable[[], object] = lambda: None
        self.waiting: deque[tuple[int, str]] = deque()
        self.running: _Running | None = None
        self.writes = session.group.rank == 0
        # Those whose writer was killed, too.
        for step, _ in self.run.complete_checkpoints() if self.writes else ():
            self.add(step, only_missing=True)

    def add(self, step: int, only_missing: bool = False) -> None:
        """Request the exports of a complete checkpoint."""
        for form in self.formats if self.writes else ():
            if not (only_missing and self.run.export_folder(step, form).exists()):
                self.waiting.append((step, form))

    def in_use(self) -> tuple[int, ...]:
        """Return the steps of checkpoints that must stay until their export is complete."""
        return (self.running.request.step,) if self.running else ()

    def advance(self) -> None:
        """Record an export that has ended, and start the next one."""
        if self.running is not None and self.running.process.poll() is not None:
            self._end(self.running)
        while self.running is None and self.waiting:
            self._start(*self.waiting.popleft())

    def wait(self) -> None:
        """Wait until every requested export has ended, on rank 0."""
        self.advance()
        if self.running is not None:
            self.progress.doing("exporting checkpoints")
        while self.running is not None:
            time.sleep(_POLL_SECONDS)
            # The training's rank works, although it makes no step.
            self.progress.pulse.alive()
            self.advance()

    def close(self) -> None:
        """End an export that is still being written, and remove its files."""
        if self.running is None:
            return
        with self.running.files:
            self.running.process.kill()
            self.running.process.wait()
        shutil.rmtree(_partial(self.running.request), ignore_errors=True)
        print(f"{_name(self.running.request)}: ended; the next start repeats it", flush=True)

    def _start(self, step: int, form: str) -> None:
        folder = self.run.export_folder(step, form)
        request = ExportRequest(str(self.run), step, str(folder.absolute()), form, automatic=True)
        if step not in dict(self.run.complete_checkpoints()):
            print(f"{_name(request)}: left out: checkpoint.keep has removed it", flush=True)
            return
        # An earlier start trained another checkpoint of this step.
        if folder in automatic_exports(self.run, step):
            shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            self._failed(request, f"{folder} exists already, by `ortlaunch export`")
            return
        try:
            self.running = _started(request)
        # No process, or no file for its output: a full disk, or too little memory.
        except OSError as error:
            self._failed(request, str(error))

    def _end(self, ended: _Running) -> None:
        self.running = None
        with ended.files:
            ended.output.seek(0)
            ended.errors.seek(0)
            if ended.process.returncode == 0:
                print(ended.output.read().strip(), flush=True)
            else:
                lines = ended.errors.read().strip().splitlines() or ["no message"]
                why = lines[-1].removeprefix("ortlaunch: ")
                self._failed(ended.request, f"{why} (exit status {ended.process.returncode})")
                shutil.rmtree(_partial(ended.request), ignore_errors=True)
        self.released()

    def _failed(self, request: ExportRequest, why: str) -> None:
        print(f"NOT EXPORTED: {_name(request)}: {why}; training is not affected", flush=True)
        line = ExportLine(request.step, request.format, request.folder, automatic=True, error=why)
        # On a full disk the log alone has it.
        with contextlib.suppress(OSError):
            append_json_line(self.run.exports, as_json(line))


def _started(request: ExportRequest) -> _Running:
    with contextlib.ExitStack() as opened:
        output = opened.enter_context(tempfile.TemporaryFile("w+"))
        errors = opened.enter_context(tempfile.TemporaryFile("w+"))
        # Its own session, because a signal to the run's processes is not for it. It ends with this
        # process (worker/alone.py).
        process = subprocess.Popen(
            tasks.task_command(request), text=True, stdin=subprocess.PIPE, stdout=output, stderr=errors,
            start_new_session=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        # One that has ended already is reported by its exit status.
        with contextlib.suppress(BrokenPipeError), process.stdin as given:  # type: ignore[union-attr]
            given.write(json.dumps(request._asdict()))
        # They stay open until the export has ended.
        return _Running(request, process, output, errors, opened.pop_all())


def failures(run: RunDir) -> int:
    """Return how many automatic exports failed and were not repeated."""
    lines = read_json_lines(run.exports, "step", "format", "folder").values
    newest = {(line["step"], line["format"]): line for line in lines if line.get("automatic")}
    return sum(bool(line.get("error")) for line in newest.values())


def _name(request: ExportRequest) -> str:
    return f"checkpoint.export: step {request.step} as {request.format}"


def _partial(request: ExportRequest) -> Path:
    """Return the folder of an incomplete export (worker/export/export_checkpoint.py)."""
    return Path(f"{request.folder}.partial")
