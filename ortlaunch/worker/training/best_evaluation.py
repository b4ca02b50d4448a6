"""The best evaluation so far: which checkpoint is kept for it, and when training stops early.

Every checkpoint stores it, and it is the same on all ranks: `TrainState.best` has an entry for each
of the recipe's requests, KEEP and STOP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ortlaunch.base.errors import HookError, InputError, first_message_line
from ortlaunch.base.json_types import Json
from ortlaunch.recipe import Recipe
from ortlaunch.recipe.fields.best import KeepBest, StopAfter
from ortlaunch.run_folder.folder import COMPLETE
from ortlaunch.tables.metrics import metrics_of_task
from ortlaunch.worker.checkpoint.saver import KEEP
from ortlaunch.worker.data.mixture import SampleSubset
from ortlaunch.worker.evaluation.evaluation import seed_and_evaluate_loss_and_metrics_unless_stopped
from ortlaunch.worker.session import Session

STOP = "train.stop_after"
BestEvaluations = dict[str, Json]


def update_best_evaluations(
    recipe: Recipe,
    best_evaluations: BestEvaluations,
    evaluated_step: int,
    evaluation_metrics: dict[str, float],
) -> None:
    """Update the memory with an evaluation; a value that is absent or not finite is never best.

    Before the first finite value, the best one and its step are None.
    """
    for request_name, request in _named_best_and_stop_requests(recipe):
        value = evaluation_metrics.get(request.metric, math.nan)
        # `since` counts evaluations after the best one, for train.stop_after.
        entry = best_evaluations.get(request_name) or {
            "metric": request.metric,
            "mode": request.direction,
            "value": None,
            "step": None,
            "since": 0,
        }
        if math.isfinite(value) and (
            entry["value"] is None
            or (value < entry["value"] if request.direction == "min" else value > entry["value"])
        ):
            best_evaluations[request_name] = {
                **entry,
                "value": value,
                "step": evaluated_step,
                "since": 0,
            }
        elif request_name in best_evaluations or request.metric in evaluation_metrics:
            best_evaluations[request_name] = {**entry, "since": entry["since"] + 1}


def non_finite_metric_messages(recipe: Recipe, evaluation_metrics: dict[str, float]) -> list[str]:
    """Return a sentence for the loss, and for each request's metric, that is inf or nan."""
    judged = dict.fromkeys(
        ["loss", *(request.metric for _, request in _named_best_and_stop_requests(recipe))]
    )
    return [
        f"this evaluation's {name} is {evaluation_metrics[name]}"
        for name in judged
        if not math.isfinite(evaluation_metrics.get(name, 0.0))
    ]


def missing_metric_messages(recipe: Recipe, evaluation_metrics: dict[str, float]) -> list[str]:
    """Return a sentence for each request whose metric the evaluation lacks."""
    return [
        f"{request_name}.metric: got {request.metric}; an evaluation of this run has {', '.join(evaluation_metrics)}"
        for request_name, request in _named_best_and_stop_requests(recipe)
        if request.metric not in evaluation_metrics
    ]


def require_best_metrics_by_test_evaluation(session: Session) -> None:
    """Before step 1, evaluate a few samples, for a metric that not all evaluations have.

    It evaluates as many samples as the ranks take at once.

    Raises:
        InputError: evaluations have no such metric (collective).
    """
    recipe = session.recipe
    samples = session.data.evaluation
    always = {name for name, metric in metrics_of_task(recipe.model.task).items() if metric.always}
    if samples is None or all(
        request.metric in always for _, request in _named_best_and_stop_requests(recipe)
    ):
        return
    with session.progress.show_activity_during("evaluating"):
        try:
            # One micro batch of each rank.
            batch = session.plan.batch
            count = min(batch.micro_samples * batch.data_parallel_ranks, len(samples))
            evaluation_metrics = seed_and_evaluate_loss_and_metrics_unless_stopped(
                session, SampleSubset(samples, count, lambda indices: indices)
            )
        # The user's metric may need more samples than these few.
        except HookError as error:
            session.group.print_on_rank_0(
                f"train.metric cannot be tested before step 1: {first_message_line(error)}"
            )
            return
    if evaluation_metrics is not None and (
        missing_messages := missing_metric_messages(recipe, evaluation_metrics)
    ):
        raise InputError("\n".join(missing_messages))


def kept_best_step_or_none(best_evaluations: BestEvaluations) -> int | None:
    """Return the step of the kept checkpoint; None without one, or without an evaluation."""
    return best_evaluations[KEEP]["step"] if KEEP in best_evaluations else None


def early_stop_reason_or_none(
    recipe: Recipe, completed_steps: int, best_evaluations: BestEvaluations
) -> str | None:
    """Return why training ends at this step, before its last one; None if it continues."""
    stop_request = recipe.train.stop_after
    best_entry = best_evaluations.get(STOP)
    if (
        stop_request is None
        or best_entry is None
        or completed_steps >= recipe.train.steps
        or best_entry["since"] < stop_request.evaluations
    ):
        return None
    early = f"stopped early after step {completed_steps} of {recipe.train.steps} (train.stop_after)"
    if best_entry["value"] is None:
        return f"{early}: {stop_request.metric} was not finite in {best_entry['since']} evaluations"
    return (
        f"{early}: {stop_request.metric} was best, {best_entry['value']:.6g}, after step {best_entry['step']}, "
        f"{best_entry['since']} evaluations ago"
    )


def best_evaluations_without_stale_ones(
    session: Session, best_evaluations: BestEvaluations
) -> BestEvaluations:
    """Return the part of a checkpoint's memory that is valid here (collective).

    An entry must be of the same metric, and the kept checkpoint must be in this run's folder.
    """
    valid_memory = {
        request_name: best_evaluations[request_name]
        for request_name, request in _named_best_and_stop_requests(session.recipe)
        if request_name in best_evaluations
        and (best_evaluations[request_name]["metric"], best_evaluations[request_name]["mode"])
        == (request.metric, request.direction)
    }
    step = kept_best_step_or_none(valid_memory)
    is_checkpoint_here = (
        step is not None and (session.run.checkpoint_folder(step) / COMPLETE).exists()
    )
    # The kept checkpoint may have been pruned, or belong to the run that this one was started from.
    # Rank 0's answer counts: hosts may see a shared file system in different states.
    if step is not None and not session.group.gather_numbers([is_checkpoint_here])[0][0]:
        del valid_memory[KEEP]
        session.group.print_on_rank_0(
            f"checkpoint.keep_best: that of step {step} is not in this run folder; the best "
            "is determined from now on"
        )
    return valid_memory


def _named_best_and_stop_requests(recipe: Recipe) -> Iterator[tuple[str, KeepBest | StopAfter]]:
    for request_name, request in (
        (KEEP, recipe.checkpoint.keep_best),
        (STOP, recipe.train.stop_after),
    ):
        if request is not None:
            yield request_name, request
