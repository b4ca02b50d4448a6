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
    """Return the sum as a scalar tensor on the losses' device."""
    return sum(losses, start=torch.zeros((), device=losses[0].device))


class Meter:
    """Loss and speed between two log lines; evaluation and saving do not count as training time."""

    def __init__(self, session: Session) -> None:
        self.group = session.group
        self.batch = session.plan.batch
        self.batches = session.batches
        self.numbers = session.engine.stepper.numbers
        # Only GPUs have a meaningful rate: a CPU's changes with every other process on it.
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
        """Stop the clock while the context is open; the losses since the last reading stay."""
        # Work of earlier steps that is still queued on the device is training time.
        wait_for(self.group.device)
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began

    def restart(self) -> None:
        """Count losses, steps and time from now on."""
        # This rank's mean loss of each step whose update was applied.
        self.losses: list[torch.Tensor] = []
        self.steps = 0
        self.tokens = self.batches.tokens
        self.started = time.perf_counter()

    def took(self, loss: torch.Tensor | None) -> None:
        """Count a step; its loss is None if its update was skipped."""
        self.steps += 1
        if loss is not None:
            self.losses.append(loss)
            self.numbers.keep()

    def read(self) -> Json:
        """Return the values since the last reading, and restart (collective)."""
        taken = len(self.losses)
        # Losses stay on the device until here, because reading one waits for the GPU.
        loss = self.group.mean(float(sum_of(self.losses)) / taken) if taken else None
        seconds = (time.perf_counter() - self.started) / self.steps
        values: Json = {"loss": loss, "samples_per_second": self.batch.global_samples / seconds}
        ranks = self.group.gather_numbers([*self.batches.tokens.since(self.tokens)])
        tokens, padding = (sum(each) / self.steps for each in zip(*ranks))
        if tokens:
            values["tokens_per_second"] = tokens / seconds
            if padding:
                values["padding_share"] = round(padding / (tokens + padding), 4)
            if self.flops_per_token:
                values["mfu"] = self._utilization(
                    # Padding is computed, too. Tokens are those of all ranks, and the peak is that
                    # of one device.
                    self.flops_per_token * (tokens + padding) / seconds / self.group.size
                )
        values |= self.numbers.read(self.group) if self.has_numbers else {}
        self.restart()
        return values

    def _utilization(self, rate: float) -> float:
        """Return the rate as a share of the device's measured peak.

        A higher rate shows that other work disturbed the measurement, so the peak is measured
        again.
        """
        if rate > self.peak:
            self.peak = max(self.peak, measured_peak_flops(self.group.device, self.dtype))
        return rate / self.peak
