"""Start a run repeatedly in one folder, and compare two such runs bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

from ortlaunch.base.process import living_descendant_pids, read_process_stat_or_none
from ortlaunch.run_folder.folder import RunDir
from tests.e2e import forked

# In seconds, for one start of a tiny run on a busy machine.
TIMEOUT = 300


class Life:
    """One start of a run, from its launch to its end or its kill."""

    def __init__(
        self, home: Path, name: str, recipe: str = "killed.yaml", ranks: int = 2, *words: str
    ) -> None:
        self.run = RunDir(home / name)
        self.log = home / f"{name}.log"
        self.newest = self.complete()[-1] if self.complete() else 0
        self.process = forked.start(
            home, self.log, ranks, ["train", recipe, f"--run-dir={name}", *words]
        )
        self.deadline = time.monotonic() + TIMEOUT
        self.family: list[int] = []

    def complete(self) -> list[int]:
        return [step for step, _ in self.run.complete_checkpoints()]

    def wait_for(self, what: str) -> None:
        """Wait until there is a new checkpoint, or, for "partial", one that is being written."""
        while self.process.exitcode is None and time.monotonic() < self.deadline:
            if (
                any(self.run.checkpoints.glob("step_*.partial"))
                if what == "partial"
                else self.advanced()
            ):
                return
            # A toy's checkpoint is written within milliseconds.
            time.sleep(0.0005)
        raise AssertionError(f"waited in vain for {what}:\n{self.log.read_text()[-3000:]}")

    def advanced(self) -> bool:
        found = self.complete()
        return bool(found) and found[-1] > self.newest

    def look(self) -> list[int]:
        """Read and return the ids of all processes of the run."""
        self.family = [self.process.pid, *living_descendant_pids(self.process.pid)]
        return self.family

    def kill(self) -> None:
        """Kill all processes of the run, and wait until none is left."""
        pids = self.family or self.look()
        # The list is not read again, which would take longer than a checkpoint.
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.join(TIMEOUT)
        # Orphans are not this process's children, so their end must be polled.
        while any(_lives(pid) for pid in pids) and time.monotonic() < self.deadline:
            time.sleep(0.01)

    def end(self) -> None:
        """Wait until the run ends, and check that it succeeded."""
        # Half an hour more, for a run of hundreds of steps.
        self.process.join(TIMEOUT + 30 * 60)
        assert self.process.exitcode == 0, f"the run failed:\n{self.log.read_text()[-3000:]}"

    def resumed_after(self) -> int:
        """Return the step after which the run resumed, by its output; 0 if it began anew."""
        found = re.search(r"^resumed after step (\d+) from", self.log.read_text(), re.MULTILINE)
        return int(found[1]) if found else 0


def _lives(pid: int) -> bool:
    stat = read_process_stat_or_none(pid)
    return stat is not None and not stat.has_ended


def differences(one: RunDir, other: RunDir) -> list[str]:
    """Return the names of files, and "losses", that differ from `one`, the undisturbed run."""
    last = one.complete_checkpoints()[-1][1].name
    names = [path.relative_to(one.path) for path in (one.checkpoints / last).glob("*.safetensors")]
    names.append(Path("export/model.safetensors"))
    found = [
        str(name)
        for name in names
        if (one.path / name).read_bytes() != (other.path / name).read_bytes()
    ]
    return found + (["losses"] if losses(one) != losses(other) else [])


def losses(run: RunDir) -> list[tuple[int, float]]:
    """Return (step, loss) of every step."""
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [(record["step"], record["loss"]) for record in records]
