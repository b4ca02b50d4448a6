"""Fields about the best evaluation: `checkpoint.keep_best`, `train.stop_after`, `sweep.metrics`."""

from typing import Annotated, Literal

from ortlaunch.recipe.fields.section import APPLIED, Positive, Section, Text, effect_rule
from ortlaunch.tables.metrics import METRICS

# The metric decides where it is None, so that `{metric: loss}` alone is a complete section.
Mode = Literal["min", "max"] | None


class DirectedMetric(Section, resume_rule=effect_rule("the best is determined from now on")):
    """A metric of an evaluation, and which of its values are better."""

    metric: Text = "loss"
    """As in `checkpoint.keep_best`."""
    mode: Mode = None
    """As in `checkpoint.keep_best`."""

    @property
    def direction(self) -> str:
        """`mode`, or the metric's own direction where `mode` is null.

        A metric of the user's own always has a mode here: `best_rules` refuses a recipe without.
        """
        return self.mode or METRICS[self.metric].better


class KeepBest(DirectedMetric):
    """The checkpoint that is kept in addition to the newest ones."""

    metric: Text = "loss"
    """Metric of an evaluation: `loss`; a metric of the model's task, as evaluation.json names it
    (run-folder.md lists them); a number that `train.metric` returns, or one that a custom model
    returns beside its loss."""
    mode: Mode = None
    """`min`: less is better, `max`: more is better. null: the direction that run-folder.md lists
    for the metric; required for metrics of your own."""
    export: Annotated[bool, APPLIED] = False
    """Write the run's export/ from this checkpoint instead of the last step."""


class StopAfter(DirectedMetric):
    """Condition that ends a training before its last step."""

    evaluations: Annotated[Positive, APPLIED]
    """Number of successive evaluations without a new best value after which the training ends."""
