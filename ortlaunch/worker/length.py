"""How long a run is: steps and epochs in terms of each other, known when the data are."""

from __future__ import annotations

import math

from ortlaunch.errors import InputError
from ortlaunch.json_types import Json
from ortlaunch.plan import BatchPlan
from ortlaunch.recipe import Recipe
from ortlaunch.run_folder.folder import RunDir, read_json, write_json
from ortlaunch.worker.checkpoint import CompleteCheckpoint
from ortlaunch.worker.data.left_out import taken
from ortlaunch.worker.process_group.distributed import DistributedContext


def with_steps(
    recipe: Recipe,
    batch: BatchPlan,
    run: RunDir,
    group: DistributedContext,
    samples: int,
    found: CompleteCheckpoint | None,
) -> Recipe:
    """The recipe with `train.max_steps`, from `train.epochs` where those were given (collective).

    A run that goes on keeps the steps that it began with, for its schedule runs over them; where its batches are of
    another size now, as many as take the samples that are left.

    Raises:
        InputError: ranks have read different numbers of samples, or the warm-up is longer than the run.
    """
    epochs = recipe.train.epochs
    if epochs is None:
        return recipe
    counts = group.gather(str(samples))
    if len(set(counts)) > 1:
        raise InputError(
            f"train.epochs: ranks have different numbers of samples: {', '.join(sorted(set(counts)))}"
        )
    begun = _begun(run, epochs) or {"epochs": epochs, "samples": samples}
    done, seen = (found.step, taken(run, found.samples)) if found else (0, 0)
    steps = max(
        1,
        done,
        done + math.ceil(round((epochs * begun["samples"] - seen) / batch.global_samples, 6)),
    )
    if group.rank == 0:
        write_json(run.steps, {"epochs": epochs, "samples": begun["samples"], "max_steps": steps})
        if begun["samples"] != samples:
            print(f"the data has {samples:,} samples, and had {begun['samples']:,} when this run began; it keeps its "
                  f"{steps:,} steps", flush=True)  # fmt: skip
    schedule = recipe.schedule
    decay = round(schedule.decay_ratio * steps) if schedule.name == "wsd" else 0
    if schedule.warmup_steps is not None and schedule.warmup_steps + decay > steps:
        raise InputError(
            f"schedule.warmup_steps: got {schedule.warmup_steps}, and train.epochs: {epochs:g} are {steps} steps"
            + (f", the last {decay} of them wsd's decay" if decay else "")
        )
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": steps})})


def _begun(run: RunDir, epochs: float) -> Json | None:
    """What this run settled when it began, if it goes on for as many epochs."""
    if not run.steps.exists() or not run.complete_checkpoints():
        return None
    found: Json = read_json(run.steps)
    return found if found["epochs"] == epochs else None


def length_line(recipe: Recipe, batch: BatchPlan, samples: int) -> str:
    """For a person, in steps, samples and epochs."""
    seen = recipe.train.steps * batch.global_samples
    return (
        f"data: {samples:,} samples; {recipe.train.steps:,} steps of {batch.global_samples:,} are {seen:,} samples, "
        f"{seen / samples:.3g} epochs"
    )
