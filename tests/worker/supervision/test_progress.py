"""The clock of a run's phases."""

from __future__ import annotations

import pytest

from ortlaunch.worker.supervision import progress
from ortlaunch.worker.supervision.progress import Progress


def test_each_part_of_a_run_has_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interruption counts for itself, and the seconds of a repeated phase are summed."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])

    def after(seconds: float) -> None:
        now[0] += seconds

    clock = Progress(rank=1)
    clock.begin_and_show_activity("reading data")
    after(2)
    clock.begin_steps_and_show_bar(0, 4)
    clock.begin_and_show_activity("compiling in the first step")
    after(5)
    clock.count_step_and_update_bar()
    for _ in range(2):
        after(10)
        with clock.show_activity_during("evaluating"):
            after(3)
    clock.begin_and_show_activity("writing the export")
    after(1)
    assert clock.seconds_by_activity() == {
        "reading data": 2, "training": 20, "compiling in the first step": 5, "evaluating": 6, "writing the export": 1,
    }  # fmt: skip
