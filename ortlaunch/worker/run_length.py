"""The length of a run in steps and epochs, computed after the data are read."""

from __future__ import annotations

import math

from ortlaunch.base.errors import InputError
from ortlaunch.launch_plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged, write_json_atomically
from ortlaunch.worker.checkpoint import CompleteCheckpoint
from ortlaunch.worker.data.skipped_positions import samples_trained_in_positions
from ortlaunch.worker.data.streams.samples import ENDLESS
from ortlaunch.worker.process_group.distributed import DistributedContext


def resolve_max_steps_and_write_length(
    recipe: Recipe,
    batch_plan: BatchPlan,
    run: RunDir,
    group: DistributedContext,
    sample_count: int,
    start_checkpoint: CompleteCheckpoint | None,
) -> Recipe:
    """Return the recipe with `train.max_steps`, computed from `train.epochs` if set (collective).

    Lengths and intervals by epochs are recorded in steps.json.

    A resumed run keeps its number of steps. If its batch size has changed, the remaining steps are
    as many as the remaining samples need.

    Args:
        recipe: the run's recipe.
        batch_plan: the batch sizes of this run.
        run: the run folder.
        group: the ranks of the run.
        sample_count: the number of training samples.
        start_checkpoint: the checkpoint to resume from, or None.

    Raises:
        InputError: ranks have read different numbers of samples, or the warm-up is longer than the
            run.
    """
    epochs = recipe.train.epochs
    intervals = {
        name: round(every_epochs * sample_count / batch_plan.global_samples, 3)
        for name, every_epochs in recipe.name_and_epochs_of_intervals()
    }
    if epochs is None and not intervals:
        return recipe
    counts = group.gather(sample_count)
    if len(set(counts)) > 1:
        raise InputError(
            "train: a length in epochs, and ranks have different numbers of samples: "
            f"{', '.join(map(str, sorted(set(counts))))}"
        )
    # The samples of the first start count, because the schedule runs over its steps.
    length_samples = _recorded_samples_of_same_epochs_or_none(run, epochs)
    if length_samples is None:
        length_samples = sample_count
    done_steps, seen_samples = (
        (start_checkpoint.step, samples_trained_in_positions(run, start_checkpoint.samples))
        if start_checkpoint
        else (0, 0)
    )
    steps = recipe.train.max_steps
    if steps is None:
        steps_left = ((epochs or 0) * length_samples - seen_samples) / batch_plan.global_samples
        # Rounded before ceil, so that a rounding error of the division does not add a step.
        steps = max(1, done_steps, done_steps + math.ceil(round(steps_left, 6)))
    if group.rank == 0:
        length = {"epochs": epochs, "samples": length_samples, "max_steps": steps}
        write_json_atomically(run.steps, {**length, **intervals})
        if length_samples != sample_count:
            print(f"the data has {sample_count:,} samples, and had {length_samples:,} when this run "
                f"began; the run keeps its {steps:,} steps", flush=True)  # fmt: skip
    schedule = recipe.schedule
    decay = round(schedule.decay_ratio * steps) if schedule.name == "wsd" else 0
    if epochs and schedule.warmup_steps is not None and schedule.warmup_steps + decay > steps:
        raise InputError(
            f"schedule.warmup_steps: got {schedule.warmup_steps}, and train.epochs: {epochs:g} "
            f"are {steps} steps" + (f", the last {decay} of them wsd's decay" if decay else "")
        )
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": steps})})


def _recorded_samples_of_same_epochs_or_none(run: RunDir, epochs: float | None) -> int | None:
    # Without a complete checkpoint the run starts from the beginning.
    if not run.steps.exists() or not run.complete_checkpoints():
        return None
    length_record = read_json_or_raise_damaged(run.steps)
    return int(length_record["samples"]) if length_record["epochs"] == epochs else None


def run_length_line(
    recipe: Recipe,
    batch_plan: BatchPlan,
    sample_count: int,
    completed_steps: int = 0,
    trained_samples: int = 0,
) -> str:
    """Return a line for the terminal with the length in steps, samples and epochs.

    Args:
        recipe: the run's recipe.
        batch_plan: the batch of the steps to come.
        sample_count: samples of the data.
        completed_steps: steps of the checkpoint from which the run continues.
        trained_samples: the samples of these steps, whose batch may have had another size.
    """
    steps_left = max(recipe.train.steps - completed_steps, 0)
    seen_samples = trained_samples + steps_left * batch_plan.global_samples
    steps = f"{steps_left:,} steps of {batch_plan.global_samples:,} are {seen_samples - trained_samples:,} samples"
    if completed_steps:
        steps += f", {seen_samples:,} with those of the {completed_steps:,} steps before"
    if sample_count >= ENDLESS:
        return f"data: streamed; {steps}"
    per_epoch = sample_count / batch_plan.global_samples
    repeated = f" (a step takes samples up to {math.ceil(1 / per_epoch):,} times)"
    # A length in epochs is whole steps, so that the last one takes samples of the epoch after it.
    requested_samples = round((recipe.train.epochs or 0) * sample_count)
    filled = 0 < seen_samples - requested_samples < batch_plan.global_samples
    return (
        f"data: {sample_count:,} samples; {steps}, {float(f'{seen_samples / sample_count:.3g}'):,.9g} epochs"
        + (
            f": {requested_samples:,} of train.epochs: {recipe.train.epochs:g}, and "
            f"{seen_samples - requested_samples:,} more that fill the last step"
            if recipe.train.epochs and filled
            else ""
        )
        + (repeated if per_epoch < 1 else "")
    ) + "".join(
        f"; {name.replace('_', ' ')} {every_epochs:g} epochs: {max(1.0, every_epochs * per_epoch):,.4g} steps"
        for name, every_epochs in recipe.name_and_epochs_of_intervals()
    )
