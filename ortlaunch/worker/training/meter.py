"""Loss and speed between two log lines of a training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from ortlaunch.json_types import Json
from ortlaunch.worker.engine.flops import measured_peak_flops, wait_for
from ortlaunch.worker.model.precision import dtype_of
from ortlaunch.worker.session import Session


def sum_of(losses: list[torch.Tensor]) -> torch.Tensor:
    """One number, on the losses' device."""
    return sum(losses, start=torch.zeros((), device=losses[0].device))


class Meter:
    """Loss and speed between two log lines; what is not training (evaluation, saving) does not count as time."""

    def __init__(self, session: Session) -> None:
        self.group = session.group
        self.batch = session.plan.batch
        self.numbers = session.engine.stepper.numbers
        # A CPU's rate, measured once for a moment, changes with every other process: a share of it says nothing.
        self.flops_per_token = (
            session.engine.flops_per_token if self.group.device.type == "cuda" else None
        )
        self.has_numbers = session.engine.plain.has_numbers
        self.dtype = dtype_of(session.recipe.precision)
        self.peak = (
            measured_peak_flops(self.group.device, self.dtype) if self.flops_per_token else 0.0
        )
        self.restart()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While open, time is not training's; the losses since the last reading stay."""
        wait_for(self.group.device)  # what the steps before gave the device to do is
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began

    def restart(self) -> None:
        """Count losses, steps and time from now on."""
        self.losses: list[torch.Tensor] = []  # this rank's mean of each step that was taken
        self.steps = 0
        self.started = time.perf_counter()

    def took(self, loss: torch.Tensor | None) -> None:
        """Count a step; None: it was left out."""
        self.steps += 1
        if loss is not None:
            self.losses.append(loss)
            self.numbers.keep()

    def read(self) -> Json:
        """Values since the last reading (collective)."""
        taken = len(self.losses)
        loss = self.group.mean(float(sum_of(self.losses)) / taken) if taken else None
        seconds = (time.perf_counter() - self.started) / self.steps
        tokens = self.batch.tokens_per_step
        values: Json = {"loss": loss, "samples_per_second": self.batch.global_samples / seconds}
        if tokens:
            values["tokens_per_second"] = tokens / seconds
            if self.flops_per_token:
                values["mfu"] = self._utilization(
                    self.flops_per_token * tokens / seconds / self.group.size
                )
        values |= self.numbers.read(self.group) if self.has_numbers else {}
        self.restart()
        return values

    def _utilization(self, rate: float) -> float:
        """Share of the rate that the device was found to have; where it is more, that was found beside other work."""
        if rate > self.peak:
            self.peak = max(self.peak, measured_peak_flops(self.group.device, self.dtype))
        return rate / self.peak
