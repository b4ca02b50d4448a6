"""A run that a test stops or kills, and the roles of its processes (Linux only)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

TRAIN = (sys.executable, "-m", "ortlaunch.cli", "train", "recipe.yaml")
_WORKER = re.compile(r" ortlaunch\.worker ")
_LAUNCHER = re.compile(r"torch\.distributed\.run|mpirun |prterun |^srun ")


class Process(NamedTuple):
    """A process, as /proc describes it."""

    pid: int
    parent: int
    words: str


def processes(folder: Path) -> dict[int, Process]:
    """Return the living processes whose command line contains the folder, by process id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) not in words:
                continue
            # A command may contain spaces and brackets; the state comes after the last bracket.
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        # The process may end between the listing and the reading.
        except (OSError, ValueError):
            continue
        # A zombie has ended, and only waits for its parent.
        if state != "Z":
            found[int(path.name)] = Process(int(path.name), int(parent), words)
    return found


def wait(condition: Callable[[], object], seconds: float, every: float = 0.02) -> bool:
    """Wait for a condition; return whether it became true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


class Victim:
    """One run in a folder that contains its recipe; `before` is a command that starts the run's."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        environ: dict[str, str],
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.run = folder / "run"
        # Kept open while the command writes to it; end() closes it.
        self.output = open(folder / "output", "wb")  # noqa: SIM115
        self.command = subprocess.Popen(
            [*before, *TRAIN, *words, "--run-dir", str(self.run)], cwd=folder, stdin=subprocess.DEVNULL,
            env={**environ, "OMP_NUM_THREADS": "1"}, stdout=self.output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def ranks(self) -> list[Process]:
        """Return the ranks' processes, in the order of their ids."""
        workers = {
            pid: one for pid, one in processes(self.folder).items() if _WORKER.search(one.words)
        }
        # The launcher's own command line contains the ranks' command line.
        workers = {pid: one for pid, one in workers.items() if not _LAUNCHER.search(one.words)}
        # A supervisor's command line matches as well; a rank's parent is its supervisor.
        return [workers[pid] for pid in sorted(workers) if workers[pid].parent in workers]

    def who(self, target: str) -> int:
        """Return the process id of a target; of ranks and rank supervisors, the last one's."""
        if target == "command":
            return self.command.pid
        if target == "launcher":
            return next(
                pid for pid, one in processes(self.folder).items() if _LAUNCHER.search(one.words)
            )
        return self.ranks()[-1].pid if target == "rank" else self.ranks()[-1].parent

    def steps(self) -> int:
        """Return the number of steps that metrics.jsonl records."""
        metrics = self.run / "metrics.jsonl"
        # The last line may be incomplete while it is written.
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def saved(self) -> tuple[int, float]:
        """Return step and time of the newest complete checkpoint; zeros if there is none."""
        marks = sorted((self.run / "checkpoints").glob("step_*/COMPLETE"))
        return (int(marks[-1].parent.name[5:]), marks[-1].stat().st_mtime) if marks else (0, 0.0)

    def said(self) -> str:
        """Return the last line that ortlaunch itself printed."""
        text = (self.folder / "output").read_text(errors="replace")
        return (re.findall("ortlaunch: .*", text) or text.splitlines() or ["(nothing)"])[-1]

    def end(self) -> None:
        """Kill all processes of the run."""
        self.command.kill()
        for pid in processes(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.command.wait()
        self.output.close()
