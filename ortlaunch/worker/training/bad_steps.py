"""What becomes of a step whose loss or gradient is bad: the run ends, the step is skipped, or the run rolls back.

All ranks come to the same decision: what they look at is the same on all of them. The record is bad_steps.jsonl.
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
from ortlaunch.recipe.fields.models import Spike
from ortlaunch.recipe.rules.bad_step_rules import actions
from ortlaunch.run_folder.folder import json_text, write_text
from ortlaunch.run_folder.lines import append_line
from ortlaunch.run_folder.records import BadStep
from ortlaunch.worker import checkpoint
from ortlaunch.worker.data.left_out import recorded
from ortlaunch.worker.session import Session
from ortlaunch.worker.training.finite import bad_losses, bad_step, some

_NORMAL = (
    1.4826  # of normal noise, the standard deviation is so many median distances from the median
)
_LEAST = 0.01  # of the median: losses that hardly change jump by more than that


class RollBack(Exception):
    """The newest checkpoint is to be taken up; all ranks raise it together."""


class BadSteps:
    """The bad steps of one training, over all its starts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.train = session.recipe.train
        self.looks = self.train.on_nonfinite != "stop" or self.train.on_spike is not None
        self.spikes = Spikes(self.train.on_spike) if self.train.on_spike else None
        self.rollbacks = 0
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._take_over(list(recorded(session.run)))

    def _take_over(self, lines: list[BadStep]) -> None:
        """Leave out what earlier starts left out, but where another order (--allow data) has put other samples."""
        session = self.session
        seen = session.checkpoint.samples if session.checkpoint else 0
        changed = False
        for line in lines:
            if (
                line.places
                and line.places[1] > seen
                and not session.batches.holds(line.places, line.samples)
            ):
                line.places = [line.places[0], seen] if line.places[0] < seen else None
                changed = True
                if session.group.rank == 0:
                    print(f"the samples that step {line.step} was taken back for are left out no more: in today's "
                          f"order others are in their place", flush=True)  # fmt: skip
            if line.action == "rollback":
                self._leave_out(line)
        if changed and session.group.rank == 0:
            write_text(
                session.run.bad_steps, "".join(json_text(asdict(line)) + "\n" for line in lines)
            )

    def begin(self, saving: checkpoint.Saving, state: Any) -> None:
        """Steps follow on `state`; where a rollback may come, there has to be a checkpoint (collective)."""
        self._saving = saving
        session = self.session
        if (
            "rollback" in actions(self.train)
            and checkpoint.newest_of_all(session.run, session.group) is None
        ):
            with session.progress.during("saving a checkpoint"):
                saving.save(state.step, asdict(state))

    def before(self) -> None:
        """A step is taken now: keep what a bad batch spoils even if its update is left out."""
        if "skip" in actions(self.train):
            self._buffers = [
                (buffer, buffer.detach().clone()) for buffer in self.session.model.buffers()
            ]

    def look(self, step: int, losses: Sequence[torch.Tensor]) -> None:
        """Look at the losses of the passes of `step` (from 0) before its update (collective).

        Raises:
            BadStepError: on all ranks the same; the gradients are still there.
        """
        if not self.looks:
            return
        session = self.session
        group = self.session.group
        mean = group.mean(float(sum(losses, start=torch.zeros(()))) / len(losses))
        if not math.isfinite(mean):
            bad = bad_losses(group, losses)
            raise bad_step(
                group, session.batches, step, bad, session.engine.stepper.gradients(), again=False
            )
        if self.spikes and (why := self.spikes.look(mean)):
            samples = session.batches.indices_of_step(step)
            said = f"step {step + 1}: {why}; samples {some(samples)} of data.train"
            found = BadStep(step + 1, "spike", said, samples, None)
            raise LossSpikeError(f"{said}\n{_END}", found)

    def answer(self, error: BadStepError, state: Any) -> None:
        """Leave the step out (collective).

        Raises:
            BadStepError: the recipe wants an end, or this is one too many.
            RollBack: the newest checkpoint is to be taken up.
        """
        found: BadStep = error.found
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
            limit = (
                "train.on_nonfinite is rollback, and no checkpoint could be written to go back to"
            )
        if limit or found.action == "stop":
            found.action = "stop"
            self._record(found)
            with contextlib.suppress(CheckpointError):
                self._newest()  # what is being written beside training is whole before the run ends
            raise type(error)(f"{error}\n{limit}" if limit else str(error), found) from None
        self.session.engine.stepper.drop_gradients()
        self._roll_back(found, state, newest) if newest else self._skip(found, state)

    def _action(self, error: BadStepError) -> str:
        spike = isinstance(error, LossSpikeError) and self.train.on_spike
        return spike.action if spike else self.train.on_nonfinite

    def _skip(self, found: BadStep, state: Any) -> None:
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        state.left_out += 1
        count = f"{state.left_out} of at most {self.train.max_skips}"
        self._record(found, f"{_field(found)} is skip: its update is left out ({count})")

    def _newest(self) -> tuple[int, Path] | None:
        """The newest checkpoint, once the one that is being written is whole (collective)."""
        with self.session.progress.during("saving a checkpoint"):
            self._saving.wait()
            return checkpoint.newest_of_all(self.session.run, self.session.group)

    def _roll_back(self, found: BadStep, state: Any, newest: tuple[int, Path]) -> None:
        batches = self.session.batches
        found.checkpoint = newest[0]
        found.places = list(batches.stretch(state.step))
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
            append_line(self.session.run.bad_steps, asdict(found))
            if said:
                print(found.message, said, sep="\n", flush=True)


class Spikes:
    """The losses of the last steps, and whether the next one jumps."""

    def __init__(self, spike: Spike) -> None:
        self.spike = spike
        self.losses: deque[float] = deque(maxlen=spike.window)

    def look(self, loss: float) -> str | None:
        """What is wrong with this loss; one that is not too high is compared with from now on."""
        if len(self.losses) == self.spike.window:
            median = statistics.median(self.losses)
            deviation = _NORMAL * statistics.median(abs(each - median) for each in self.losses)
            deviation = max(deviation, _LEAST * abs(median))
            most = median + self.spike.deviations * deviation
            if loss > most:
                return (
                    f"the loss jumped to {loss:.6g}: the last {self.spike.window} have median {median:.6g} and "
                    f"deviation {deviation:.3g}, so that {most:.6g} is the most (train.on_spike)"
                )
        self.losses.append(loss)
        return None


def _field(found: BadStep) -> str:
    return "train.on_spike" if found.kind == "spike" else "train.on_nonfinite"


_END = "The run ends here, before the weights took this step."  # diagnose/ has the advice
