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
from typing import NamedTuple

from ortlaunch.base.errors import CheckpointError, LastSaveError
from ortlaunch.base.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder import origin
from ortlaunch.run_folder.checkpoint_hold import is_checkpoint_locked_by_reader
from ortlaunch.run_folder.folder import COMPLETE, RunDir
from ortlaunch.run_folder.lines import read_json_lines_with_keys
from ortlaunch.run_folder.records import SaveLine
from ortlaunch.worker.checkpoint import save_records
from ortlaunch.worker.checkpoint.background import BackgroundTask
from ortlaunch.worker.checkpoint.transaction import (
    take_snapshot_on_all_ranks,
    write_checkpoint_of_step,
    write_snapshot_as_checkpoint,
)
from ortlaunch.worker.engine.stepping import Stepper
from ortlaunch.worker.process_group.agreement import RankAgreement
from ortlaunch.worker.process_group.distributed import DistributedContext
from ortlaunch.worker.supervision.requests import RankRequest

_NO_EXPORT = (
    "This was the save at the end: the run ends without its export. Fix the cause and restart "
    "it; with checkpoint.on_failure=continue the export is written even if the last save fails"
)
# The key in the memory of the best evaluations (worker/training/best_evaluation.py).
KEEP = "checkpoint.keep_best"


class SaverInputs(NamedTuple):
    """Values and functions that the saver of one training needs; the defaults do nothing."""

    best_step: int | None = None
    """The step of the best checkpoint, which is kept (checkpoint.keep_best)."""
    on_completed: Callable[[int], object] = lambda step: None
    """Called with the step of each complete checkpoint."""
    before_save: Callable[[], object] = lambda: None
    """Called before each save."""
    steps_in_use: Callable[[], tuple[int, ...]] = lambda: ()
    """The steps of checkpoints that an export reads."""
    completes_interval: Callable[[int], bool] = lambda step: False
    """Whether a step completes a further `checkpoint.every_epochs`."""


_NO_INPUTS = SaverInputs()


class CheckpointSaver:
    """The checkpoints of one training.

    Args:
        identity: properties of the training that only ranks know.
        inputs: the best step so far, and functions of the training.
    """

    def __init__(
        self,
        run: RunDir,
        recipe: Recipe,
        group: DistributedContext,
        stepper: Stepper,
        identity: Mapping[str, object],
        inputs: SaverInputs = _NO_INPUTS,
    ) -> None:
        self.run = run
        self.recipe = recipe
        self.group = group
        self.stepper = stepper
        self.made_by = (
            {**origin.build_origin_of_started_run(run, recipe), **identity}
            if run.plan.exists()
            else {}
        )
        self.policy = recipe.checkpoint
        # Becomes an earlier step when train.stop_after ends the training.
        self.last_step = recipe.train.steps
        self.inputs = inputs
        self.best_step = inputs.best_step
        self.last_save_time = time.monotonic()
        # `async` is a keyword of Python.
        is_async = getattr(self.policy, "async")
        # null: on GPUs. It takes host memory for one more copy of weights and optimizer state.
        self.background_group = (
            group.duplicate_on_new_cpu_group()
            if (group.device.type == "cuda" if is_async is None else is_async)
            else None
        )
        """A separate channel of the ranks, if saves are written besides training."""
        # The step, the seconds that training waited, and the thread.
        self.background_save: tuple[int, float, BackgroundTask] | None = None
        self.is_requested_by_clock = False
        if group.rank == 0:
            # Their writer died before it added their line.
            for step in save_records.checkpoint_steps_without_save_line(run):
                save_records.append_save_line_unless_disk_full(run, SaveLine(step, None))
                print(
                    f"the checkpoint of step {step} is complete; an earlier start could not record "
                    "that",
                    flush=True,
                )

    def is_checkpoint_due_after(self, completed_steps: int) -> bool:
        """Return whether a checkpoint is due after this step; the last step's always is."""
        by_steps = (
            self.policy.every_steps is not None and completed_steps % self.policy.every_steps == 0
        )
        return (
            completed_steps == self.last_step
            or by_steps
            or self.inputs.completes_interval(completed_steps)
        )

    def request_due_save_and_record_ended_background_save(
        self, rank_agreement: RankAgreement
    ) -> None:
        """Request a save from all ranks, on rank 0, when checkpoint.every_minutes have passed."""
        minutes = self.policy.every_minutes
        if (
            minutes is not None
            and self.group.rank == 0
            and time.monotonic() - self.last_save_time >= 60 * minutes
        ):
            rank_agreement.add_request(RankRequest.SAVE)
            self.is_requested_by_clock = True
        # A background save that has ended is recorded soon, not only at the next save.
        if self.background_save is not None and self.background_save[2].has_ended():
            self.wait_for_background_save_and_record_result()

    def wait_then_save_or_start_background_save(
        self,
        completed_steps: int,
        loop_state: Json,
        rank_request: RankRequest = RankRequest.NOTHING,
    ) -> None:
        """Write a checkpoint, or start to (collective).

        If a stop or a user requested it, it is complete on return.

        Raises:
            CheckpointError: it could not be written, and the run must not continue without it, or
                is at its end.
        """
        self.inputs.before_save()
        # One save at a time.
        self.wait_for_background_save_and_record_result()
        began = time.perf_counter()
        self.next_best = loop_state.get("best", {}).get(KEEP, {}).get("step")
        try:
            if self._may_save_in_background(completed_steps, rank_request):
                self._take_snapshot_and_start_background_save(completed_steps, loop_state, began)
            else:
                write_checkpoint_of_step(
                    self.run, self.made_by, self.group, self.stepper, completed_steps, loop_state
                )
                self._record_and_announce_completed_save(
                    completed_steps, time.perf_counter() - began
                )
        except CheckpointError as error:
            self._record_and_raise_or_print_failure(
                completed_steps, time.perf_counter() - began, error
            )
        finally:
            self.last_save_time = time.monotonic()
            self.is_requested_by_clock = False

    def _may_save_in_background(self, completed_steps: int, rank_request: RankRequest) -> bool:
        """Return whether training may continue before this checkpoint is complete (collective)."""
        if self.background_group is None or rank_request.stops or completed_steps == self.last_step:
            return False
        # Only rank 0 has a clock; a user's request waits for a complete checkpoint.
        is_requested_by_clock = self.is_requested_by_clock and not self.run.save_request.exists()
        return rank_request is RankRequest.NOTHING or bool(
            self.group.gather_numbers([is_requested_by_clock])[0][0]
        )

    def _take_snapshot_and_start_background_save(
        self, completed_steps: int, loop_state: Json, start_time: float
    ) -> None:
        background_group = self.background_group
        samples = loop_state["samples"]
        assert background_group is not None
        # Training changes the tensors while the thread writes, so it needs copies.
        step_snapshot = take_snapshot_on_all_ranks(
            self.run, self.group, self.stepper, completed_steps, loop_state, copies_to_host=True
        )
        work = functools.partial(
            write_snapshot_as_checkpoint,
            self.run,
            self.made_by,
            background_group,
            step_snapshot,
            completed_steps,
            samples,
        )
        self.background_save = (
            completed_steps,
            time.perf_counter() - start_time,
            BackgroundTask(work),
        )

    def wait_for_background_save_and_record_result(self) -> None:
        """Wait for the save that is in progress, if any.

        Raises:
            CheckpointError: it could not be written, and the run must not continue without it.
        """
        if self.background_save is None:
            return
        (step, waited_seconds, background_task), self.background_save = self.background_save, None
        began = time.perf_counter()
        try:
            background_task.wait_and_raise_its_error()
        except CheckpointError as error:
            self._record_and_raise_or_print_failure(
                step, waited_seconds + time.perf_counter() - began, error
            )
        else:
            self._record_and_announce_completed_save(
                step, waited_seconds + time.perf_counter() - began
            )

    def _record_and_announce_completed_save(self, step: int, waited_seconds: float) -> None:
        self._append_save_line_on_rank_0(step, waited_seconds, None)
        self.inputs.on_completed(step)
        # The former best is pruned only now, not while its successor was being written.
        if step == self.next_best:
            self.best_step = step
        self.remove_old_checkpoints_and_exports_on_rank_0()

    def _record_and_raise_or_print_failure(
        self, completed_steps: int, waited_seconds: float, save_error: CheckpointError
    ) -> None:
        self._append_save_line_on_rank_0(completed_steps, waited_seconds, str(save_error))
        is_last_step = completed_steps == self.last_step
        if self.policy.on_failure == "stop":
            raise CheckpointError(f"{save_error}\n{_NO_EXPORT}") if is_last_step else save_error
        if is_last_step:
            raise LastSaveError(str(save_error))
        self.group.print_on_rank_0(
            f"NOT SAVED: {save_error}; training continues (checkpoint.on_failure: continue)"
        )

    def does_save_answer_request(self, rank_request: RankRequest) -> bool:
        """Return whether this save answers its request: it is complete, or by the clock alone."""
        return bool(rank_request) or self.background_save is None

    def wait_for_save_and_remove_old(self) -> None:
        """Wait for a save in progress, and remove checkpoints that need not stay."""
        self.wait_for_background_save_and_record_result()
        self.remove_old_checkpoints_and_exports_on_rank_0()
        self.group.barrier()

    def _append_save_line_on_rank_0(
        self, completed_steps: int, waited_seconds: float, error_text: str | None
    ) -> None:
        if self.group.rank == 0:
            save_records.append_save_line_unless_disk_full(
                self.run, SaveLine(completed_steps, round(waited_seconds, 3), error_text)
            )

    def remove_old_checkpoints_and_exports_on_rank_0(self) -> None:
        """Remove checkpoints that need not stay."""
        if self.group.rank == 0:
            remove_old_checkpoints_and_exports(
                self.run,
                self.policy.keep,
                self.policy.keep_every,
                (
                    *self.inputs.steps_in_use(),
                    *(() if self.best_step is None else (self.best_step,)),
                ),
            )


def remove_old_checkpoints_and_exports(
    run: RunDir,
    keep_newest: int | None,
    keep_every_steps: int | None,
    needed_steps: tuple[int, ...] = (),
) -> None:
    """Remove checkpoints that neither `checkpoint.keep` nor `keep_every_steps` keeps and nobody needs."""
    if keep_newest is None:
        return
    checkpoints = run.complete_checkpoints()
    spared_steps = {
        *needed_steps,
        *(
            _first_step_at_or_after_each_multiple(
                [step for step, _ in checkpoints], keep_every_steps
            )
            if keep_every_steps
            else ()
        ),
    }
    for step, folder in checkpoints[:-keep_newest]:
        if step not in spared_steps and not is_checkpoint_locked_by_reader(folder):
            with contextlib.suppress(FileNotFoundError):
                # First, so that nobody loads the checkpoint during its removal.
                (folder / COMPLETE).unlink()
            shutil.rmtree(folder, ignore_errors=True)
            # An incomplete one is of a killed run: a command that writes one holds the checkpoint.
            partial = run.export_folder(step, "huggingface").parent.glob(f"{folder.name}*.partial")
            for export in (*automatic_export_folders(run, step), *partial):
                shutil.rmtree(export, ignore_errors=True)


def automatic_export_folders(run: RunDir, checkpoint_step: int) -> list[Path]:
    """Return the folders of a checkpoint's exports that `checkpoint.export` requested."""
    # The newest line of a folder counts: a user may have written another export there since. Only
    # its name is compared, because a run folder may have been moved.
    is_automatic_by_folder = {}
    for line in read_json_lines_with_keys(run.exports, "step", "format", "folder").values:
        folder = run.export_folder(checkpoint_step, line["format"])
        if line["step"] == checkpoint_step and Path(line["folder"]).name == folder.name:
            is_automatic_by_folder[folder] = line.get("automatic") and not line.get("error")
    return [folder for folder, is_automatic in is_automatic_by_folder.items() if is_automatic]


def _first_step_at_or_after_each_multiple(
    saved_steps: list[int], interval_steps: int
) -> Iterator[int]:
    """Yield the first step at or after each multiple: saves by the clock rarely meet a multiple."""
    kept_multiples = {0}
    for step in saved_steps:
        if step // interval_steps not in kept_multiples:
            kept_multiples.add(step // interval_steps)
            yield step
