"""When a checkpoint is written, what becomes of a save that fails, and which ones stay.

The loop asks whether one is due and has it saved; all ranks do the same. Writing itself is transaction's.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping

from ortlaunch.errors import CheckpointError, LastSaveError
from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import COMPLETE, RunDir
from ortlaunch.run_folder.held import is_held
from ortlaunch.run_folder.records import SaveLine
from ortlaunch.worker.checkpoint import saves
from ortlaunch.worker.checkpoint.background import Background
from ortlaunch.worker.checkpoint.transaction import save, snapshot, write
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.agreement import Agreement
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import Ask

_NO_EXPORT = (
    "This was the save at the end: the run ends without its export. Start it again once this is mended; "
    "checkpoint.on_failure=continue writes the export whatever becomes of the last save"
)
KEEP = "checkpoint.keep_best"  # in the memory of the best evaluations (worker/training/best.py)


class Saving:
    """The checkpoints of one training, from its first step to its last; `identity`: what ranks alone know of it."""

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        group: DistributedContext,
        stepper: Stepper,
        identity: Mapping[str, object],
    ) -> None:
        self.run = run
        self.recipe = recipe
        self.group = group
        self.stepper = stepper
        self.made_by = {**origin.of_run(run, recipe), **identity} if run.plan.exists() else {}
        self.policy = recipe.checkpoint
        self.last_step = recipe.train.steps  # earlier where train.stop_after says so
        self.completed: Callable[[int], object] = lambda step: (
            None
        )  # told of each complete checkpoint
        self.best: int | None = None
        """The step of the best checkpoint, which stays (checkpoint.keep_best)."""
        self.tried = time.monotonic()
        chosen = getattr(self.policy, "async")
        self.beside = (
            group.apart() if (group.device.type == "cuda" if chosen is None else chosen) else None
        )
        """The ranks on a channel of their own, where saves are written beside training."""
        self.background: tuple[int, float, Background] | None = (
            None  # step, seconds that training waited, the thread
        )
        self.by_clock = False
        if group.rank == 0:
            self._tell_untold()

    def _tell_untold(self) -> None:
        """An earlier start died between a checkpoint's last byte and its line."""
        for step in saves.untold(self.run):
            saves.record(self.run, SaveLine(step, None))
            print(
                f"the checkpoint of step {step} is whole, and an earlier start could not say so any more",
                flush=True,
            )

    def is_due(self, step: int) -> bool:
        """Whether one is to be written after this step, by their number; the last step's always is."""
        every = self.policy.every_steps
        return step == self.last_step or (every is not None and step % every == 0)

    def ask_in_time(self, agreed: Agreement) -> None:
        """Rank 0 asks all ranks for one when its clock says so."""
        minutes = self.policy.every_minutes
        if (
            minutes is not None
            and self.group.rank == 0
            and time.monotonic() - self.tried >= 60 * minutes
        ):
            agreed.ask(Ask.SAVE)
            self.by_clock = True
        if self.background is not None and self.background[2].has_ended():
            self.wait()

    def save(self, step: int, state: Json, asked: Ask = Ask.NOTHING) -> None:
        """Write one (collective), or begin to; one that a stop or a person asks for is complete at the end.

        Raises:
            CheckpointError: it could not be written, and the run must not go on without, or is at its end.
        """
        self.wait()
        began = time.perf_counter()
        self.next_best = state.get("best", {}).get(KEEP, {}).get("step")
        try:
            if self._may_wait(step, asked):
                self._begin(step, state, began)
            else:
                save(self.run, self.made_by, self.group, self.stepper, step, state)
                self._saved(step, time.perf_counter() - began)
        except CheckpointError as error:
            self._failed(step, time.perf_counter() - began, error)
        finally:
            self.tried = time.monotonic()
            self.by_clock = False

    def _may_wait(self, step: int, asked: Ask) -> bool:
        """Whether training may go on before this one is complete (collective)."""
        if self.beside is None or asked.stops or step == self.last_step:
            return False
        by_clock = self.by_clock and not self.run.save_request.exists()
        return asked is Ask.NOTHING or bool(self.group.gather_numbers([by_clock])[0][0])

    def _begin(self, step: int, state: Json, began: float) -> None:
        beside = self.beside
        samples = state["samples"]
        assert beside is not None
        taken = snapshot(self.run, self.group, self.stepper, step, state, copied=True)
        work = functools.partial(write, self.run, self.made_by, beside, taken, step, samples)
        self.background = step, time.perf_counter() - began, Background(work)

    def wait(self) -> None:
        """Wait for the save that is being written, if one is.

        Raises:
            CheckpointError: it could not be written, and the run must not go on without.
        """
        if self.background is None:
            return
        (step, waited, background), self.background = self.background, None
        began = time.perf_counter()
        try:
            background.wait()
        except CheckpointError as error:
            self._failed(step, waited + time.perf_counter() - began, error)
        else:
            self._saved(step, waited + time.perf_counter() - began)

    def _saved(self, step: int, waited: float) -> None:
        self._record(step, waited, None)
        self._completed(step)

    def _failed(self, step: int, waited: float, error: CheckpointError) -> None:
        self._record(step, waited, str(error))
        last = step == self.last_step
        if self.policy.on_failure == "stop":
            raise CheckpointError(f"{error}\n{_NO_EXPORT}") if last else error
        if last:
            raise LastSaveError(str(error))
        if self.group.rank == 0:
            print(
                f"NOT SAVED: {error}; training goes on (checkpoint.on_failure: continue)",
                flush=True,
            )

    def answers(self, asked: Ask) -> bool:
        """Whether the save that was just made is the one that a person waits for: whole, or asked for by the clock."""
        return bool(asked) or self.background is None

    def finish(self) -> None:
        """Wait for what is written, and take away what need not stay."""
        self.wait()
        self._prune()
        self.group.barrier()

    def _record(self, step: int, waited: float, error: str | None) -> None:
        if self.group.rank == 0:
            saves.record(self.run, SaveLine(step, round(waited, 3), error))

    def _completed(self, step: int) -> None:
        self.completed(step)
        if (
            step == self.next_best
        ):  # the one before it goes now, not while this one was being written
            self.best = step
        self._prune()

    def _prune(self) -> None:
        """Take away what need not stay."""
        if self.group.rank == 0:
            prune(
                self.run,
                self.policy.keep,
                self.policy.keep_every,
                () if self.best is None else (self.best,),
            )


def prune(
    run: RunDir, keep: int | None, keep_every: int | None, needed: tuple[int, ...] = ()
) -> None:
    """Take away what `checkpoint.keep` and `keep_every` do not keep, and nobody needs."""
    if keep is None:
        return
    found = run.complete_checkpoints()
    spared = {*needed, *(_for_good([step for step, _ in found], keep_every) if keep_every else ())}
    for step, folder in found[:-keep]:
        if step not in spared and not is_held(folder):
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
