"""The schedule of checkpoints, the handling of failed saves, and the removal of old checkpoints.

The training loop checks whether a save is due and starts it; all ranks do the same. transaction
writes the files.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ortlaunch.errors import CheckpointError, LastSaveError
from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.folder import COMPLETE, RunDir
from ortlaunch.run_folder.held import is_checkpoint_held
from ortlaunch.run_folder.lines import read_json_lines
from ortlaunch.run_folder.records import SaveLine
from ortlaunch.worker.checkpoint import saves
from ortlaunch.worker.checkpoint.background import Background
from ortlaunch.worker.checkpoint.transaction import save, snapshot, write
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.agreement import Agreement
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import RankRequest

_NO_EXPORT = (
    "This was the save at the end: the run ends without its export. Fix the cause and restart "
    "it; with checkpoint.on_failure=continue the export is written even if the last save fails"
)
# The key in the memory of the best evaluations (worker/training/best.py).
KEEP = "checkpoint.keep_best"


class Saving:
    """The checkpoints of one training; `identity` has its properties that only ranks know."""

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
        self.made_by = (
            {**origin.origin_of_run(run, recipe), **identity} if run.plan.exists() else {}
        )
        self.policy = recipe.checkpoint
        # Becomes an earlier step when train.stop_after ends the training.
        self.last_step = recipe.train.steps
        # Called with the step of each complete checkpoint.
        self.completed: Callable[[int], object] = lambda step: None
        # Called before each save.
        self.begins: Callable[[], object] = lambda: None
        # The steps of checkpoints that an export reads.
        self.in_use: Callable[[], tuple[int, ...]] = lambda: ()
        # Whether a step completes a further `checkpoint.every_epochs`; the loop has the batches.
        self.completes_pass: Callable[[int], bool] = lambda step: False
        self.best: int | None = None
        """The step of the best checkpoint, which is kept (checkpoint.keep_best)."""
        # Names of buffers that have nan at the begin, as a mark of their own.
        self.nan_buffers: set[str] = set()
        self.tried = time.monotonic()
        # `async` is a keyword of Python.
        chosen = getattr(self.policy, "async")
        # null: on GPUs. It takes host memory for one more copy of weights and optimizer state.
        self.beside = (
            group.apart() if (group.device.type == "cuda" if chosen is None else chosen) else None
        )
        """A separate channel of the ranks, if saves are written besides training."""
        # The step, the seconds that training waited, and the thread.
        self.background: tuple[int, float, Background] | None = None
        self.by_clock = False
        if group.rank == 0:
            self._report_unreported()

    def _report_unreported(self) -> None:
        """Report checkpoints whose writer died before it added their line to saves.jsonl."""
        for step in saves.untold(self.run):
            saves.record(self.run, SaveLine(step, None))
            print(
                f"the checkpoint of step {step} is complete; an earlier start could not record "
                "that",
                flush=True,
            )

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step; the last step's always is."""
        by_steps = self.policy.every_steps is not None and step % self.policy.every_steps == 0
        return step == self.last_step or by_steps or self.completes_pass(step)

    def request_when_due(self, agreed: Agreement) -> None:
        """Request a save from all ranks, on rank 0, when checkpoint.every_minutes have passed."""
        minutes = self.policy.every_minutes
        if (
            minutes is not None
            and self.group.rank == 0
            and time.monotonic() - self.tried >= 60 * minutes
        ):
            agreed.add(RankRequest.SAVE)
            self.by_clock = True
        # A background save that has ended is recorded soon, not only at the next save.
        if self.background is not None and self.background[2].has_ended():
            self.wait()

    def save(self, step: int, state: Json, asked: RankRequest = RankRequest.NOTHING) -> None:
        """Write a checkpoint, or start to (collective).

        If a stop or a user requested it, it is complete on return.

        Raises:
            CheckpointError: it could not be written, and the run must not continue without it, or
                is at its end.
        """
        self.begins()
        # One save at a time.
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

    def _may_wait(self, step: int, asked: RankRequest) -> bool:
        """Return whether training may continue before this checkpoint is complete (collective)."""
        if self.beside is None or asked.stops or step == self.last_step:
            return False
        # Only rank 0 has a clock; a user's request waits for a complete checkpoint.
        by_clock = self.by_clock and not self.run.save_request.exists()
        return asked is RankRequest.NOTHING or bool(self.group.gather_numbers([by_clock])[0][0])

    def _begin(self, step: int, state: Json, began: float) -> None:
        beside = self.beside
        samples = state["samples"]
        assert beside is not None
        # Training changes the tensors while the thread writes, so it needs copies.
        taken = snapshot(self.run, self.group, self.stepper, step, state, copied=True)
        work = functools.partial(write, self.run, self.made_by, beside, taken, step, samples)
        self.background = step, time.perf_counter() - began, Background(work)

    def wait(self) -> None:
        """Wait for the save that is in progress, if any.

        Raises:
            CheckpointError: it could not be written, and the run must not continue without it.
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
        self.group.print_once(
            f"NOT SAVED: {error}; training continues (checkpoint.on_failure: continue)"
        )

    def answers(self, asked: RankRequest) -> bool:
        """Return whether this save answers its request: it is complete, or by the clock alone."""
        return bool(asked) or self.background is None

    def finish(self) -> None:
        """Wait for a save in progress, and remove checkpoints that need not stay."""
        self.wait()
        self.prune()
        self.group.barrier()

    def _record(self, step: int, waited: float, error: str | None) -> None:
        if self.group.rank == 0:
            saves.record(self.run, SaveLine(step, round(waited, 3), error))

    def _completed(self, step: int) -> None:
        self.completed(step)
        # The former best is pruned only now, not while its successor was being written.
        if step == self.next_best:
            self.best = step
        self.prune()

    def prune(self) -> None:
        """Remove checkpoints that need not stay."""
        if self.group.rank == 0:
            prune(
                self.run,
                self.policy.keep,
                self.policy.keep_every,
                (*self.in_use(), *(() if self.best is None else (self.best,))),
            )


def prune(
    run: RunDir, keep: int | None, keep_every: int | None, needed: tuple[int, ...] = ()
) -> None:
    """Remove checkpoints that neither `checkpoint.keep` nor `keep_every` keeps and nobody needs."""
    if keep is None:
        return
    found = run.complete_checkpoints()
    spared = {*needed, *(_for_good([step for step, _ in found], keep_every) if keep_every else ())}
    for step, folder in found[:-keep]:
        if step not in spared and not is_checkpoint_held(folder):
            with contextlib.suppress(FileNotFoundError):
                # First, so that nobody loads the checkpoint during its removal.
                (folder / COMPLETE).unlink()
            shutil.rmtree(folder, ignore_errors=True)
            # An incomplete one is of a killed run: a command that writes one holds the checkpoint.
            partial = run.export_folder(step, "huggingface").parent.glob(f"{folder.name}*.partial")
            for export in (*automatic_exports(run, step), *partial):
                shutil.rmtree(export, ignore_errors=True)


def automatic_exports(run: RunDir, step: int) -> list[Path]:
    """Return the folders of a checkpoint's exports that `checkpoint.export` requested."""
    # The newest line of a folder counts: a user may have written another export there since. Only
    # its name is compared, because a run folder may have been moved.
    newest = {}
    for line in read_json_lines(run.exports, "step", "format", "folder").values:
        folder = run.export_folder(step, line["format"])
        if line["step"] == step and Path(line["folder"]).name == folder.name:
            newest[folder] = line.get("automatic") and not line.get("error")
    return [folder for folder, automatic in newest.items() if automatic]


def _for_good(steps: list[int], every: int) -> Iterator[int]:
    """Yield the first step at or after each multiple: saves by the clock rarely meet a multiple."""
    seen = {0}
    for step in steps:
        if step // every not in seen:
            seen.add(step // every)
            yield step
