"""Handling of a step with a bad loss or gradient: end the run, skip the step, or roll back.

All ranks make the same decision, because it depends only on values that are the same on all of
them. The record is bad_steps.jsonl.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ortlaunch.base.errors import BadStepError, CheckpointError, LossSpikeError
from ortlaunch.base.units import first_names_and_count_of_rest
from ortlaunch.recipe.fields.train import Spike
from ortlaunch.recipe.rules.bad_step_rules import bad_step_actions
from ortlaunch.run_folder.folder import json_text, write_text_atomically
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.run_folder.records import BadStep
from ortlaunch.worker import checkpoint
from ortlaunch.worker.data.skipped_positions import read_bad_step_records
from ortlaunch.worker.session import Session
from ortlaunch.worker.training.finite_checks import (
    MAX_SHOWN,
    build_non_finite_step_error,
    gather_non_finite_losses,
)

# The standard deviation of normal noise is 1.4826 times its median absolute deviation.
_NORMAL_DEVIATION_FACTOR = 1.4826
# Least deviation as a share of the median: losses that hardly change jump by more than their noise.
_LEAST_DEVIATION_SHARE = 0.01


class RollBack(Exception):
    """A request to load the newest checkpoint; all ranks raise it together."""


class BadStepHandler:
    """The bad steps of one training, over all its starts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.train = session.recipe.train
        # Otherwise losses are read at log lines alone: reading them here would wait for the GPU.
        self.is_enabled = self.train.on_nonfinite != "stop" or self.train.on_spike is not None
        self.spikes = SpikeDetector(self.train.on_spike) if self.train.on_spike else None
        self.rollbacks = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._skip_samples_of_earlier_rollbacks(list(read_bad_step_records(session.run)))

    def _skip_samples_of_earlier_rollbacks(self, earlier_bad_steps: list[BadStep]) -> None:
        """Leave out the samples that earlier starts left out.

        Samples whose positions hold others in today's order (--allow data) are left out no more.
        """
        session = self.session
        samples_seen = session.checkpoint.samples if session.checkpoint else 0
        changed = False
        for earlier_step in earlier_bad_steps:
            # `places` is a range of positions in the sample order; those before `seen` are past.
            if (
                earlier_step.places
                and earlier_step.places[1] > samples_seen
                and not session.batches.are_samples_in_position_range(
                    range(*earlier_step.places), earlier_step.samples
                )
            ):
                earlier_step.places = (
                    [earlier_step.places[0], samples_seen]
                    if earlier_step.places[0] < samples_seen
                    else None
                )
                changed = True
                session.group.print_on_rank_0(
                    f"the samples that step {earlier_step.step} was rolled back for are no longer left "
                    "out: the order of samples has changed"
                )
            # Skipped steps need no more: the checkpoint has their count.
            if earlier_step.action == "rollback":
                self._count_rollback_and_skip_its_samples(earlier_step)
        if changed and session.group.rank == 0:
            write_text_atomically(
                session.run.bad_steps,
                "".join(
                    json_text(asdict(earlier_step)) + "\n" for earlier_step in earlier_bad_steps
                ),
            )

    def ensure_checkpoint_for_rollback(
        self, checkpoint_saver: checkpoint.CheckpointSaver, train_state: Any
    ) -> None:
        """Prepare for steps on `train_state` (collective).

        If a rollback may come and there is no checkpoint yet, one is saved.
        """
        self._saving = checkpoint_saver
        session = self.session
        if (
            "rollback" in bad_step_actions(self.train)
            and checkpoint.newest_checkpoint_seen_by_rank_0(session.run, session.group) is None
        ):
            with session.progress.show_activity_during("saving a checkpoint"):
                checkpoint_saver.wait_then_save_or_start_background_save(
                    train_state.step, asdict(train_state)
                )

    def copy_buffers_before_step(self) -> None:
        """Copy the buffers before a step: a bad batch changes them even if it is skipped."""
        # Such as the running statistics of batch normalization, which a forward pass updates.
        if "skip" in bad_step_actions(self.train):
            self._buffers = [
                (buffer, buffer.detach().clone()) for buffer in self.session.model.buffers()
            ]

    def raise_if_step_is_bad(self, step_index: int, pass_losses: Sequence[torch.Tensor]) -> None:
        """Check the losses of the passes of `step_index` (from 0) before its update (collective).

        Raises:
            BadStepError: the step is bad; all ranks raise the same, and the gradients still exist.
        """
        if not self.is_enabled:
            return
        session = self.session
        group = self.session.group
        # A non-finite loss of any rank makes the mean non-finite on all of them.
        mean_loss = group.mean_over_ranks(
            float(sum(pass_losses, start=torch.zeros(()))) / len(pass_losses)
        )
        if not math.isfinite(mean_loss):
            bad = gather_non_finite_losses(group, pass_losses)
            raise build_non_finite_step_error(
                group,
                session.batches,
                step_index,
                bad,
                session.engine.stepper.named_gradients(),
                passes_were_repeated=False,
            )
        if self.spikes and (
            spike_reason := self.spikes.count_loss_and_get_spike_reason_or_none(mean_loss)
        ):
            samples = session.batches.sample_indices_of_step(step_index)
            message = (
                f"step {step_index + 1}: {spike_reason}; samples "
                f"{first_names_and_count_of_rest(samples, MAX_SHOWN)} of data.train"
            )
            bad_step_record = BadStep(step_index + 1, "spike", message, samples, None)
            raise LossSpikeError(f"{message}\n{_END_MESSAGE}", bad_step_record)

    def skip_roll_back_or_end_run(self, bad_step_error: BadStepError, train_state: Any) -> None:
        """Leave the step out (collective).

        Raises:
            BadStepError: the recipe requires an end, or the limit of such steps is reached.
            RollBack: the newest checkpoint is to be loaded.
        """
        bad_step_record: BadStep = bad_step_error.bad_step
        bad_step_record.action = self._recipe_action_for_bad_step(bad_step_error)
        limit = ""
        newest_checkpoint = None
        if bad_step_record.action == "skip" and train_state.left_out >= self.train.max_skips:
            limit = f"train.max_skips ({self.train.max_skips}) steps have been skipped"
        if bad_step_record.action == "rollback" and self.rollbacks >= self.train.max_rollbacks:
            limit = f"train.max_rollbacks ({self.train.max_rollbacks}) rollbacks have been made"
        if bad_step_record.action == "rollback":
            newest_checkpoint = self._wait_for_save_and_newest_checkpoint()
        if bad_step_record.action == "rollback" and newest_checkpoint is None:
            limit = f"{_recipe_field(bad_step_record)} is rollback, but no checkpoint could be saved to return to"
        if limit or bad_step_record.action == "stop":
            bad_step_record.action = "stop"
            self._record_bad_step_and_print_note_on_rank_0(bad_step_record)
            with contextlib.suppress(CheckpointError):
                # A checkpoint that a thread is still writing must be complete before the run ends.
                self._wait_for_save_and_newest_checkpoint()
            raise type(bad_step_error)(
                f"{bad_step_error}\n{limit}" if limit else str(bad_step_error), bad_step_record
            ) from None
        self.session.engine.stepper.drop_gradients()
        if newest_checkpoint:
            self._record_and_raise_rollback(bad_step_record, train_state, newest_checkpoint)
        else:
            self._restore_buffers_and_record_skip(bad_step_record, train_state)

    def _recipe_action_for_bad_step(self, bad_step_error: BadStepError) -> str:
        spike = isinstance(bad_step_error, LossSpikeError) and self.train.on_spike
        return spike.action if spike else self.train.on_nonfinite

    def _restore_buffers_and_record_skip(self, bad_step_record: BadStep, train_state: Any) -> None:
        # The gradients are dropped already; the forward passes also changed the buffers.
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        train_state.left_out += 1
        count = f"{train_state.left_out} of at most {self.train.max_skips}"
        self._record_bad_step_and_print_note_on_rank_0(
            bad_step_record,
            f"{_recipe_field(bad_step_record)} is skip: its update is left out ({count})",
        )

    def _wait_for_save_and_newest_checkpoint(self) -> tuple[int, Path] | None:
        """Wait for a save in progress, then return the newest checkpoint (collective)."""
        with self.session.progress.show_activity_during("saving a checkpoint"):
            self._saving.wait_for_background_save_and_record_result()
            return checkpoint.newest_checkpoint_seen_by_rank_0(self.session.run, self.session.group)

    def _record_and_raise_rollback(
        self,
        bad_step_record: BadStep,
        train_state: Any,
        step_and_checkpoint_folder: tuple[int, Path],
    ) -> None:
        bad_step_record.checkpoint = step_and_checkpoint_folder[0]
        position_range = self.session.batches.position_range_of_step(train_state.step)
        bad_step_record.places = [position_range.start, position_range.stop]
        self._count_rollback_and_skip_its_samples(bad_step_record)
        where = f"the checkpoint after step {step_and_checkpoint_folder[0]}"
        count = f"{self.rollbacks} of at most {self.train.max_rollbacks}"
        self._record_bad_step_and_print_note_on_rank_0(
            bad_step_record,
            f"{_recipe_field(bad_step_record)} is rollback: back to {where}, without these samples ({count})",
        )
        self._saving.wait_for_save_and_remove_old()
        raise RollBack

    def _count_rollback_and_skip_its_samples(self, bad_step_record: BadStep) -> None:
        self.rollbacks += 1
        if bad_step_record.places:
            self.session.batches.left_out.skip_position_range(*bad_step_record.places)

    def _record_bad_step_and_print_note_on_rank_0(
        self, bad_step_record: BadStep, printed_note: str = ""
    ) -> None:
        if self.session.group.rank == 0:
            append_json_line(self.session.run.bad_steps, asdict(bad_step_record))
            if printed_note:
                print(bad_step_record.message, printed_note, sep="\n", flush=True)


class SpikeDetector:
    """The losses of the last steps, and a check whether the next loss jumps."""

    def __init__(self, spike: Spike) -> None:
        self.spike = spike
        self.losses: deque[float] = deque(maxlen=spike.window)
        self.above = 0
        """Successive losses above the limit."""

    def count_loss_and_get_spike_reason_or_none(self, mean_loss: float) -> str | None:
        """Return why this loss is a spike, or None; a normal loss joins the window."""
        limit = self.spike.limit
        self.above = self.above + 1 if limit is not None and mean_loss > limit else 0
        if self.above >= self.spike.patience:
            times = f" for {self.above} steps" if self.above > 1 else ""
            return f"the loss is {mean_loss:.6g}, and was above {limit:g}{times} (train.on_spike.limit)"
        if self.spike.deviations and len(self.losses) == self.spike.window:
            median = statistics.median(self.losses)
            deviation = _NORMAL_DEVIATION_FACTOR * statistics.median(
                abs(window_loss - median) for window_loss in self.losses
            )
            deviation = max(deviation, _LEAST_DEVIATION_SHARE * abs(median))
            most = median + self.spike.deviations * deviation
            # A loss far below the median is no spike.
            if mean_loss > most:
                return (
                    f"the loss jumped to {mean_loss:.6g}: the last {self.spike.window} have median "
                    f"{median:.6g} and deviation {deviation:.3g}, so that {most:.6g} is the most "
                    "(train.on_spike)"
                )
        self.losses.append(mean_loss)
        return None


def _recipe_field(bad_step_record: BadStep) -> str:
    return "train.on_spike" if bad_step_record.kind == "spike" else "train.on_nonfinite"


# diagnose/ prints the advice.
_END_MESSAGE = "The run ends here, before this step changed the weights."
