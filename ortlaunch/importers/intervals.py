"""Convert intervals of logging, evaluation and saves, and the use of evaluations."""

from __future__ import annotations

import math
from typing import NamedTuple

from ortlaunch.importers.draft import Draft, number_of_node, one_line_text
from ortlaunch.recipe.text.source_location import parse_key_path
from ortlaunch.recipe.text.tree import Tree
from ortlaunch.tables.metrics import METRICS, metrics_of_task


class _IntervalKeys(NamedTuple):
    """The recipe's keys of an interval; epochs is "" where steps alone are counted."""

    steps: str
    epochs: str = ""


_EVALUATIONS = _IntervalKeys("train.evaluate_every_steps", "train.evaluate_every_epochs")
_SAVES = _IntervalKeys("checkpoint.every_steps", "checkpoint.every_epochs")
_DEFAULT_LOGGING_STEPS = 500  # Trainer's default of logging_steps
# How f1_macro differs from the f1 of Trainer's examples.
_AVERAGED_REMARK = "the mean over the classes"
_NO_DATA_REMARK = "there is no data.evaluation"


def convert_evaluation_save_and_log_intervals(draft: Draft) -> None:
    """Convert all intervals."""
    has_data = draft.expected_recipe_value_or_none("data.evaluation") is not None
    if has_data:
        draft.report_if_needless("do_eval", "data.evaluation is evaluated at the end, too")
    else:
        draft.report_dropped("do_eval", draft.take_key("do_eval"), _NO_DATA_REMARK)
    _convert_evaluation_strategy_and_interval(draft, has_data)
    _convert_best_checkpoint_and_early_stop(draft, _NO_DATA_REMARK if not has_data else "")
    _convert_save_strategy_and_interval(draft)
    _convert_interval_to_steps_or_epochs(draft, "logging_steps", _IntervalKeys("log.every_steps"))


def _whole_or_fraction_of_max_steps_or_none(draft: Draft, value_node: Tree | None) -> int | None:
    """Return a number of steps; None if it is no number, or a share of an unknown number."""
    # In Trainer a value below 1 is a share of max_steps.
    value = number_of_node(value_node)
    max_steps = number_of_node(draft.unconverted.get("max_steps"))
    if value is None or value >= 1:
        return int(value) if value is not None and float(value).is_integer() else None
    return (
        math.ceil(value * max_steps)
        if value > 0 and max_steps is not None and max_steps > 0
        else None
    )


def _convert_interval_to_steps_or_epochs(
    draft: Draft, config_key: str, interval_keys: _IntervalKeys
) -> None:
    node = draft.take_key(config_key)
    value = number_of_node(node)
    steps = _whole_or_fraction_of_max_steps_or_none(draft, node)
    is_share = value is not None and value < 1 and steps is None
    set_key = next(
        (
            interval_key
            for interval_key in interval_keys
            if interval_key and draft.recipe_tree.find_subtree(parse_key_path(interval_key))
        ),
        None,
    )
    if set_key is not None:
        draft.report_dropped(config_key, node, f"{set_key} is set by another key already")
    elif is_share and interval_keys.epochs and value:
        # A share of the whole training, whose length is in epochs.
        draft.set_recipe_key_unless_set_and_report(
            interval_keys.epochs, node, config_key, round(value * _training_epochs(draft), 9)
        )
    elif is_share:
        draft.report_dropped(
            config_key, node, f"below 1 it is a share of max_steps; give {interval_keys.steps}"
        )
    else:
        draft.set_recipe_key_unless_set_and_report(
            interval_keys.steps, node, config_key, None if isinstance(value, int) else steps
        )


def _training_epochs(draft: Draft) -> float:
    """Return the epochs of the training, or the tool's default."""
    epoch_nodes = (draft.unconverted.get(key) for key in ("num_epochs", "num_train_epochs"))
    epochs = next((value for value in map(number_of_node, epoch_nodes) if value), None)
    return epochs or (1.0 if "Axolotl" in draft.tools else 3.0)


def _convert_times_per_epoch_to_epoch_interval(
    draft: Draft, config_key: str, recipe_key: str
) -> None:
    """Convert Axolotl's number of times in an epoch; 0 stands for none given."""
    node = draft.take_key(config_key)
    times_per_epoch = number_of_node(node)
    if times_per_epoch:
        draft.set_recipe_key_unless_set_and_report(
            recipe_key, node, config_key, 1 / times_per_epoch
        )
    else:
        draft.report_needless(config_key, node, "0 stands for no number of times")


def _take_strategy(draft: Draft, config_key: str) -> tuple[Tree | None, str | None]:
    """Return the node of a strategy, and its name."""
    # YAML reads an unquoted `no` as false.
    strategy_name = draft.config_value(config_key)
    return draft.take_key(config_key), "no" if strategy_name is False else strategy_name


def _convert_evaluation_strategy_and_interval(draft: Draft, has_data: bool) -> None:
    # transformers 4.41 renamed it to eval_strategy.
    strategy_key = (
        "evaluation_strategy" if "evaluation_strategy" in draft.unconverted else "eval_strategy"
    )
    strategy, strategy_name = _take_strategy(draft, strategy_key)
    if not has_data or strategy_name == "no":
        other_keys = ("eval_steps", "evals_per_epoch")
        for config_key, node in (
            (strategy_key, strategy),
            *((config_key, draft.take_key(config_key)) for config_key in other_keys),
        ):
            if strategy_name == "no":
                draft.report_needless(
                    config_key, node, "data.evaluation is evaluated at the end alone"
                )
            elif "Axolotl" in draft.tools:
                draft.report_needless(config_key, node, "of no effect there: no data are held out")
            else:
                draft.report_dropped(config_key, node, _NO_DATA_REMARK)
        return
    _convert_times_per_epoch_to_epoch_interval(draft, "evals_per_epoch", _EVALUATIONS.epochs)
    if strategy_name == "epoch" and strategy is not None:
        draft.set_recipe_key_unless_set_and_report(_EVALUATIONS.epochs, strategy, strategy_key, 1.0)
        _report_without_effect(draft, "eval_steps", strategy_key, strategy_name)
        return
    _convert_interval_to_steps_or_epochs(draft, "eval_steps", _EVALUATIONS)
    if strategy is not None:
        _set_evaluation_steps_from_logging_steps(draft, strategy_key, strategy)
    elif (
        "Axolotl" in draft.tools and _interval_key_already_set_or_none(draft, _EVALUATIONS) is None
    ):
        draft.assume_default(_EVALUATIONS.epochs, 1.0, "Axolotl's default")


def _interval_key_already_set_or_none(draft: Draft, interval_keys: _IntervalKeys) -> str | None:
    """Return the key of an interval that the recipe will have; None if it will have none."""
    return next(
        (
            interval_key
            for interval_key in interval_keys
            if interval_key and draft.expected_recipe_value_or_none(interval_key) is not None
        ),
        None,
    )


def _report_without_effect(
    draft: Draft, config_key: str, strategy_key: str, strategy_name: str | None
) -> None:
    draft.report_if_needless(config_key, f"of no effect there: {strategy_key} is {strategy_name}")


def _set_evaluation_steps_from_logging_steps(
    draft: Draft, strategy_key: str, strategy: Tree
) -> None:
    """Convert a strategy of `step_count`."""
    # Without eval_steps Trainer evaluates every logging_steps.
    logging_node = draft.unconverted.get("logging_steps")
    step_count = (
        _whole_or_fraction_of_max_steps_or_none(draft, logging_node)
        if logging_node is not None
        else _DEFAULT_LOGGING_STEPS
    )
    set_key = _interval_key_already_set_or_none(draft, _EVALUATIONS)
    if set_key is not None:
        draft.report_needless(strategy_key, strategy, f"{set_key} has it")
    elif step_count is not None:
        draft.set_recipe_key_unless_set_and_report(
            _EVALUATIONS.steps, strategy, strategy_key, step_count
        )
    else:
        draft.report_dropped(
            strategy_key, strategy, f"it is not known how many steps; give {_EVALUATIONS.steps}"
        )


def _convert_best_checkpoint_and_early_stop(draft: Draft, reason_for_neither: str) -> None:
    """Convert the best checkpoint and early stopping; `reason_for_neither` gives the reason against both."""
    best_node = draft.take_key("load_best_model_at_end")
    patience_node = draft.take_key("early_stopping_patience")
    metric_node = draft.take_key("metric_for_best_model")
    trainer_metric = (
        one_line_text(metric_node).removeprefix("eval_") if metric_node is not None else "loss"
    )
    task = draft.expected_recipe_value_or_none("model.task")
    metrics_of_all_tasks = {
        name: metric_node for name, metric_node in METRICS.items() if metric_node.always
    }
    known_metrics = metrics_of_all_tasks if task is None else metrics_of_task(task)
    # Reversed: if two metrics share a name of Trainer's, it means the later row.
    recipe_metric = next(
        (
            name
            for name in reversed(known_metrics)
            if trainer_metric in (name, *known_metrics[name].trainer)
        ),
        None,
    )
    if not reason_for_neither and recipe_metric is None and metric_node is not None:
        reason_for_neither = f"no metric is called {one_line_text(metric_node)}; there are {', '.join(known_metrics)}"
    elif not reason_for_neither and _interval_key_already_set_or_none(draft, _EVALUATIONS) is None:
        reason_for_neither = (
            f"there is no {_EVALUATIONS.steps} or evaluate_every_epochs; give one, too"
        )
    for config_key, node, recipe_key, recipe_value in (
        (
            "load_best_model_at_end",
            best_node,
            "checkpoint.keep_best",
            {"metric": recipe_metric, "export": True},
        ),
        (
            "early_stopping_patience",
            patience_node,
            "train.stop_after",
            {"metric": recipe_metric, "evaluations": patience_node},
        ),
    ):
        if reason_for_neither:
            draft.report_dropped(config_key, node, f"{recipe_key}: {reason_for_neither}")
        else:
            draft.set_recipe_key_unless_set_and_report(
                recipe_key,
                node,
                config_key,
                recipe_value,
                _AVERAGED_REMARK if recipe_metric == "f1_macro" else "",
            )
    if reason_for_neither:
        draft.report_dropped("metric_for_best_model", metric_node, reason_for_neither)
    elif best_node or patience_node:
        needless_reason = "checkpoint.keep_best and train.stop_after name it"
        draft.report_needless("metric_for_best_model", metric_node, needless_reason)
    else:
        draft.report_needless("metric_for_best_model", metric_node, "nothing asks for the best")
    # Not `pop`: false has a meaning, too.
    greater_node = draft.unconverted.pop("greater_is_better", None)
    draft.report_needless("greater_is_better", greater_node, "the metric says it")


def _convert_save_strategy_and_interval(draft: Draft) -> None:
    """Convert the interval of checkpoints."""
    strategy, strategy_name = _take_strategy(draft, "save_strategy")
    _convert_times_per_epoch_to_epoch_interval(draft, "saves_per_epoch", _SAVES.epochs)
    if strategy_name in (None, "steps"):
        _convert_interval_to_steps_or_epochs(draft, "save_steps", _SAVES)
    else:
        _report_without_effect(draft, "save_steps", "save_strategy", strategy_name)
    if strategy_name == "epoch":
        draft.set_recipe_key_unless_set_and_report(_SAVES.epochs, strategy, "save_strategy", 1.0)
    elif (
        strategy is None
        and "Axolotl" in draft.tools
        and _interval_key_already_set_or_none(draft, _SAVES) is None
    ):
        draft.assume_default(_SAVES.epochs, 1.0, "Axolotl's default")
    elif set_key := _interval_key_already_set_or_none(draft, _SAVES):
        draft.report_needless("save_strategy", strategy, f"{set_key} has it")
    else:
        draft.report_dropped(
            "save_strategy",
            strategy,
            "one is saved every 30 minutes and at the end: checkpoint.every_minutes",
        )
