"""Rules for `checkpoint.keep_best`, `train.stop_after`, `train.metric` and `sweep`."""

from __future__ import annotations

from collections.abc import Iterator

from ortlaunch.recipe.fields.best import DirectedMetric
from ortlaunch.recipe.fields.recipe import Recipe
from ortlaunch.recipe.fields.sweep import Search
from ortlaunch.recipe.text.source_location import Problem
from ortlaunch.tables.metrics import measures_of_task, metrics_of_task


def evaluates_with_scores(recipe: Recipe) -> bool:
    """Return whether a transformers task's metrics need the scores, and not only the loss."""
    has_score_metric = any(measure.needs_scores for measure in measures_of_task(recipe.model.task))
    return has_score_metric or bool(recipe.model.traits.predicts and recipe.train.metric)


def metric_and_evaluation_need_rules(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of metrics that the task lacks, and of fields that need evaluations."""
    if recipe.train.metric is not None and recipe.data.evaluation is None:
        yield (
            ("train.metric", "data.evaluation"),
            "has no effect without data.evaluation; set that corpus",
        )
    if recipe.train.generate is not None:
        if not recipe.model.traits.writes or recipe.data.is_custom:
            yield ("train.generate", "model.task"), f"has no effect with {recipe.model.task}"
        elif recipe.data.evaluation is None:
            yield ("train.generate", "data.evaluation"), "has no effect without data.evaluation"
    for field_path, directed_metric in (
        ("checkpoint.keep_best", recipe.checkpoint.keep_best),
        ("train.stop_after", recipe.train.stop_after),
    ):
        if directed_metric is None:
            continue
        yield from _known_metric_and_mode_rules(recipe, field_path, directed_metric)
        # The evaluation at the end alone has nothing to be compared with.
        if not recipe.train.evaluates:
            yield (
                (field_path, "train.evaluate_every_steps"),
                "has no effect without train.evaluate_every_steps or "
                "evaluate_every_epochs; set one of them",
            )
    if recipe.sweep is not None:
        yield from _sweep_metric_and_sampler_rules(recipe, recipe.sweep)


def _known_metric_and_mode_rules(
    recipe: Recipe, field_path: str, directed_metric: DirectedMetric
) -> Iterator[Problem]:
    # Names of the user's own metrics are known only when they run: any name is accepted then.
    known_metrics = metrics_of_task(recipe.model.task)
    has_own_metric = recipe.train.metric is not None or recipe.model.traits.is_own
    if directed_metric.metric not in known_metrics and not has_own_metric:
        yield (
            (f"{field_path}.metric", "model.task"),
            f"got {directed_metric.metric}; evaluations of task {recipe.model.task} have {', '.join(known_metrics)}",
        )
    elif directed_metric.metric not in known_metrics and directed_metric.mode is None:
        yield (
            # Without a task nothing is known of the metric, and the rule is left out.
            (f"{field_path}.mode", f"{field_path}.metric", "model.task"),
            f"is missing: give min or max, because {directed_metric.metric} is your own metric",
        )


def _sweep_metric_and_sampler_rules(recipe: Recipe, sweep: Search) -> Iterator[Problem]:
    for metric_index, directed_metric in enumerate(sweep.metrics):
        yield from _known_metric_and_mode_rules(
            recipe, f"sweep.metrics[{metric_index}]", directed_metric
        )
    if recipe.data.evaluation is None:
        yield (
            ("sweep.metrics", "data.evaluation"),
            "needs evaluations; set data.evaluation, or data.evaluation: {share: 0.05}",
        )
    if sweep.max_trials is None and sweep.steps is None and sweep.hours is None:
        yield ("sweep.trials",), "is missing: give trials, steps or hours"
    endless_fields = [
        field_name
        for field_name, parameter in sweep.space.items()
        if parameter.finite_values is None
    ]
    if sweep.sampler == "grid" and endless_fields:
        yield (
            ("sweep.sampler", "sweep.space"),
            f"got grid, but {', '.join(endless_fields)} has no finite set of values; use choice or int",
        )
    if sweep.pruner != "none" and not recipe.train.evaluates:
        yield (
            ("sweep.pruner", "train.evaluate_every_steps"),
            (
                f"got {sweep.pruner}, which compares evaluations before the end; set "
                "train.evaluate_every_steps or evaluate_every_epochs"
            ),
        )
    for field_name in ("pruner", "sampler"):
        method = getattr(sweep, field_name)
        if len(sweep.metrics) > 1 and method not in ("none", "random", "grid", "tpe", "gp"):
            yield (
                (f"sweep.{field_name}", "sweep.metrics"),
                f"got {method}, which improves one metric only",
            )
    if sweep.submit and recipe.submit.scheduler != "slurm":
        yield (
            ("sweep.submit", "submit.scheduler"),
            f"got true, and submit.scheduler is {recipe.submit.scheduler}; only slurm runs trials",
        )
