"""checkpoint.on_complete: a command after each complete checkpoint, one after another, beside training. Rank 0 only."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from ortlaunch.rank import VARIABLES
from ortlaunch.recipe.models import Checkpoint
from ortlaunch.run.folder import RunDir
from ortlaunch.run.records import CommandLine
from ortlaunch.worker.checkpoint import beside, saves

_TIMED_OUT = 124  # as timeout(1) says it


class Commands:
    """Those of one training. A command that an earlier start left unfinished is run again."""

    def __init__(self, policy: Checkpoint, run: RunDir) -> None:
        assert policy.on_complete is not None
        self.command, self.minutes, self.run = policy.on_complete, policy.on_complete_minutes, run
        self._steps: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._busy: list[int] = []
        self._finishing = False
        self._thread = threading.Thread(target=self._work, name="on_complete", daemon=True)
        self._thread.start()
        ended = {line["step"] for line in saves.records(run) if "status" in line}
        saved = {line["step"] for line in saves.records(run)}
        for step, _ in run.complete_checkpoints():
            if step in saved - ended:
                self.begin(step)

    def begin(self, step: int) -> None:
        """Run the command for this checkpoint when those before it are through."""
        self._busy.append(step)
        self._steps.put(step)

    def busy(self) -> tuple[int, ...]:
        """Steps whose checkpoints must stay."""
        return tuple(self._busy)

    def finish(self, seconds: float) -> bool:
        """Wait for all of them, so long at most; whether they are through. Each has its limit. None begins any more."""
        if not self._finishing:
            self._finishing = True
            if self._busy:
                print(f"waiting for checkpoint.on_complete of step {self._busy[-1]}", flush=True)
            self._steps.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (step := self._steps.get()) is not None:
            began = time.perf_counter()
            status = self._run(step)
            saves.record(self.run, CommandLine(step, status, round(time.perf_counter() - began, 3)))
            self._busy.remove(step)
            if status:
                print(f"checkpoint.on_complete failed for step {step}: {_how(status, self.minutes)}; its output: "
                      f"{self.run.on_complete}", flush=True)  # fmt: skip

    def _run(self, step: int) -> int:
        """Exit status, negative for a signal; its processes have ended."""
        self.run.logs.mkdir(parents=True, exist_ok=True)
        folder = self.run.checkpoint(step)
        try:
            with self.run.on_complete.open("ab") as log:
                log.write(f"step {step}\n".encode())
                log.flush()
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", beside.__file__, str(os.getpid()), self.command],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    env=environment(os.environ, self.run, folder, step),
                )  # fmt: skip
        except OSError as error:
            print(f"checkpoint.on_complete could not be run: {error}", flush=True)
            return 126
        try:
            return process.wait(60 * self.minutes)
        except subprocess.TimeoutExpired:
            return _TIMED_OUT
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind, too
            process.wait()


def environment(environ: Mapping[str, str], run: RunDir, folder: Path, step: int) -> dict[str, str]:
    """The rank's environment without what makes it one; the checkpoint's path and step."""
    kept = {name: value for name, value in environ.items() if name not in VARIABLES}
    return {
        **kept,
        "ORTLAUNCH_RUN": os.path.abspath(run.path),
        "ORTLAUNCH_CHECKPOINT": os.path.abspath(folder),
        "ORTLAUNCH_STEP": str(step),
    }


def _how(status: int, minutes: float) -> str:
    if status == _TIMED_OUT:
        return f"ended after {minutes:g} minutes (checkpoint.on_complete_minutes)"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
