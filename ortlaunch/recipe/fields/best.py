"""What the best evaluation is for: `checkpoint.keep_best` and `train.stop_after`."""

from typing import Literal

from ortlaunch.evaluation_metrics import METRICS
from ortlaunch.recipe.fields.section import Positive, Section, Text

Mode = Literal["min", "max"] | None


class KeepBest(Section):
    """Which checkpoint stays beside the newest."""

    metric: Text = "loss"
    """Of an evaluation: `loss`; a metric of the model's task, as evaluation.json names it
    (run-folder.md lists them); a number of `train.metric`, or one that a custom model returns
    beside its loss."""
    mode: Mode = None
    """`min`: less is better, `max`: more is. null: what run-folder.md has for the metric; give it
    for numbers of your own."""
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


def direction(asked: KeepBest | StopAfter) -> str:
    """`mode`, decided."""
    return asked.mode or METRICS[asked.metric].better
