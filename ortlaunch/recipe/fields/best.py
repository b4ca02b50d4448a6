"""What the best evaluation is for: `checkpoint.keep_best` and `train.stop_after`."""

from typing import Literal

from ortlaunch.recipe.fields.section import Positive, Section, Text

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
Mode = Literal["min", "max"] | None
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


def direction(asked: KeepBest | StopAfter) -> str:
    """`mode`, decided."""
    return asked.mode or ("min" if asked.metric in _LESS_IS_BETTER else "max")
