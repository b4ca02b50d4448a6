"""The job of one variant, from the control side: start, turns, end, and the reason of a failure.

An order is a small file in the variant's run folder, and its answer is a line in another file. This
works with every launcher, and lets a waiting job sleep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from ortlaunch.bench.variants import Variant
from ortlaunch.json_types import Json
from ortlaunch.launch import JobState, load_backend
from ortlaunch.launch.failure import classify_run_end
from ortlaunch.process import wait_until
from ortlaunch.resolve.prepare import write_run
from ortlaunch.run_folder.folder import RunDir, write_json_atomically

# Steps before the measured ones, in which engines compile and caches fill.
WARM_UP_STEPS = 3
# Short against a step, and cheap: it reads one small file.
_POLL_SECONDS = 0.02
# After this time a job that does not end is cancelled.
_LEAVE_SECONDS = 60


class Failed(Exception):
    """The variant's job ended before its time; the text is the whole reason."""


OnReady = Callable[["VariantJob"], None]


class VariantJob:
    """The job of a variant, and its answers."""

    def __init__(self, variant: Variant, run: RunDir, on_ready: OnReady = lambda _: None) -> None:
        self.variant = variant
        self.on_ready = on_ready
        self.run = run
        self.ready: Json = {}
        self.turns: list[Json] = []
        self.parity: Json = {}
        self.failed = ""
        self._job: Any = None
        self._number = self._read = 0

    @property
    def alive(self) -> bool:
        """Whether its job is running."""
        return self._job is not None

    @property
    def measured(self) -> bool:
        """Whether it can be compared: it reached the end."""
        return bool(self.turns) and not self.failed

    def start(self) -> None:
        """Start the job, and wait until it has warmed up; the first start's times are kept."""
        assert self.variant.resolved is not None
        plan = self.variant.resolved.plan
        request = write_run(self.run, self.variant.resolved.file.recipe, plan)
        # Files of an earlier start would be read as orders and answers of this one.
        self.run.order.unlink(missing_ok=True)
        self.run.results.unlink(missing_ok=True)
        self._number = self._read = 0
        write_json_atomically(
            self.run.bench, {"launched": time.time(), "warm_up_steps": WARM_UP_STEPS}
        )
        self._job = load_backend(plan.launcher).submit(request, self.run.output)
        answer = self._answer()
        # A job that starts again for each turn would report times with warm caches.
        if not self.ready:
            self.ready = answer
            self.on_ready(self)

    def turn(self, steps: int) -> None:
        """Train `steps` measured steps."""
        self.turns.append(self._do({"do": "steps", "steps": steps}))

    def compare(self) -> None:
        """Compare the variant with plain PyTorch."""
        self.parity = self._do({"do": "compare"})["parity"]

    def _do(self, order: dict[str, object]) -> Json:
        """Write an order, and return its answer."""
        self._number += 1
        write_json_atomically(self.run.order, {"number": self._number, **order})
        return self._answer()

    def _answer(self) -> dict[str, object]:
        """Wait for the next line of results, and return it."""
        while True:
            lines = (
                self.run.results.read_text(encoding="utf-8").split("\n")
                if self.run.results.exists()
                else [""]
            )
            # The text after the last newline may be a line that is still being written.
            if len(lines) - 1 > self._read:
                self._read += 1
                answer: Json = json.loads(lines[self._read - 1])
                return answer
            self._check()
            time.sleep(_POLL_SECONDS)

    def _check(self) -> None:
        """Raise Failed if the job has ended."""
        assert self.variant.resolved is not None
        launcher = load_backend(self.variant.resolved.plan.launcher)
        if launcher.state(self._job) is not JobState.RUNNING:
            job = self._job
            self._job = None
            end = classify_run_end(
                self.run, launcher.wait(job), None, job.foreign_signal, job.oom_kills
            )
            raise Failed(end.text if end.status else "it ended early without an error")

    def leave(self) -> None:
        """Let the job end by itself, and cancel it if it does not."""
        if not self.alive or self.variant.resolved is None:
            return
        write_json_atomically(self.run.order, {"number": self._number + 1, "do": "leave"})
        launcher = load_backend(self.variant.resolved.plan.launcher)
        wait_until(lambda: launcher.state(self._job) is not JobState.RUNNING, _LEAVE_SECONDS)
        self.cancel()

    def cancel(self) -> None:
        """End the job now, with all processes that it started."""
        if self.alive and self.variant.resolved is not None:
            load_backend(self.variant.resolved.plan.launcher).cancel(self._job)
            self._job = None
