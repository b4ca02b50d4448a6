"""Whether it is time for a checkpoint: rank 0's clock decides, all ranks agree, and hardly a step waits for that."""

from __future__ import annotations

import time

from ortlaunch.worker.distributed import DistributedContext


class Clock:
    """Goes off when so many minutes have gone by since it was set; null: never.

    Ranks agree at steps that all of them know: each time rank 0 says after how many steps to look again, by the speed
    so far: a twentieth of the time, and half of what is left, so that a save in half an hour takes some thirty looks.
    """

    def __init__(self, minutes: float | None, group: DistributedContext, step: int) -> None:
        self._seconds, self._group = None if minutes is None else 60 * minutes, group
        self.set(step)

    def set(self, step: int) -> None:
        """Begin anew after this step."""
        self._began, self._first, self._look = time.monotonic(), step, step + 1

    def is_over(self, step: int) -> bool:
        """Whether the time is over after this step; the same on every rank (collective)."""
        if self._seconds is None or step < self._look:
            return False
        ahead = self._group.gather_numbers([float(self._steps_ahead(step))])[0][0]
        self._look = step + int(ahead)
        return ahead == 0

    def _steps_ahead(self, step: int) -> int:
        """After how many steps to look again, by this rank's clock; 0: the time is over."""
        assert self._seconds is not None
        gone = time.monotonic() - self._began
        left = self._seconds - gone
        if left <= 0:
            return 0
        ahead = min(left / 2, self._seconds / 20)
        return max(1, int(ahead / gone * (step - self._first))) if gone > 0 else 1
