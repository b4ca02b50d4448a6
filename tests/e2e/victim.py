"""A run that a tool stops or kills: started as a user does, and who is who among its processes (Linux)."""

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
    """The state of a process in /proc."""

    pid: int
    parent: int
    words: str


def processes(folder: Path) -> dict[int, Process]:
    """Living processes with the folder in their command line, by id."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) not in words:
                continue
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            found[int(path.name)] = Process(int(path.name), int(parent), words)
    return found


def wait(condition: Callable[[], object], seconds: float, every: float = 0.02) -> bool:
    """Whether it comes true within so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


class Victim:
    """One run in a folder with its recipe; `before` is the program that starts its command."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        environ: dict[str, str],
        before: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.output = open(folder / "output", "wb")  # noqa: SIM115
        self.command = subprocess.Popen(
            [*before, *TRAIN, *words, "--run-dir", str(self.run)], cwd=folder, stdin=subprocess.DEVNULL,
            env={**environ, "OMP_NUM_THREADS": "1"}, stdout=self.output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def ranks(self) -> list[Process]:
        """Processes of ranks, below their guardians; in the order of their ids."""
        workers = {
            pid: one for pid, one in processes(self.folder).items() if _WORKER.search(one.words)
        }
        workers = {pid: one for pid, one in workers.items() if not _LAUNCHER.search(one.words)}
        return [workers[pid] for pid in sorted(workers) if workers[pid].parent in workers]

    def who(self, target: str) -> int:
        """The process that a word names; of ranks and guardians the last."""
        if target == "command":
            return self.command.pid
        if target == "launcher":
            return next(
                pid for pid, one in processes(self.folder).items() if _LAUNCHER.search(one.words)
            )
        return self.ranks()[-1].pid if target == "rank" else self.ranks()[-1].parent

    def steps(self) -> int:
        """The steps in its metrics."""
        metrics = self.run / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def saved(self) -> tuple[int, float]:
        """Step and time of the newest complete checkpoint."""
        marks = sorted((self.run / "checkpoints").glob("step_*/COMPLETE"))
        return (int(marks[-1].parent.name[5:]), marks[-1].stat().st_mtime) if marks else (0, 0.0)

    def said(self) -> str:
        """The last line of the command's own."""
        text = (self.folder / "output").read_text(errors="replace")
        return (re.findall("ortlaunch: .*", text) or text.splitlines() or ["(nothing)"])[-1]

    def end(self) -> None:
        """Leave nothing."""
        self.command.kill()
        for pid in processes(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.command.wait()
        self.output.close()
