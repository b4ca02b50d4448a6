"""Convert intervals of logging, evaluation and saves, and the use of evaluations."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from ortlaunch.importers.draft import OWN_VALUE, Draft, number_or_none
from ortlaunch.importers.rules import (
    Condition,
    ConfigKey,
    EvenIfEmpty,
    Rule,
    Rules,
    drop,
    first_of,
    needless,
    put,
)
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
    step_count = _step_count_or_none(key, key.numeric_value)
    is_share = key.numeric_value is not None and key.numeric_value < 1 and step_count is None
    for recipe_key in filter(None, interval):
        if key.is_set(recipe_key):
            return drop(f"{recipe_key} is set by another key already")
    if is_share and interval.epochs and key.numeric_value:
        # A share of the whole training, whose length is in epochs.
        return put(interval.epochs, round(key.numeric_value * _training_epochs(key), 9))
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
        put(recipe_key, 1 / key.numeric_value)
        if key.numeric_value
        else needless("0 stands for no number of times")
    )


def _has_evaluation(key: ConfigKey) -> bool:
    return key.recipe_value("data.evaluation") is not None


def _interval_strategy(key: ConfigKey) -> str:
    """Return when Trainer evaluates; "" if the config does not say it."""
    # transformers 4.41 renamed it to eval_strategy. YAML reads an unquoted `no` as false.
    name = "evaluation_strategy" if "evaluation_strategy" in key.siblings else "eval_strategy"
    strategy = key.sibling(name)
    return "no" if strategy is False else strategy or ""


def _is_no_strategy(key: ConfigKey) -> bool:
    return _interval_strategy(key) == "no"


def _is_epoch_strategy(key: ConfigKey) -> bool:
    return _interval_strategy(key) == "epoch"


def _if_evaluated(rule: Rule) -> Rule:
    """Return a rule that applies if there are evaluations between the first and the last step."""
    return first_of(
        (_is_no_strategy, needless("data.evaluation is evaluated at the end alone")),
        (_has_evaluation, rule),
        (
            lambda key: "Axolotl" in key.draft.tools,
            needless("of no effect there: no data are held out"),
        ),
        otherwise=drop(_NO_DATA_REMARK),
    )


def _interval_already_set(interval: _Interval) -> tuple[Condition, Rule]:
    return (
        lambda key: interval.key_already_set_or_none(key.draft),
        lambda key: needless(f"{interval.key_already_set_or_none(key.draft)} has it"),
    )


def _evaluation_steps_from_logging_steps(key: ConfigKey) -> Rule:
    # Without eval_steps Trainer evaluates every logging_steps.
    logging_steps = number_or_none(key.sibling("logging_steps"))
    is_given = "logging_steps" in key.siblings
    step_count = _step_count_or_none(key, logging_steps) if is_given else _DEFAULT_LOGGING_STEPS
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
    if not _has_evaluation(key):
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


# Each interval before the strategy, which has an effect where there is none.
RULES: Rules = {
    "do_eval": first_of(
        (_has_evaluation, needless("data.evaluation is evaluated at the end, too")),
        otherwise=drop(_NO_DATA_REMARK),
    ),
    "evals_per_epoch": _if_evaluated(_times_per_epoch(_EVALUATIONS.epochs)),
    "eval_steps": _if_evaluated(
        first_of(
            (
                _is_epoch_strategy,
                needless("of no effect there: the strategy of evaluations is epoch"),
            ),
            otherwise=partial(_steps_or_share, _EVALUATIONS),
        )
    ),
    **dict.fromkeys(
        ("evaluation_strategy", "eval_strategy"),
        _if_evaluated(
            first_of(
                (_is_epoch_strategy, put(_EVALUATIONS.epochs, 1.0)),
                _interval_already_set(_EVALUATIONS),
                otherwise=_evaluation_steps_from_logging_steps,
            )
        ),
    ),
    "load_best_model_at_end": partial(_use_of_best, "checkpoint.keep_best", "export"),
    "early_stopping_patience": partial(_use_of_best, "train.stop_after", "evaluations"),
    "metric_for_best_model": first_of(
        (_reason_against_best, lambda key: drop(_reason_against_best(key))),
        (
            lambda key: any(
                map(key.sibling, ("load_best_model_at_end", "early_stopping_patience"))
            ),
            needless("checkpoint.keep_best and train.stop_after name it"),
        ),
        otherwise=needless("nothing asks for the best"),
    ),
    "greater_is_better": EvenIfEmpty(needless("the metric says it")),
    "saves_per_epoch": _times_per_epoch(_SAVES.epochs),
    "save_steps": first_of(
        (
            lambda key: key.sibling("save_strategy") in (None, "steps"),
            partial(_steps_or_share, _SAVES),
        ),
        otherwise=lambda key: needless(
            f"of no effect there: save_strategy is {key.sibling('save_strategy') or 'no'}"
        ),
    ),
    "save_strategy": first_of(
        (lambda key: key.value == "epoch", put(_SAVES.epochs, 1.0)),
        _interval_already_set(_SAVES),
        otherwise=drop("one is saved every 30 minutes and at the end: checkpoint.every_minutes"),
    ),
    "logging_steps": partial(_steps_or_share, _Interval("log.every_steps")),
}
