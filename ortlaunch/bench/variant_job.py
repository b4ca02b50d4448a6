"""The job of one variant, from the control side: start, turns, end, and the reason of a failure.

An order is a small file in the variant's run folder, and its answer is a line in another file. This
works with every launcher, and lets a waiting job sleep.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from ortlaunch.base.json_types import Json
from ortlaunch.base.process import wait_until_true_or_timeout
from ortlaunch.bench.variants import Variant
from ortlaunch.diagnose.conclude import conclude_run
from ortlaunch.launch import JobState
from ortlaunch.launch.processes import (
    end_job_and_its_processes,
    forward_signals_until_job_ends,
    job_state,
    write_files_and_start_job,
)
from ortlaunch.resolve.prepare import write_run_files_and_clear_earlier_start
from ortlaunch.run_folder.folder import RunDir, write_json_atomically

# Steps before the measured ones, in which engines compile and caches fill.
WARM_UP_STEPS = 3
# Short against a step, and cheap: it reads one small file.
_POLL_SECONDS = 0.02
# After this time a job that does not end is cancelled.
_LEAVE_SECONDS = 60


class VariantFailedError(Exception):
    """The variant's job ended before its time; the first line of the text is the reason."""


OnReady = Callable[["VariantJob"], None]


class VariantJob:
    """The job of a variant, and its answers."""

    def __init__(self, variant: Variant, run: RunDir, on_ready: OnReady = lambda _: None) -> None:
        self.variant = variant
        self.on_ready = on_ready
        self.run = run
        self.ready_answer: Json = {}
        self.turns: list[Json] = []
        self.parity: dict[str, object] = {}
        self.failure_text = ""
        self._job: Any = None
        self._order_number = self._read_line_count = 0

    @property
    def is_running(self) -> bool:
        """Whether its job is running."""
        return self._job is not None

    @property
    def is_measured(self) -> bool:
        """Whether it can be compared: it reached the end."""
        return bool(self.turns) and not self.failure_text

    def start_job_await_warm_up_and_keep_first_answer(self) -> None:
        """Start the job, and wait until it has warmed up; the first start's times are kept."""
        assert self.variant.resolved_run is not None
        request = write_run_files_and_clear_earlier_start(
            self.run,
            self.variant.resolved_run.recipe_file.recipe,
            self.variant.resolved_run.plan,
        )
        # Files of an earlier start would be read as orders and answers of this one.
        self.run.order.unlink(missing_ok=True)
        self.run.results.unlink(missing_ok=True)
        self._order_number = self._read_line_count = 0
        write_json_atomically(
            self.run.bench, {"launched": time.time(), "warm_up_steps": WARM_UP_STEPS}
        )
        self._job = write_files_and_start_job(request, self.run.output)
        answer = self._wait_for_next_result_line()
        # A job that starts again for each turn would report times with warm caches.
        if not self.ready_answer:
            self.ready_answer = answer
            self.on_ready(self)

    def train_measured_steps(self, step_count: int) -> None:
        """Train `step_count` measured steps."""
        self.turns.append(
            self._write_order_and_wait_for_result({"do": "steps", "steps": step_count})
        )

    def compare_with_pytorch(self) -> None:
        """Compare the variant with plain PyTorch."""
        self.parity = self._write_order_and_wait_for_result({"do": "compare"})["parity"]

    def _write_order_and_wait_for_result(self, bench_order: dict[str, object]) -> Json:
        self._order_number += 1
        write_json_atomically(self.run.order, {"number": self._order_number, **bench_order})
        return self._wait_for_next_result_line()

    def _wait_for_next_result_line(self) -> dict[str, object]:
        while True:
            lines = (
                self.run.results.read_text(encoding="utf-8").split("\n")
                if self.run.results.exists()
                else [""]
            )
            # The text after the last newline may be a line that is still being written.
            if len(lines) - 1 > self._read_line_count:
                self._read_line_count += 1
                answer: Json = json.loads(lines[self._read_line_count - 1])
                return answer
            self._forget_job_and_raise_if_it_has_ended()
            time.sleep(_POLL_SECONDS)

    def _forget_job_and_raise_if_it_has_ended(self) -> None:
        if job_state(self._job) is not JobState.RUNNING:
            job = self._job
            self._job = None
            verdict = conclude_run(
                self.run,
                forward_signals_until_job_ends(job),
                None,
                job.foreign_signal,
                job.oom_kills,
            )
            if verdict.failure is None:
                raise VariantFailedError("it ended early without an error")
            decisive_line = verdict.failure.detail or verdict.message
            raise VariantFailedError(f"{decisive_line}\n\n{verdict}")

    def request_end_and_cancel_if_late(self) -> None:
        """Let the job end by itself, and cancel it if it does not."""
        if not self.is_running:
            return
        write_json_atomically(self.run.order, {"number": self._order_number + 1, "do": "leave"})
        wait_until_true_or_timeout(
            lambda: job_state(self._job) is not JobState.RUNNING, _LEAVE_SECONDS
        )
        self.cancel_job()

    def cancel_job(self) -> None:
        """End the job now, with all processes that it started."""
        if self.is_running:
            end_job_and_its_processes(self._job)
            self._job = None
