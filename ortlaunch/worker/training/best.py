"""The best evaluation so far: which checkpoint is kept for it, and when training stops early.

Every checkpoint stores it, and it is the same on all ranks: `TrainState.best` has an entry for each
of the recipe's requests, KEEP and STOP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortlaunch.errors import HookError, InputError, first_message_line
from ortlaunch.evaluation_metrics import metrics_of_task
from ortlaunch.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.best import KeepBest, StopAfter
from ortlaunch.run_folder.folder import COMPLETE
from ortlaunch.worker.checkpoint.saving import KEEP
from ortlaunch.worker.data import Samples
from ortlaunch.worker.data.samples import Sample
from ortlaunch.worker.evaluation.evaluation import evaluate
from ortlaunch.worker.session import Session

STOP = "train.stop_after"
Memory = dict[str, Json]


def record(recipe: Recipe, memory: Memory, step: int, evaluated: dict[str, float]) -> None:
    """Update the memory with an evaluation; a value that is absent or not finite is never best.

    Before the first finite value, the best one and its step are None.
    """
    for wish, asked in _wishes(recipe):
        value = evaluated.get(asked.metric, math.nan)
        before = memory.get(wish)
        found: Json = {"metric": asked.metric, "mode": asked.direction}
        if math.isfinite(value) and (
            before is None
            or before["value"] is None
            or _is_better(value, before["value"], asked.direction)
        ):
            memory[wish] = {**found, "value": value, "step": step, "since": 0}
        elif before is not None or asked.metric in evaluated:
            # `since` counts evaluations after the best one, for train.stop_after.
            before = before or {**found, "value": None, "step": None, "since": 0}
            memory[wish] = {**before, "since": before["since"] + 1}


def not_finite(recipe: Recipe, evaluated: dict[str, float]) -> list[str]:
    """Return a sentence for the loss, and for each request's metric, that is inf or nan."""
    judged = dict.fromkeys(["loss", *(asked.metric for _, asked in _wishes(recipe))])
    return [
        f"this evaluation's {name} is {evaluated[name]}"
        for name in judged
        if not math.isfinite(evaluated.get(name, 0.0))
    ]


def without(recipe: Recipe, evaluated: dict[str, float]) -> list[str]:
    """Return a sentence for each request whose metric the evaluation lacks."""
    return [
        f"{wish}.metric: got {asked.metric}; an evaluation of this run has {', '.join(evaluated)}"
        for wish, asked in _wishes(recipe)
        if asked.metric not in evaluated
    ]


def require_metrics(session: Session) -> None:
    """Before step 1, evaluate a few samples, for a metric that not all evaluations have.

    It evaluates as many samples as the ranks take at once.

    Raises:
        InputError: evaluations have no such metric (collective).
    """
    recipe = session.recipe
    samples = session.data.evaluation
    always = {name for name, metric in metrics_of_task(recipe.model.task).items() if metric.always}
    if samples is None or all(asked.metric in always for _, asked in _wishes(recipe)):
        return
    with session.progress.during("evaluating"):
        try:
            # One micro batch of each rank.
            found = evaluate(
                session, _First(samples, session.plan.batch.micro_samples * session.group.size)
            )
        # The user's metric may need more samples than these few.
        except HookError as error:
            session.group.print_once(
                f"train.metric cannot be tested before step 1: {first_message_line(error)}"
            )
            return
    if found is not None and (wrong := without(recipe, found)):
        raise InputError("\n".join(wrong))


class _First:
    """The first samples of a set."""

    def __init__(self, samples: Samples, most: int) -> None:
        self._samples = samples
        self._count = min(most, len(samples))

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        return self._samples.sample(index, epoch)


def kept_step(memory: Memory) -> int | None:
    """Return the step of the kept checkpoint; None without one, or without an evaluation."""
    return memory[KEEP]["step"] if KEEP in memory else None


def stops_early(recipe: Recipe, step: int, memory: Memory) -> str | None:
    """Return why training ends at this step, before its last one; None if it continues."""
    asked = recipe.train.stop_after
    found = memory.get(STOP)
    if (
        asked is None
        or found is None
        or step >= recipe.train.steps
        or found["since"] < asked.evaluations
    ):
        return None
    early = f"stopped early after step {step} of {recipe.train.steps} (train.stop_after)"
    if found["value"] is None:
        return f"{early}: {asked.metric} was not finite in {found['since']} evaluations"
    return (
        f"{early}: {asked.metric} was best, {found['value']:.6g}, after step {found['step']}, "
        f"{found['since']} evaluations ago"
    )


def remembered(session: Session, memory: Memory) -> Memory:
    """Return the part of a checkpoint's memory that is valid here (collective).

    An entry must be of the same metric, and the kept checkpoint must be in this run's folder.
    """
    kept = {
        wish: memory[wish]
        for wish, asked in _wishes(session.recipe)
        if wish in memory
        and (memory[wish]["metric"], memory[wish]["mode"]) == (asked.metric, asked.direction)
    }
    step = kept_step(kept)
    here = step is not None and (session.run.checkpoint_folder(step) / COMPLETE).exists()
    # The kept checkpoint may have been pruned, or belong to the run that this one was started from.
    # Rank 0's answer counts: hosts may see a shared file system in different states.
    if step is not None and not session.group.gather_numbers([here])[0][0]:
        del kept[KEEP]
        session.group.print_once(
            f"checkpoint.keep_best: that of step {step} is not in this run folder; the best "
            "is determined from now on"
        )
    return kept


def _wishes(recipe: Recipe) -> Iterator[tuple[str, KeepBest | StopAfter]]:
    for wish, asked in ((KEEP, recipe.checkpoint.keep_best), (STOP, recipe.train.stop_after)):
        if asked is not None:
            yield wish, asked


def _is_better(value: float, other: float, direction: str) -> bool:
    return value < other if direction == "min" else value > other
