"""Rules for `checkpoint.keep_best`, `train.stop_after` and `train.metric`."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.evaluation_metrics import measures_of, metrics_of
from ortlaunch.recipe.fields.models import Recipe
from ortlaunch.recipe.text.place import Problem


def evaluates_with_scores(recipe: Recipe) -> bool:
    """Return whether a transformers task's metrics need the scores, and not only the loss."""
    needed = any(measure.needs_scores for measure in measures_of(recipe.model.task))
    return needed or bool(recipe.model.traits.predicts and recipe.train.metric)


def best_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of metrics that the task lacks, and of fields that need evaluations."""
    if recipe.train.metric is not None and recipe.data.evaluation is None:
        yield (
            ("train.metric", "data.evaluation"),
            "has no effect without data.evaluation; set that corpus",
        )
    for path, asked in (
        ("checkpoint.keep_best", recipe.checkpoint.keep_best),
        ("train.stop_after", recipe.train.stop_after),
    ):
        if asked is None:
            continue
        # Names of the user's own metrics are known only when they run: any name is accepted then.
        known = metrics_of(recipe.model.task)
        own = recipe.train.metric is not None or recipe.model.traits.is_own
        if asked.metric not in known and not own:
            message = (
                f"got {asked.metric}; evaluations of task {recipe.model.task} have "
                f"{', '.join(known)}"
            )
            yield (f"{path}.metric", "model.task"), message
        elif asked.metric not in known and asked.mode is None:
            message = f"is missing: give min or max, because {asked.metric} is your own metric"
            yield (f"{path}.mode", f"{path}.metric"), message
        # The evaluation at the end alone has nothing to be compared with.
        if not recipe.train.evaluates:
            yield (
                (path, "train.evaluate_every_steps"),
                "has no effect without train.evaluate_every_steps or "
                "evaluate_every_epochs; set one of them",
            )
