"""Run training loops in turns: A B C A B C ..., each in a process that sleeps while others run.

A contestant calls `Gate.step` at the beginning of every training step. `race` starts them, assigns
the turns and returns the seconds per step of every turn; the first turn, which includes export or
compilation, is a warm-up.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Gate:
    """The side of a contestant: it waits for its turn, measures it and reports."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.done = -1
        self.started = 0.0

    def step(self, value: float | None = None) -> None:
        """Mark the beginning of a step; a `value` is reported instead of the last step's time."""
        # The first call has no step before it, so counting begins at -1.
        self.done += 1
        if self.done % self.steps:
            return
        # A turn ends here: the time of all its steps, divided by their number.
        now = time.perf_counter()
        seconds = (now - self.started) / self.steps if self.done else None
        print(json.dumps({"seconds": seconds if value is None else value}), flush=True)
        # Waits here until the race gives the next turn.
        if not sys.stdin.readline():
            os._exit(0)  # the race is over
        self.started = time.perf_counter()


class Times(NamedTuple):
    """Seconds per step: of each turn, and of the first step with its compilation."""

    turns: list[float]
    warm_up: float

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


def race(
    commands: Mapping[str, Sequence[str]], rounds: int, environ: Mapping[str, str], warm_up: int = 1
) -> dict[str, Times]:
    """Start every contestant, then give each `rounds` turns after the warm-up."""
    logs = {
        name: Path(f"{environ['CONTEST_FOLDER']}/{name.replace(' ', '-').replace('/', '-')}.log")
        for name in commands
    }
    runners: dict[str, subprocess.Popen[str]] = {}
    try:
        for name, command in commands.items():
            runners[name] = _start(command, logs[name], environ)
            # Started one after another: a start in parallel would slow the others' imports.
            _wait(name, runners[name], logs[name])
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(warm_up + rounds):
            for name, runner in runners.items():
                assert runner.stdin is not None
                runner.stdin.write("go\n")
                runner.stdin.flush()
                times[name].append(_wait(name, runner, logs[name])["seconds"])
        return {name: Times(turns[warm_up:], turns[0]) for name, turns in times.items()}
    finally:
        # The whole group, because some contestants fork further ranks.
        for runner in runners.values():
            os.killpg(runner.pid, signal.SIGKILL)
            runner.wait()


def _start(command: Sequence[str], log: Path, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    with log.open("w") as errors:
        return subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environ),
            start_new_session=True,
        )  # fmt: skip


def _wait(name: str, runner: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """Return the contestant's next report; other lines that it prints are skipped."""
    assert runner.stdout is not None
    for line in runner.stdout:
        if line.startswith('{"seconds"'):
            report: dict[str, Any] = json.loads(line)
            return report
    raise SystemExit(f"{name} ended early:\n{log.read_text()[-3000:]}")


def table(times: Mapping[str, Times], against: str) -> str:
    """Return medians, spread, and the speed relative to one contestant."""
    lines = [
        f"| | s a step, median (least - most) | speed of `{against}` x | warm-up turn, s a step |",
        "|---|---|---|---|",
    ]
    for name, found in times.items():
        spread = f"{found.median:.3f} ({min(found.turns):.3f} - {max(found.turns):.3f})"
        lines.append(
            f"| {name} | {spread} | {times[against].median / found.median:.2f} | "
            f"{found.warm_up:.2f} |"
        )
    return "\n".join(lines)
