"""Convert intervals of logging, evaluation and saves, and the use of evaluations."""

from __future__ import annotations

import math
from typing import NamedTuple

from ortlaunch.evaluation_metrics import METRICS, metrics_of_task
from ortlaunch.other_tools.draft import Draft, in_one_line, number
from ortlaunch.recipe.text.place import keys
from ortlaunch.recipe.text.tree import Tree


class _Interval(NamedTuple):
    """The recipe's keys of an interval; epochs is "" where steps alone are counted."""

    steps: str
    epochs: str = ""


_EVALUATIONS = _Interval("train.evaluate_every_steps", "train.evaluate_every_epochs")
_SAVES = _Interval("checkpoint.every_steps", "checkpoint.every_epochs")
_USUAL = 500  # Trainer's default of logging_steps
# How f1_macro differs from the f1 of Trainer's examples.
_AVERAGED = "the mean over the classes"
_NO_DATA = "there is no data.evaluation"


def convert(draft: Draft) -> None:
    """Convert all intervals."""
    has_data = draft.expected("data.evaluation") is not None
    if has_data:
        draft.leave_out("do_eval", "data.evaluation is evaluated at the end, too")
    else:
        draft.drop("do_eval", draft.pop("do_eval"), _NO_DATA)
    _evaluations(draft, has_data)
    _best(draft, _NO_DATA if not has_data else "")
    _saves(draft)
    _every(draft, "logging_steps", _Interval("log.every_steps"))


def _steps(draft: Draft, node: Tree | None) -> int | None:
    """Return a number of steps; None if it is no number, or a share of an unknown number."""
    # In Trainer a value below 1 is a share of max_steps.
    value = number(node)
    whole = number(draft.left.get("max_steps"))
    if value is None or value >= 1:
        return int(value) if value is not None and float(value).is_integer() else None
    return math.ceil(value * whole) if value > 0 and whole is not None and whole > 0 else None


def _every(draft: Draft, key: str, paths: _Interval) -> None:
    node = draft.pop(key)
    value = number(node)
    steps = _steps(draft, node)
    share = value is not None and value < 1 and steps is None
    there = next((path for path in paths if path and draft.recipe.find(keys(path))), None)
    if there is not None:
        draft.drop(key, node, f"{there} is set by another key already")
    elif share and paths.epochs and value:
        # A share of the whole training, whose length is in epochs.
        draft.put(paths.epochs, node, key, round(value * _length(draft), 9))
    elif share:
        draft.drop(key, node, f"below 1 it is a share of max_steps; give {paths.steps}")
    else:
        draft.put(paths.steps, node, key, None if isinstance(value, int) else steps)


def _length(draft: Draft) -> float:
    """Return the epochs of the training, or the tool's default."""
    nodes = (draft.left.get(key) for key in ("num_epochs", "num_train_epochs"))
    given = next((value for value in map(number, nodes) if value), None)
    return given or (1.0 if "Axolotl" in draft.tools else 3.0)


def _per_epoch(draft: Draft, key: str, path: str) -> None:
    """Convert Axolotl's number of times in an epoch; 0 stands for none given."""
    node = draft.pop(key)
    times = number(node)
    if times:
        draft.put(path, node, key, 1 / times)
    else:
        draft.needless(key, node, "0 stands for no number of times")


def _strategy(draft: Draft, key: str) -> tuple[Tree | None, str | None]:
    """Return the node of a strategy, and its name."""
    # YAML reads an unquoted `no` as false.
    kind = draft.value(key)
    return draft.pop(key), "no" if kind is False else kind


def _evaluations(draft: Draft, has_data: bool) -> None:
    # transformers 4.41 renamed it to eval_strategy.
    key = "evaluation_strategy" if "evaluation_strategy" in draft.left else "eval_strategy"
    strategy, kind = _strategy(draft, key)
    if not has_data or kind == "no":
        names = ("eval_steps", "evals_per_epoch")
        for name, node in ((key, strategy), *((name, draft.pop(name)) for name in names)):
            if kind == "no":
                draft.needless(name, node, "data.evaluation is evaluated at the end alone")
            elif "Axolotl" in draft.tools:
                draft.needless(name, node, "of no effect there: no data are held out")
            else:
                draft.drop(name, node, _NO_DATA)
        return
    _per_epoch(draft, "evals_per_epoch", _EVALUATIONS.epochs)
    if kind == "epoch" and strategy is not None:
        draft.put(_EVALUATIONS.epochs, strategy, key, 1.0)
        _without_effect(draft, "eval_steps", key, kind)
        return
    _every(draft, "eval_steps", _EVALUATIONS)
    if strategy is not None:
        _by_steps(draft, key, strategy)
    elif "Axolotl" in draft.tools and _set(draft, _EVALUATIONS) is None:
        draft.assume(_EVALUATIONS.epochs, 1.0, "Axolotl's default")


def _set(draft: Draft, paths: _Interval) -> str | None:
    """Return the key of an interval that the recipe will have; None if it will have none."""
    return next((path for path in paths if path and draft.expected(path) is not None), None)


def _without_effect(draft: Draft, key: str, strategy: str, kind: str | None) -> None:
    draft.leave_out(key, f"of no effect there: {strategy} is {kind}")


def _by_steps(draft: Draft, key: str, strategy: Tree) -> None:
    """Convert a strategy of `steps`."""
    # Without eval_steps Trainer evaluates every logging_steps.
    logged = draft.left.get("logging_steps")
    steps = _steps(draft, logged) if logged is not None else _USUAL
    there = _set(draft, _EVALUATIONS)
    if there is not None:
        draft.needless(key, strategy, f"{there} has it")
    elif steps is not None:
        draft.put(_EVALUATIONS.steps, strategy, key, steps)
    else:
        draft.drop(key, strategy, f"it is not known how many steps; give {_EVALUATIONS.steps}")


def _best(draft: Draft, why: str) -> None:
    """Convert the best checkpoint and early stopping; `why` gives the reason against both."""
    best = draft.pop("load_best_model_at_end")
    patience = draft.pop("early_stopping_patience")
    metric = draft.pop("metric_for_best_model")
    theirs = in_one_line(metric).removeprefix("eval_") if metric is not None else "loss"
    task = draft.expected("model.task")
    any_task = {name: metric for name, metric in METRICS.items() if metric.always}
    known = any_task if task is None else metrics_of_task(task)
    # Reversed: if two metrics share a name of Trainer's, it means the later row.
    ours = next((name for name in reversed(known) if theirs in (name, *known[name].trainer)), None)
    if not why and ours is None and metric is not None:
        why = f"no metric is called {in_one_line(metric)}; there are {', '.join(known)}"
    elif not why and _set(draft, _EVALUATIONS) is None:
        why = f"there is no {_EVALUATIONS.steps} or evaluate_every_epochs; give one, too"
    for key, node, path, value in (
        ("load_best_model_at_end", best, "checkpoint.keep_best", {"metric": ours, "export": True}),
        (
            "early_stopping_patience",
            patience,
            "train.stop_after",
            {"metric": ours, "evaluations": patience},
        ),
    ):
        if why:
            draft.drop(key, node, f"{path}: {why}")
        else:
            draft.put(path, node, key, value, _AVERAGED if ours == "f1_macro" else "")
    if why:
        draft.drop("metric_for_best_model", metric, why)
    elif best or patience:
        used = "checkpoint.keep_best and train.stop_after name it"
        draft.needless("metric_for_best_model", metric, used)
    else:
        draft.needless("metric_for_best_model", metric, "nothing asks for the best")
    # Not `pop`: false has a meaning, too.
    greater = draft.left.pop("greater_is_better", None)
    draft.needless("greater_is_better", greater, "the metric says it")


def _saves(draft: Draft) -> None:
    """Convert the interval of checkpoints."""
    strategy, kind = _strategy(draft, "save_strategy")
    _per_epoch(draft, "saves_per_epoch", _SAVES.epochs)
    if kind in (None, "steps"):
        _every(draft, "save_steps", _SAVES)
    else:
        _without_effect(draft, "save_steps", "save_strategy", kind)
    if kind == "epoch":
        draft.put(_SAVES.epochs, strategy, "save_strategy", 1.0)
    elif strategy is None and "Axolotl" in draft.tools and _set(draft, _SAVES) is None:
        draft.assume(_SAVES.epochs, 1.0, "Axolotl's default")
    elif there := _set(draft, _SAVES):
        draft.needless("save_strategy", strategy, f"{there} has it")
    else:
        draft.drop(
            "save_strategy",
            strategy,
            "one is saved every 30 minutes and at the end: checkpoint.every_minutes",
        )
