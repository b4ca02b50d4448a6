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

from ortlaunch.errors import BadStepError, CheckpointError, LossSpikeError
from ortlaunch.recipe.fields.train import Spike
from ortlaunch.recipe.rules.bad_step_rules import actions
from ortlaunch.run_folder.folder import json_text, write_text_atomically
from ortlaunch.run_folder.lines import append_json_line
from ortlaunch.run_folder.records import BadStep
from ortlaunch.worker import checkpoint
from ortlaunch.worker.data.left_out import recorded
from ortlaunch.worker.session import Session
from ortlaunch.worker.training.finite import bad_losses, bad_step, some

# The standard deviation of normal noise is 1.4826 times its median absolute deviation.
_NORMAL = 1.4826
# Least deviation as a share of the median: losses that hardly change jump by more than their noise.
_LEAST = 0.01


class RollBack(Exception):
    """A request to load the newest checkpoint; all ranks raise it together."""


class BadSteps:
    """The bad steps of one training, over all its starts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.train = session.recipe.train
        # Otherwise losses are read at log lines alone: reading them here would wait for the GPU.
        self.is_enabled = self.train.on_nonfinite != "stop" or self.train.on_spike is not None
        self.spikes = Spikes(self.train.on_spike) if self.train.on_spike else None
        self.rollbacks = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._take_over(list(recorded(session.run)))

    def _take_over(self, lines: list[BadStep]) -> None:
        """Leave out the samples that earlier starts left out.

        Samples whose positions hold others in today's order (--allow data) are left out no more.
        """
        session = self.session
        seen = session.checkpoint.samples if session.checkpoint else 0
        changed = False
        for line in lines:
            # `places` is a range of positions in the sample order; those before `seen` are past.
            if (
                line.places
                and line.places[1] > seen
                and not session.batches.holds(line.places, line.samples)
            ):
                line.places = [line.places[0], seen] if line.places[0] < seen else None
                changed = True
                session.group.print_once(
                    f"the samples that step {line.step} was rolled back for are no longer left "
                    "out: the order of samples has changed"
                )
            # Skipped steps need no more: the checkpoint has their count.
            if line.action == "rollback":
                self._leave_out(line)
        if changed and session.group.rank == 0:
            write_text_atomically(
                session.run.bad_steps, "".join(json_text(asdict(line)) + "\n" for line in lines)
            )

    def begin(self, saving: checkpoint.Saving, state: Any) -> None:
        """Prepare for steps on `state` (collective).

        If a rollback may come and there is no checkpoint yet, one is saved.
        """
        self._saving = saving
        session = self.session
        if (
            "rollback" in actions(self.train)
            and checkpoint.newest_of_all(session.run, session.group) is None
        ):
            with session.progress.during("saving a checkpoint"):
                saving.save(state.step, asdict(state))

    def before(self) -> None:
        """Copy the buffers before a step: a bad batch changes them even if it is skipped."""
        # Such as the running statistics of batch normalization, which a forward pass updates.
        if "skip" in actions(self.train):
            self._buffers = [
                (buffer, buffer.detach().clone()) for buffer in self.session.model.buffers()
            ]

    def check(self, step: int, losses: Sequence[torch.Tensor]) -> None:
        """Check the losses of the passes of `step` (from 0) before its update (collective).

        Raises:
            BadStepError: the step is bad; all ranks raise the same, and the gradients still exist.
        """
        if not self.is_enabled:
            return
        session = self.session
        group = self.session.group
        # A non-finite loss of any rank makes the mean non-finite on all of them.
        mean = group.mean(float(sum(losses, start=torch.zeros(()))) / len(losses))
        if not math.isfinite(mean):
            bad = bad_losses(group, losses)
            raise bad_step(
                group, session.batches, step, bad, session.engine.stepper.gradients(), again=False
            )
        if self.spikes and (why := self.spikes.spike_reason(mean)):
            samples = session.batches.indices_of_step(step)
            said = f"step {step + 1}: {why}; samples {some(samples)} of data.train"
            found = BadStep(step + 1, "spike", said, samples, None)
            raise LossSpikeError(f"{said}\n{_END}", found)

    def answer(self, error: BadStepError, state: Any) -> None:
        """Leave the step out (collective).

        Raises:
            BadStepError: the recipe requires an end, or the limit of such steps is reached.
            RollBack: the newest checkpoint is to be loaded.
        """
        found: BadStep = error.bad_step
        found.action = self._action(error)
        limit = ""
        newest = None
        if found.action == "skip" and state.left_out >= self.train.max_skips:
            limit = f"train.max_skips ({self.train.max_skips}) steps have been skipped"
        if found.action == "rollback" and self.rollbacks >= self.train.max_rollbacks:
            limit = f"train.max_rollbacks ({self.train.max_rollbacks}) rollbacks have been made"
        if found.action == "rollback":
            newest = self._newest()
        if found.action == "rollback" and newest is None:
            limit = f"{_field(found)} is rollback, but no checkpoint could be saved to return to"
        if limit or found.action == "stop":
            found.action = "stop"
            self._record(found)
            with contextlib.suppress(CheckpointError):
                # A checkpoint that a thread is still writing must be complete before the run ends.
                self._newest()
            raise type(error)(f"{error}\n{limit}" if limit else str(error), found) from None
        self.session.engine.stepper.drop_gradients()
        self._roll_back(found, state, newest) if newest else self._skip(found, state)

    def _action(self, error: BadStepError) -> str:
        spike = isinstance(error, LossSpikeError) and self.train.on_spike
        return spike.action if spike else self.train.on_nonfinite

    def _skip(self, found: BadStep, state: Any) -> None:
        # The gradients are dropped already; the forward passes also changed the buffers.
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        state.left_out += 1
        count = f"{state.left_out} of at most {self.train.max_skips}"
        self._record(found, f"{_field(found)} is skip: its update is left out ({count})")

    def _newest(self) -> tuple[int, Path] | None:
        """Wait for a save in progress, then return the newest checkpoint (collective)."""
        with self.session.progress.during("saving a checkpoint"):
            self._saving.wait()
            return checkpoint.newest_of_all(self.session.run, self.session.group)

    def _roll_back(self, found: BadStep, state: Any, newest: tuple[int, Path]) -> None:
        found.checkpoint = newest[0]
        found.places = list(self.session.batches.stretch(state.step))
        self._leave_out(found)
        where = f"the checkpoint after step {newest[0]}"
        count = f"{self.rollbacks} of at most {self.train.max_rollbacks}"
        self._record(
            found, f"{_field(found)} is rollback: back to {where}, without these samples ({count})"
        )
        self._saving.finish()
        raise RollBack

    def _leave_out(self, found: BadStep) -> None:
        self.rollbacks += 1
        if found.places:
            self.session.batches.left_out.add(*found.places)

    def _record(self, found: BadStep, said: str = "") -> None:
        if self.session.group.rank == 0:
            append_json_line(self.session.run.bad_steps, asdict(found))
            if said:
                print(found.message, said, sep="\n", flush=True)


class Spikes:
    """The losses of the last steps, and a check whether the next loss jumps."""

    def __init__(self, spike: Spike) -> None:
        self.spike = spike
        self.losses: deque[float] = deque(maxlen=spike.window)
        self.above = 0
        """Successive losses above the limit."""

    def spike_reason(self, loss: float) -> str | None:
        """Return why this loss is a spike, or None; a normal loss joins the window."""
        limit = self.spike.limit
        self.above = self.above + 1 if limit is not None and loss > limit else 0
        if self.above >= self.spike.patience:
            times = f" for {self.above} steps" if self.above > 1 else ""
            return f"the loss is {loss:.6g}, and was above {limit:g}{times} (train.on_spike.limit)"
        if self.spike.deviations and len(self.losses) == self.spike.window:
            median = statistics.median(self.losses)
            deviation = _NORMAL * statistics.median(abs(each - median) for each in self.losses)
            deviation = max(deviation, _LEAST * abs(median))
            most = median + self.spike.deviations * deviation
            # A loss far below the median is no spike.
            if loss > most:
                return (
                    f"the loss jumped to {loss:.6g}: the last {self.spike.window} have median "
                    f"{median:.6g} and deviation {deviation:.3g}, so that {most:.6g} is the most "
                    "(train.on_spike)"
                )
        self.losses.append(loss)
        return None


def _field(found: BadStep) -> str:
    return "train.on_spike" if found.kind == "spike" else "train.on_nonfinite"


# diagnose/ prints the advice.
_END = "The run ends here, before this step changed the weights."
