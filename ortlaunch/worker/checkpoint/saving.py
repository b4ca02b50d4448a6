"""When a checkpoint is written, what becomes of a save that fails, which ones stay, and what is run after each.

The loop asks whether one is due and has it saved; all ranks do the same. Writing itself is transaction's.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from typing import Any

from ortlaunch.errors import CheckpointError
from ortlaunch.recipe import Recipe
from ortlaunch.run import origin
from ortlaunch.run.folder import RunDir
from ortlaunch.run.records import SaveLine
from ortlaunch.worker.agreement import Agreement
from ortlaunch.worker.checkpoint import saves
from ortlaunch.worker.checkpoint.manifest import COMPLETE
from ortlaunch.worker.checkpoint.on_complete import Commands
from ortlaunch.worker.checkpoint.transaction import save
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.requests import Ask
from ortlaunch.worker.stepping import Stepper


class Saving:
    """The checkpoints of one training, from its first step to its last; `data` is the identity of what it reads."""

    def __init__(
        self, run: RunDir, recipe: Recipe, group: DistributedContext, stepper: Stepper, data: dict[str, Any]
    ) -> None:
        self.run, self.recipe, self.group, self.stepper = run, recipe, group, stepper
        self.made_by = {**origin.of_run(run, recipe), "data": data} if run.plan.exists() else {}
        self.policy = recipe.checkpoint
        self.tried = time.monotonic()
        self.commands = Commands(self.policy, run) if group.rank == 0 and self.policy.on_complete else None

    def is_due(self, step: int) -> bool:
        """Whether one is to be written after this step, by their number; the last step's always is."""
        every = self.policy.every_steps
        return step == self.recipe.train.steps or (every is not None and step % every == 0)

    def ask_in_time(self, agreed: Agreement) -> None:
        """Rank 0 asks all ranks for one when its clock says so."""
        minutes = self.policy.every_minutes
        if minutes is not None and self.group.rank == 0 and time.monotonic() - self.tried >= 60 * minutes:
            agreed.ask(Ask.SAVE)

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Write one (collective).

        Raises:
            CheckpointError: it could not be written, and the run must not go on without, or is at its end.
        """
        began = time.perf_counter()
        try:
            save(self.run, self.made_by, self.group, self.stepper, step, state)
        except CheckpointError as error:
            self._record(step, began, str(error))
            if self.policy.on_failure == "stop" or step == self.recipe.train.steps:
                raise
            if self.group.rank == 0:
                print(f"NOT SAVED: {error}; training goes on (checkpoint.on_failure: continue)", flush=True)
        else:
            self._record(step, began, None)
            self._completed(step)
        finally:
            self.tried = time.monotonic()

    def finish(self) -> None:
        """Wait for what runs after checkpoints; then those that stayed for it go, too."""
        if self.commands is not None:
            self.commands.finish()
        if self.group.rank == 0:
            prune(self.run, self.policy.keep, self.policy.keep_every)
        self.group.barrier()

    def _record(self, step: int, began: float, error: str | None) -> None:
        if self.group.rank == 0:
            saves.record(self.run, SaveLine(step, round(time.perf_counter() - began, 3), error))

    def _completed(self, step: int) -> None:
        if self.commands is not None:
            self.commands.begin(step)
        if self.group.rank == 0:
            prune(self.run, self.policy.keep, self.policy.keep_every, self.commands.busy() if self.commands else ())


def prune(run: RunDir, keep: int | None, keep_every: int | None, busy: Iterator[int] | tuple[int, ...] = ()) -> None:
    """Take away what `checkpoint.keep` and `keep_every` do not keep, and no command is at work on."""
    if keep is None:
        return
    found = run.complete_checkpoints()
    spared = {*busy, *(_for_good([step for step, _ in found], keep_every) if keep_every else ())}
    for step, folder in found[:-keep]:
        if step not in spared:
            with contextlib.suppress(FileNotFoundError):
                (folder / COMPLETE).unlink()  # first, so that nobody takes it while it goes
            shutil.rmtree(folder, ignore_errors=True)


def _for_good(steps: list[int], every: int) -> Iterator[int]:
    """The first at or after each multiple: saves by the clock meet no multiple but by chance."""
    seen = {0}
    for step in steps:
        if step // every not in seen:
            seen.add(step // every)
            yield step
