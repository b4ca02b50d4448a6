"""Convert intervals of logging, evaluation and saves, and the use of evaluations."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from ortlaunch.importers.draft import OWN_VALUE, Draft, number_or_none
from ortlaunch.importers.rules import (
    ConfigKey,
    EvenIfEmpty,
    Rule,
    Rules,
    drop,
    needless,
    put,
)
from ortlaunch.recipe.text.source_location import parse_key_path
from ortlaunch.tables.metrics import METRICS, metrics_of_task


class _Interval(NamedTuple):
    """The recipe's keys of an interval; epochs is "" where steps alone are counted."""

    steps: str
    epochs: str = ""

    def key_already_set_or_none(self, draft: Draft) -> str | None:
        """Return the key that the recipe will have; None if it will have none."""
        return next(
            (
                recipe_key
                for recipe_key in self
                if recipe_key and draft.expected_recipe_value_or_none(recipe_key) is not None
            ),
            None,
        )


_EVALUATIONS = _Interval("train.evaluate_every_steps", "train.evaluate_every_epochs")
_SAVES = _Interval("checkpoint.every_steps", "checkpoint.every_epochs")
_DEFAULT_LOGGING_STEPS = 500  # Trainer's default of logging_steps
_NO_DATA_REMARK = "there is no data.evaluation"


def _step_count_or_none(key: ConfigKey, value: float | None) -> int | None:
    """Return a number of steps; None if it is no number, or a share of an unknown number."""
    # In Trainer a value below 1 is a share of max_steps.
    max_steps = number_or_none(key.sibling("max_steps")) or 0
    if value is None or value >= 1:
        return int(value) if value is not None and float(value).is_integer() else None
    return math.ceil(value * max_steps) if value > 0 and max_steps > 0 else None


def _steps_or_share(interval: _Interval, key: ConfigKey) -> Rule:
    step_count = _step_count_or_none(key, key.number)
    is_share = key.number is not None and key.number < 1 and step_count is None
    for recipe_key in filter(None, interval):
        if key.draft.recipe_tree.find_subtree(parse_key_path(recipe_key)):
            return drop(f"{recipe_key} is set by another key already")
    if is_share and interval.epochs and key.number:
        # A share of the whole training, whose length is in epochs.
        return put(interval.epochs, round(key.number * _training_epochs(key), 9))
    if is_share:
        return drop(f"below 1 it is a share of max_steps; give {interval.steps}")
    is_own_value = isinstance(key.value, int) or step_count is None
    return put(interval.steps, OWN_VALUE if is_own_value else step_count)


def _training_epochs(key: ConfigKey) -> float:
    """Return the epochs of the training, or the tool's default."""
    numbers = (number_or_none(key.sibling(name)) for name in ("num_epochs", "num_train_epochs"))
    return next(filter(None, numbers), 1.0 if "Axolotl" in key.draft.tools else 3.0)


def _times_per_epoch(recipe_key: str) -> Rule:
    """Return the rule of Axolotl's number of times in an epoch; 0 stands for none given."""
    return lambda key: (
        put(recipe_key, 1 / key.number)
        if key.number
        else needless("0 stands for no number of times")
    )


def _strategy(key: ConfigKey) -> str:
    """Return when Trainer evaluates; "" if the config does not say it."""
    # transformers 4.41 renamed it to eval_strategy. YAML reads an unquoted `no` as false.
    name = "evaluation_strategy" if "evaluation_strategy" in key.siblings else "eval_strategy"
    strategy = key.sibling(name)
    return "no" if strategy is False else strategy or ""


def _if_evaluated(rule: Rule, key: ConfigKey) -> Rule:
    """Apply a rule if there are evaluations between the first and the last step."""
    if _strategy(key) == "no":
        return needless("data.evaluation is evaluated at the end alone")
    if key.recipe_value("data.evaluation") is not None:
        return rule
    if "Axolotl" in key.draft.tools:
        return needless("of no effect there: no data are held out")
    return drop(_NO_DATA_REMARK)


def _evaluation_steps(key: ConfigKey) -> Rule:
    if _strategy(key) == "epoch":
        return needless("of no effect there: the strategy of evaluations is epoch")
    return _steps_or_share(_EVALUATIONS, key)


def _evaluation_strategy(key: ConfigKey) -> Rule:
    if _strategy(key) == "epoch":
        return put(_EVALUATIONS.epochs, 1.0)
    if set_key := _EVALUATIONS.key_already_set_or_none(key.draft):
        return needless(f"{set_key} has it")
    # Without eval_steps Trainer evaluates every logging_steps.
    logging_steps = key.sibling("logging_steps")
    step_count = (
        _DEFAULT_LOGGING_STEPS
        if logging_steps is None
        else _step_count_or_none(key, number_or_none(logging_steps))
    )
    if step_count is None:
        return drop(f"it is not known how many steps; give {_EVALUATIONS.steps}")
    return put(_EVALUATIONS.steps, step_count)


def _known_metrics(key: ConfigKey) -> list[str]:
    task = key.recipe_value("model.task")
    metrics = METRICS if task is None else metrics_of_task(task)
    return [name for name in metrics if task is not None or METRICS[name].always]


def _best_metric_or_none(key: ConfigKey) -> str | None:
    trainer_metric = str(key.sibling("metric_for_best_model") or "loss").removeprefix("eval_")
    # Reversed: if two metrics share a name of Trainer's, it means the later row.
    return next(
        (
            name
            for name in reversed(_known_metrics(key))
            if trainer_metric in (name, *METRICS[name].trainer)
        ),
        None,
    )


def _reason_against_best(key: ConfigKey) -> str:
    """Return the reason against a best checkpoint and an early stop; "": there is none."""
    if key.recipe_value("data.evaluation") is None:
        return _NO_DATA_REMARK
    if _best_metric_or_none(key) is None:
        metric = key.sibling("metric_for_best_model")
        return f"no metric is called {metric}; there are {', '.join(_known_metrics(key))}"
    if _EVALUATIONS.key_already_set_or_none(key.draft) is None:
        return f"there is no {_EVALUATIONS.steps} or evaluate_every_epochs; give one, too"
    return ""


def _use_of_best(recipe_key: str, field: str, key: ConfigKey) -> Rule:
    """Convert a key that uses the best evaluation; its value is that of a field."""
    if reason := _reason_against_best(key):
        return drop(f"{recipe_key}: {reason}")
    metric = _best_metric_or_none(key)
    # The f1 of Trainer's examples is not of all classes.
    remark = "the mean over the classes" if metric == "f1_macro" else ""
    return put(recipe_key, {"metric": metric, field: key.value}, remark)


def _metric_of_best(key: ConfigKey) -> Rule:
    if reason := _reason_against_best(key):
        return drop(reason)
    has_use = key.sibling("load_best_model_at_end") or key.sibling("early_stopping_patience")
    uses_text = "checkpoint.keep_best and train.stop_after name it"
    return needless(uses_text if has_use else "nothing asks for the best")


def _save_steps(key: ConfigKey) -> Rule:
    strategy = key.sibling("save_strategy")
    if strategy in (None, "steps"):
        return _steps_or_share(_SAVES, key)
    return needless(f"of no effect there: save_strategy is {strategy or 'no'}")


def _save_strategy(key: ConfigKey) -> Rule:
    if key.value == "epoch":
        return put(_SAVES.epochs, 1.0)
    if set_key := _SAVES.key_already_set_or_none(key.draft):
        return needless(f"{set_key} has it")
    return drop("one is saved every 30 minutes and at the end: checkpoint.every_minutes")


# Each interval before the strategy, which has an effect where there is none.
RULES: Rules = {
    "do_eval": lambda key: (
        drop(_NO_DATA_REMARK)
        if key.recipe_value("data.evaluation") is None
        else needless("data.evaluation is evaluated at the end, too")
    ),
    "evals_per_epoch": partial(_if_evaluated, _times_per_epoch(_EVALUATIONS.epochs)),
    "eval_steps": partial(_if_evaluated, _evaluation_steps),
    "evaluation_strategy": partial(_if_evaluated, _evaluation_strategy),
    "eval_strategy": partial(_if_evaluated, _evaluation_strategy),
    "load_best_model_at_end": partial(_use_of_best, "checkpoint.keep_best", "export"),
    "early_stopping_patience": partial(_use_of_best, "train.stop_after", "evaluations"),
    "metric_for_best_model": _metric_of_best,
    "greater_is_better": EvenIfEmpty(needless("the metric says it")),
    "saves_per_epoch": _times_per_epoch(_SAVES.epochs),
    "save_steps": _save_steps,
    "save_strategy": _save_strategy,
    "logging_steps": partial(_steps_or_share, _Interval("log.every_steps")),
}
