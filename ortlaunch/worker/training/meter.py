"""Loss and speed between two log lines of a training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from ortlaunch.worker.data import Batches
from ortlaunch.worker.engine.flops import measure_peak_flops_per_second, wait_for_device
from ortlaunch.worker.model.returned_values import ValueMeans
from ortlaunch.worker.process_group.distributed import DistributedContext


def sum_losses(losses: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum as a scalar tensor on the losses' device."""
    return sum(losses, start=torch.zeros((), device=losses[0].device))


class TrainingMeter:
    """Loss and speed between two log lines; evaluation and saving do not count as training time."""

    def __init__(
        self,
        group: DistributedContext,
        batches: Batches,
        returned_values: ValueMeans | None,
        dtype: torch.dtype,
        flops_per_token: float | None,
    ) -> None:
        """Count from now on.

        Args:
            group: the ranks of the training.
            batches: its batches, which count tokens.
            returned_values: the model's own values; None: it returns none.
            dtype: the type in which it computes.
            flops_per_token: operations of a step for each token; None: unknown.
        """
        self.group = group
        self.batches = batches
        self.returned_values = returned_values
        # Only GPUs have a meaningful rate: a CPU's changes with every other process on it.
        self.flops_per_token = flops_per_token if group.device.type == "cuda" else None
        self.dtype = dtype
        self.peak_flops = (
            measure_peak_flops_per_second(self.group.device, self.dtype)
            if self.flops_per_token
            else 0.0
        )
        self.restart_counts()

    @contextlib.contextmanager
    def exclude_from_training_time(self) -> Iterator[None]:
        """Stop the clock while the context is open; the losses since the last reading stay."""
        # Work of earlier steps that is still queued on the device is training time.
        wait_for_device(self.group.device)
        began = time.perf_counter()
        yield
        self.started += time.perf_counter() - began

    def restart_counts(self) -> None:
        """Count losses, steps and time from now on."""
        # This rank's mean loss of each step whose update was applied.
        self.losses: list[torch.Tensor] = []
        self.steps = 0
        self.tokens = self.batches.tokens
        self.started = time.perf_counter()

    def count_step(self, applied_loss: torch.Tensor | None) -> None:
        """Count a step; its loss is None if its update was skipped."""
        self.steps += 1
        if applied_loss is not None:
            self.losses.append(applied_loss)
            if self.returned_values is not None:
                self.returned_values.keep_step()

    def mean_loss(self) -> float | None:
        """Return the mean loss of all ranks since the last reading; None without one (collective)."""
        taken = len(self.losses)
        return self.group.mean_over_ranks(float(sum_losses(self.losses)) / taken) if taken else None

    def read_loss_and_speed_and_restart(self) -> dict[str, float | None]:
        """Return the values since the last reading, and restart (collective)."""
        # Losses stay on the device until here, because reading one waits for the GPU.
        loss = self.mean_loss()
        seconds = (time.perf_counter() - self.started) / self.steps
        values: dict[str, float | None] = {
            "loss": loss,
            "samples_per_second": self.batches.batch.global_samples / seconds,
        }
        ranks = self.group.data_parallel.gather_numbers(
            [*self.batches.tokens.difference_from_earlier(self.tokens)]
        )
        tokens, padding = (sum(rank_counts) / self.steps for rank_counts in zip(*ranks))
        if tokens:
            values["tokens_per_second"] = tokens / seconds
            if padding:
                values["padding_share"] = round(padding / (tokens + padding), 4)
            if self.flops_per_token:
                values["mfu"] = self._fraction_of_peak_flops_measured_again_if_above(
                    # Padding is computed, too. Tokens are those of all ranks, and the peak is that
                    # of one device.
                    self.flops_per_token * (tokens + padding) / seconds / self.group.size
                )
        if self.returned_values is not None:
            values |= self.returned_values.means_over_ranks_and_reset(self.group)
        self.restart_counts()
        return values

    def _fraction_of_peak_flops_measured_again_if_above(self, flops_per_second: float) -> float:
        """Return the rate as a share of the device's measured peak.

        A higher rate shows that other work disturbed the measurement, so the peak is measured
        again.
        """
        if flops_per_second > self.peak_flops:
            self.peak_flops = max(
                self.peak_flops, measure_peak_flops_per_second(self.group.device, self.dtype)
            )
        return flops_per_second / self.peak_flops
