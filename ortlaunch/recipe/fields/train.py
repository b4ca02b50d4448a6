"""The section `train` of a recipe: its length, evaluations, and the handling of bad steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ortlaunch.recipe.fields.best import StopAfter
from ortlaunch.recipe.fields.section import (
    APPLIED,
    REFUSED,
    ChangeRule,
    Positive,
    SecondsOrAuto,
    Section,
    Text,
    effect_rule,
)

# Shared by `train.on_nonfinite` and `train.on_spike`.
BadStepAction = Literal["stop", "skip", "rollback"]
_NEW_LENGTH = effect_rule("the schedule covers the new length")


class Spike(Section, resume_rule=APPLIED):
    """Definition of a jump of the loss, and the response to it."""

    action: BadStepAction = "stop"
    """As `train.on_nonfinite`: `stop`, `skip` or `rollback`."""
    deviations: Annotated[float, Field(gt=0)] | None = 10.0
    """A step's loss has jumped if it is above the median of the last `window` losses by more than
    this many of their standard deviations (robust: 1.4826 x their median distance from the median;
    at least 1 % of the median); null: by `limit` alone."""
    limit: float | None = None
    """A loss above this has jumped, too, whatever the earlier ones are; null: no limit."""
    patience: Positive = 1
    """Number of successive steps with a loss above `limit` after which the last is judged."""
    window: Annotated[int, Field(ge=8, le=10_000)] = 100
    """Number of losses to compare with, each the mean over all ranks; no step is judged before this
    start has this many."""


class Generate(Section, resume_rule=APPLIED):
    """How a model writes in evaluations: always its likeliest text."""

    max_new_tokens: Positive = 128
    """Longest text, in tokens."""
    beams: Positive = 1
    """Beams of the search; 1: the likeliest token at each place."""


class Train(Section, resume_rule=APPLIED):
    """Length of the training, and the handling of its steps."""

    # Either of the two is required; rules.py checks it, because pydantic sees single fields.
    max_steps: Annotated[Positive | None, _NEW_LENGTH] = None
    """Optimizer steps. Or give `epochs`."""
    epochs: Annotated[Annotated[float, Field(gt=0)] | None, _NEW_LENGTH] = None
    """Passes over the training data, instead of `max_steps`; the number of steps is computed when
    the data are read. 0.5 is half a pass."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Maximum of the global gradient norm, for clipping; null: no clipping."""
    loss_weight: Annotated[
        Text | None, ChangeRule(REFUSED, "loss", "the loss becomes a different mean")
    ] = None
    """Weight of a micro batch in the loss of a step and of an evaluation, for custom data:
    `samples`, `labels` (those that are not -100, without the first of each sample where the model
    predicts the next word), or a key of the batch, whose numbers are summed (one number for each
    sample, or a mask). Loss and gradients are then the mean over everything counted in the global
    batch, over passes and ranks: the model itself must return the mean over everything counted in
    its micro batch. The key is passed to the model only where its forward names it. null: labels
    for transformers' tasks (for pretraining on text the masked words, whose weight also applies to
    the sentence pairs), samples for the tasks custom and lightning."""
    evaluate_every_steps: Positive | None = None
    """Steps between evaluations on `data.evaluation`; an evaluation always runs at the end."""
    evaluate_every_epochs: Annotated[float, Field(gt=0)] | None = None
    """The same in passes over the training data, as 0.25: an evaluation follows the step that
    completes each further quarter of a pass. Instead of `evaluate_every_steps`."""
    stop_after: StopAfter | None = None
    """End the training early, with its export, as `{metric: loss, evaluations: 3}`: after this many
    successive evaluations that were not better than the best before them; null: never."""
    hook: Text | None = None
    """`package.module:Class`, in the recipe's folder or installed: a class of yours without
    arguments, created on rank 0, with any of `on_step(step, values)` (after each logged step, with
    that line of metrics.jsonl), `on_evaluation(step, values)` (`loss` and the other metrics) and
    `on_checkpoint(step, folder)` (a complete checkpoint). A method that returns `"stop"` ends the
    run as `ortlaunch stop` does, saved; one that raises ends it with an error. null: none."""
    metric: Text | None = None
    """`package.module:function`, in the recipe's folder or installed: a metric of yours, called on
    rank 0 after each evaluation as `function(outputs, batch)`; it returns numbers by name. Both
    arguments are NumPy arrays by name, with a row for each sample of `data.evaluation` in its
    order, for any number of ranks: the model's outputs beside its loss, such as `logits`, and the
    samples' values, such as `labels` (a list of rows where batches differ in their shape). For
    language models (causal-lm, masked-lm, pretraining), whose scores over a vocabulary are too
    large to keep, the function gets `predictions` and `losses` at the position of each label: the
    most likely word (-100 where no label counts), and the label's negative log likelihood (nan
    there). The numbers are recorded with the evaluation's own, and `checkpoint.keep_best` and
    `stop_after` may name one. null: none."""
    generate: Generate | None = None
    """Let the model write in evaluations, for seq2seq, as `{max_new_tokens: 64, beams: 4}`, and compare
    its texts with those to write: ROUGE, BLEU, chrF and exact match (extra `metrics`); null: the loss
    alone."""
    on_nonfinite: BadStepAction = "stop"
    """Response to a loss or gradient that is inf or nan and was not caused by an fp16 loss scale.
    `stop`: the run ends. `skip`: this step changes no weight, no optimizer state and no buffer.
    `rollback`: the newest checkpoint is loaded in the same process, and the batch is left out: the
    step uses the samples that follow (without a checkpoint one is written before step 1). In each
    case the step, the samples and the first bad parameter are printed, and recorded in
    bad_steps.jsonl. `skip` and `rollback` check the loss of every step before its update, on all
    ranks."""
    on_spike: Spike | None = None
    """The same response for a loss that jumps, as `{action: rollback}`; null: no loss is too
    high."""
    max_skips: Positive = 10
    """Number of skipped bad steps in a run; the next bad step ends it."""
    max_rollbacks: Positive = 3
    """Number of rollbacks in a run, over all its starts; the next bad step ends it."""
    stall_seconds: SecondsOrAuto | None = "auto"
    """Seconds without progress after which a run is ended; the ranks that are behind are printed
    with their positions. `auto`: during steps 20 times their usual duration and at least 60 (ten
    times that while those ranks compute), and 600 where no rank does anything in the first two
    steps, in an export, a save or an evaluation. A number applies to all of them, but a rank that
    computes there has 30 times as long. null: never."""

    @property
    def evaluates(self) -> bool:
        """Whether evaluations run before the end, too."""
        return self.evaluate_every_steps is not None or self.evaluate_every_epochs is not None

    @property
    def steps(self) -> int:
        """`max_steps`, for callers after the worker has set it from `epochs`."""
        assert self.max_steps is not None
        return self.max_steps
