"""Convert Trainer's intervals of logging, evaluation and saves, and the use of evaluations.

Recipes count intervals in steps only.
"""

from __future__ import annotations

import math

from ortlaunch.evaluation_metrics import METRICS, metrics_of
from ortlaunch.other_tools.draft import Draft, in_one_line, number
from ortlaunch.recipe.text.tree import Tree

_EVERY = "train.evaluate_every_steps"
_USUAL = 500  # Trainer's default of logging_steps
# How f1_macro differs from the f1 of Trainer's examples.
_AVERAGED = "the mean over the classes"


def convert(draft: Draft) -> None:
    """Convert all intervals."""
    has_data = draft.expected("data.evaluation") is not None
    wanted = draft.pop("do_eval")
    if wanted is not None and has_data:
        draft.needless("do_eval", wanted, "data.evaluation is evaluated at the end, too")
    elif wanted is not None:
        draft.drop("do_eval", wanted, "there is no data.evaluation")
    _evaluations(draft, has_data)
    _best(draft, "there is no data.evaluation" if not has_data else "")
    _saves(draft)
    _every(draft, "logging_steps", "log.every_steps")


def _steps(draft: Draft, node: Tree | None) -> int | None:
    """Return a number of steps; None if it is no number, or a share of an unknown number."""
    # In Trainer a value below 1 is a share of max_steps.
    value = number(node)
    whole = number(draft.left.get("max_steps"))
    if value is None or value >= 1:
        return int(value) if value is not None and float(value).is_integer() else None
    return math.ceil(value * whole) if value > 0 and whole is not None and whole > 0 else None


def _every(draft: Draft, key: str, path: str) -> None:
    node = draft.pop(key)
    value = number(node)
    steps = _steps(draft, node)
    if node is not None and value is not None and value < 1 and steps is None:
        draft.drop(key, node, f"below 1 it is a share of max_steps; give {path}")
    elif node is not None:
        draft.put(path, node, key, None if isinstance(value, int) else steps)


def _strategy(draft: Draft, key: str) -> tuple[Tree | None, str | None]:
    """Return the node of a strategy, and its name."""
    # YAML reads an unquoted `no` as false.
    kind = draft.value(key)
    return draft.pop(key), "no" if kind is False else kind


def _evaluations(draft: Draft, has_data: bool) -> None:
    # transformers 4.41 renamed it to eval_strategy.
    key = "evaluation_strategy" if "evaluation_strategy" in draft.left else "eval_strategy"
    strategy, kind = _strategy(draft, key)
    if has_data and kind in (None, "steps"):
        _every(draft, "eval_steps", _EVERY)
        if strategy is not None:
            _by_steps(draft, key, strategy)
        return
    why = f"steps alone are counted; give {_EVERY}" if has_data else "there is no data.evaluation"
    for name, node in ((key, strategy), ("eval_steps", draft.pop("eval_steps"))):
        if node is not None and kind == "no":
            draft.needless(name, node, "data.evaluation is evaluated at the end alone")
        elif node is not None:
            draft.drop(name, node, why)


def _by_steps(draft: Draft, key: str, strategy: Tree) -> None:
    """Convert a strategy of `steps`."""
    # Without eval_steps Trainer evaluates every logging_steps.
    logged = draft.left.get("logging_steps")
    steps = _steps(draft, logged) if logged is not None else _USUAL
    if draft.expected(_EVERY) is not None:
        draft.needless(key, strategy, f"{_EVERY} says it")
    elif steps is not None:
        draft.put(_EVERY, strategy, key, steps)
    else:
        draft.drop(key, strategy, f"it is not known how many steps; give {_EVERY}")


def _best(draft: Draft, why: str) -> None:
    """Convert the best checkpoint and early stopping; `why` gives the reason against both."""
    best = draft.pop("load_best_model_at_end")
    patience = draft.pop("early_stopping_patience")
    metric = draft.pop("metric_for_best_model")
    greater = draft.left.pop("greater_is_better", None)
    theirs = in_one_line(metric).removeprefix("eval_") if metric is not None else "loss"
    task = draft.expected("model.task")
    any_task = {name: metric for name, metric in METRICS.items() if metric.always}
    known = any_task if task is None else metrics_of(task)
    # Reversed: if two metrics share a name of Trainer's, it means the later row.
    ours = next((name for name in reversed(known) if theirs in (name, *known[name].trainer)), None)
    if not why and ours is None and metric is not None:
        why = f"no metric is called {in_one_line(metric)}; there are {', '.join(known)}"
    elif not why and draft.expected(_EVERY) is None:
        why = f"there is no {_EVERY}; give that, too"
    for key, node, path, value in (
        ("load_best_model_at_end", best, "checkpoint.keep_best", {"metric": ours, "export": True}),
        (
            "early_stopping_patience",
            patience,
            "train.stop_after",
            {"metric": ours, "evaluations": patience},
        ),
    ):
        if node is not None and why:
            draft.drop(key, node, f"{path}: {why}")
        elif node is not None:
            draft.put(path, node, key, value, _AVERAGED if ours == "f1_macro" else "")
    if metric is not None and why:
        draft.drop("metric_for_best_model", metric, why)
    elif metric is not None:
        used = "checkpoint.keep_best and train.stop_after name it"
        draft.needless(
            "metric_for_best_model",
            metric,
            used if best or patience else "nothing asks for the best",
        )
    if greater is not None:
        draft.needless("greater_is_better", greater, "the metric says it")


def _saves(draft: Draft) -> None:
    """Convert the interval of checkpoints."""
    strategy, kind = _strategy(draft, "save_strategy")
    if kind in (None, "steps"):
        _every(draft, "save_steps", "checkpoint.every_steps")
    else:
        steps = draft.pop("save_steps")
        if steps is not None:
            draft.needless("save_steps", steps, f"of no effect there: save_strategy is {kind}")
    if strategy is not None and draft.recipe.find(("checkpoint", "every_steps")) is not None:
        draft.needless("save_strategy", strategy, "checkpoint.every_steps says it")
    elif strategy is not None:
        draft.drop(
            "save_strategy",
            strategy,
            "one is saved every 30 minutes and at the end: checkpoint.every_minutes",
        )
