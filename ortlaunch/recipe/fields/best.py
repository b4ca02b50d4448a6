"""What the best evaluation is for: `checkpoint.keep_best` and `train.stop_after`, and their rules."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Optional, Union

from ortlaunch.recipe.families import LANGUAGE_TASKS, SCORED_TASKS
from ortlaunch.recipe.place import Problem
from ortlaunch.recipe.section import Positive, Section, Text

if TYPE_CHECKING:
    from ortlaunch.recipe.models import Recipe

# What every evaluation of a task measures.
METRICS = {
    "causal-lm": ("loss", "perplexity"),
    "masked-lm": ("loss", "perplexity", "masked_word_accuracy"),
    "pretraining": ("loss", "perplexity", "masked_word_accuracy", "next_sentence_accuracy"),
    "sequence-classification": ("loss", "classification_accuracy", "f1_macro"),
    "sequence-regression": ("loss", "mse", "pearson"),
    "token-classification": ("loss", "classification_accuracy", "f1_macro"),
    "custom": ("loss",),
}
# Of token-classification, where classes are B-X, I-X and O.
ENTITIES = ("entity_f1", "entity_precision", "entity_recall")
Mode = Optional[Literal["min", "max"]]
_LESS_IS_BETTER = ("loss", "perplexity", "mse")


class KeepBest(Section):
    """Which checkpoint stays beside the newest."""

    metric: Text = "loss"
    """Of an evaluation: `loss`; `perplexity` of language models; `masked_word_accuracy`; `next_sentence_accuracy` of
    pretraining; `classification_accuracy` or `f1_macro` of classes; `entity_f1`, `entity_precision` or `entity_recall`
    of token-classification with tags; `mse` or `pearson` of sequence-regression; a number of `train.metric`, or one
    that a custom model returns beside its loss."""
    mode: Mode = None
    """`min`: less is better, `max`: more is. null: min for loss, perplexity and mse, max for the others; give it for
    numbers of your own."""
    export: bool = False
    """Make the run's export/ from it, not from the last step."""


class StopAfter(Section):
    """When a training ends before its last step."""

    metric: Text = "loss"
    """As in `checkpoint.keep_best`."""
    mode: Mode = None
    """As in `checkpoint.keep_best`."""
    evaluations: Positive
    """So many evaluations one after another that are not better than the best before them."""


def metrics_of(task: str) -> tuple[str, ...]:
    """What an evaluation may measure."""
    return METRICS[task] + (ENTITIES if task == "token-classification" else ())


def evaluates_with_scores(recipe: "Recipe") -> bool:
    """Whether metrics are made of more than the loss, of a task of transformers'."""
    task = recipe.model.task
    return task in SCORED_TASKS or (task in LANGUAGE_TASKS and recipe.train.metric is not None)


def direction(asked: Union[KeepBest, StopAfter]) -> str:
    """`mode`, decided."""
    return asked.mode or ("min" if asked.metric in _LESS_IS_BETTER else "max")


def best_rules(recipe: "Recipe") -> Iterator[Problem]:
    """A metric that the task has not, and evaluations that there are none of."""
    if recipe.train.metric is not None and recipe.data.evaluation is None:
        yield ("train.metric", "data.evaluation"), "does nothing without data.evaluation; give that corpus"
    for path, asked in (
        ("checkpoint.keep_best", recipe.checkpoint.keep_best),
        ("train.stop_after", recipe.train.stop_after),
    ):
        if asked is None:
            continue
        known = metrics_of(recipe.model.task)
        own = recipe.train.metric is not None or recipe.model.task == "custom"
        if asked.metric not in known and not own:
            message = f"got {asked.metric}; evaluations of task {recipe.model.task} have {', '.join(known)}"
            yield (f"{path}.metric", "model.task"), message
        elif asked.metric not in known and asked.mode is None:
            message = f"is missing: give min or max, for {asked.metric} is a number of your own"
            yield (f"{path}.mode", f"{path}.metric"), message
        if recipe.train.evaluate_every_steps is None:
            yield (path, "train.evaluate_every_steps"), "does nothing without train.evaluate_every_steps; give that too"
