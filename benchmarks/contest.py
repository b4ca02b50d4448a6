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

    def __init__(self, steps: int, seconds: float = 0.0) -> None:
        """Set the length of a turn: at least so many steps, and at least so many seconds."""
        self.steps = steps
        self.seconds = seconds
        # The first call has no step before it, so counting begins at -1.
        self.done = -1
        self.started = 0.0

    def step(self, value: float | None = None) -> None:
        """Mark the beginning of a step; a `value` is reported instead of the last step's time."""
        self.done += 1
        now = time.perf_counter()
        long_enough = self.done >= self.steps and now - self.started >= self.seconds
        if self.started and not long_enough:
            return
        # A turn ends here: the time of all its steps, divided by their number.
        seconds = (now - self.started) / self.done if self.started else None
        report = {"seconds": seconds if value is None else value, "memory": _peak_memory()}
        print(json.dumps(report), flush=True)
        self.done = 0
        # Waits here until the race gives the next turn.
        if not sys.stdin.readline():
            os._exit(0)  # the race is over
        self.started = time.perf_counter()


def _peak_memory() -> int:
    """Return the most bytes that this process has held."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


class Times(NamedTuple):
    """Seconds per step: of each turn, and of the first turn with its compilation."""

    turns: list[float]
    warm_up: float
    memory: int
    """The most bytes that the contestant's process held."""

    @property
    def median(self) -> float:
        return statistics.median(self.turns)


class EndedEarly(SystemExit):
    """A contestant ended before the race did; the text has the end of its log."""


def race(
    commands: Mapping[str, Sequence[str]],
    rounds: int,
    environ: Mapping[str, str],
    warm_up: int = 1,
    failed: dict[str, str] | None = None,
    together: bool = False,
) -> dict[str, Times]:
    """Start every contestant, then give each `rounds` turns after the warm-up.

    Args:
        failed: gets the reason of each contestant that ends early, and the others go on; with None
            the first such end is an error.
        together: whether all start at once, which is faster, but their starts cannot be compared.

    Raises:
        EndedEarly: a contestant ended early, and `failed` is None.
    """
    logs = {
        name: Path(f"{environ['CONTEST_FOLDER']}/{name.replace(' ', '-').replace('/', '-')}.log")
        for name in commands
    }
    runners: dict[str, subprocess.Popen[str]] = {}
    reports: dict[str, list[dict[str, Any]]] = {}
    ended: dict[str, str] = {}

    def answer(name: str) -> None:
        try:
            reports.setdefault(name, []).append(_wait(name, runners[name], logs[name]))
        except EndedEarly as error:
            if failed is None:
                raise
            ended[name] = str(error)

    try:
        for name, command in commands.items():
            runners[name] = _start(command, logs[name], environ)
            # One after another, because a start in parallel would slow the others' imports.
            if not together:
                answer(name)
        for name in commands if together else ():
            answer(name)
        for _ in range(warm_up + rounds):
            for name in commands:
                if name in ended:
                    continue
                stdin = runners[name].stdin
                assert stdin is not None
                stdin.write("go\n")
                stdin.flush()
                answer(name)
    finally:
        # The whole group, because some contestants fork further ranks.
        for runner in runners.values():
            os.killpg(runner.pid, signal.SIGKILL)
            runner.communicate()
    if failed is not None:
        failed.update(ended)
    # The first report is the start's, without a turn.
    turns = {name: found[1:] for name, found in reports.items() if name not in ended}
    seconds = {name: [each["seconds"] for each in found] for name, found in turns.items()}
    return {
        name: Times(seconds[name][warm_up:], seconds[name][0], turns[name][-1]["memory"])
        for name in turns
    }


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
    raise EndedEarly(f"{name} ended early:\n{log.read_text()[-3000:]}")


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
