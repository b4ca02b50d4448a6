"""Types of the records in a run folder: memory.json, summary.json, metrics.jsonl and more.

The text under a field is its manual: docs/reference/run-folder.md is generated from it (`ortlaunch schema
--run-folder`). A field with a default is left out of the file if it has no value. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from ortlaunch.base.json_types import value_fits_annotation_at_any_depth

_T = TypeVar("_T")
_TEXTS = "tuple[str, ...]"


def json_values_of_record(record: Any) -> Any:
    """Return a record as mappings and lists for JSON."""
    if is_dataclass(record):
        pairs = (
            (record_field, getattr(record, record_field.name)) for record_field in fields(record)
        )
        return {
            record_field.name: json_values_of_record(value)
            for record_field, value in pairs
            if value is not None or record_field.default is MISSING
        }
    if isinstance(record, dict):
        return {name: json_values_of_record(value) for name, value in record.items()}
    return (
        [json_values_of_record(value) for value in record]
        if isinstance(record, (list, tuple))
        else record
    )


def record_from_json_values(record_type: type[_T], value_by_field_name: Mapping[str, Any]) -> _T:
    """Return a record from values of JSON; unknown names, such as a later version's, are ignored.

    Args:
        record_type: the dataclass of the record.
        value_by_field_name: field names and values.

    Raises:
        TypeError: a value is missing, or its type is not the field's.
    """
    record_fields: list[Any] = [*fields(record_type)]  # type: ignore[arg-type]
    values_by_name = {
        record_field.name: value_by_field_name[record_field.name]
        for record_field in record_fields
        if record_field.name in value_by_field_name
    }
    hints = get_type_hints(record_type)
    for record_field in record_fields:
        if record_field.name in values_by_name and not value_fits_annotation_at_any_depth(
            hints[record_field.name], values_by_name[record_field.name]
        ):
            raise TypeError(f"{record_field.name} is {values_by_name[record_field.name]!r:.80}")
    # JSON has no tuples.
    for record_field in record_fields:
        if record_field.type == _TEXTS and record_field.name in values_by_name:
            values_by_name[record_field.name] = tuple(values_by_name[record_field.name])
    return record_type(**values_by_name)


@dataclass
class VocabularyRecord:
    """The meaning of class numbers and token ids; tokenizer/ beside it has the tokens."""

    # A resumed run must not train the tokenizer again: new ids would not match the weights.
    trained_tokenizer: dict[str, object] | None
    """The recipe's `data.tokenizer` if it was trained on the corpus; a resumed run loads tokenizer/
    instead."""
    labels: list[str]
    """Names of the classes by number, if the data have them: text labels, or a data set's names of
    its integers."""
    classes: int
    """Number of classes in the data; 0: none."""
    tokenizer_files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Size and CRC-32 of each file in tokenizer/, which are compared before it is used."""


@dataclass
class MeasuredMemory:
    """Bytes of live tensors on the rank with the most, each storage once, and the process peak."""

    weights: int
    """Parameters."""
    gradients: int
    """Gradients of the parameters."""
    optimizer: int
    """Optimizer state with float32 copies of the weights, where there are any."""
    buckets: int
    """DeepSpeed's communication buffers."""
    other: int
    """All other tensors."""
    model: int
    """weights + gradients + optimizer, which the plan counts exactly."""
    peak: int
    """Largest number of bytes at one time (`peak_is` names the measure)."""


@dataclass
class PlannedMemory:
    """Bytes of a rank by `ortlaunch plan`."""

    weights: int
    """Parameters."""
    gradients: int
    """Gradients of the parameters."""
    optimizer: int
    """Optimizer state with float32 copies of the weights, where there are any."""
    activations: int
    """Tensors that the forward pass keeps for the backward pass: an estimate."""
    buckets: int
    """DeepSpeed's communication buffers: an upper bound."""
    overhead: int
    """Estimate of everything else: the process on a CPU, contexts and workspaces on CUDA."""
    model: int
    """weights + gradients + optimizer."""
    peak: int
    """Sum of all parts; on CUDA without `overhead`, which torch's allocator does not count."""


@dataclass
class MemoryReport:
    """Planned and measured memory of a rank; written at the end of a run."""

    planned: PlannedMemory | None
    """null: a model that the plan cannot count."""
    measured: MeasuredMemory
    """The largest of all ranks, part by part, over the first two steps; the peak over the run."""
    peak_is: str
    """The measure of `peak`."""
    # Interpreter and libraries, which the plan does not count as part of the model.
    baseline: int
    """Resident bytes, without the weights, when the model was built (CPU)."""
    peak_by_rank: list[int]
    """Peak of each rank, in bytes."""


@dataclass
class BestEvaluation:
    """The best evaluation of a training, over all its starts; its checkpoint is kept."""

    metric: str
    """The metric of `checkpoint.keep_best`."""
    value: float
    """Value of the metric."""
    step: int
    """Optimizer step of the checkpoint."""
    exported: bool
    """Whether export/ has this checkpoint: by `export` of keep_best, or as the last step."""


@dataclass
class StoppedEarly:
    """The condition of `train.stop_after` that ended a training, with the best evaluation."""

    metric: str
    """The metric of the condition."""
    mode: str
    """`min` or `max`: the better direction."""
    evaluations: int
    """Number of consecutive evaluations without improvement."""
    value: float | None
    """Best value of the metric; null: no evaluation had a finite one."""
    step: int | None
    """Optimizer step of the best value."""


@dataclass
class Prediction:
    """The prediction for a rank, from the counted work of the model and the measured rates of the
    machine."""

    step_seconds: float
    """Seconds of a step, without communication between ranks."""
    memory: int
    """Bytes at the peak, as `peak` in memory.json."""


@dataclass
class Summary:
    """The result of the whole training, over all its starts; written at its end."""

    steps: int
    """Optimizer steps."""
    samples: int
    """Samples trained on, over all ranks."""
    epochs: float
    """Samples trained on, in passes over the data."""
    loss: float | None
    """The last logged training loss; null: none was logged."""
    evaluation_loss: float | None
    """The last evaluation's loss; null: there was none."""
    training_seconds: float
    """Time of the training loop, over all starts."""
    bad_steps: dict[str, int]
    """Number of bad steps by action, `skip` or `rollback`, over all starts; bad_steps.jsonl lists
    their samples."""
    seconds: dict[str, float]
    """Duration of each part of the last start on rank 0, from loading libraries to writing the
    export."""
    failed_saves: int = 0
    """Checkpoints that could not be written (checkpoint.on_failure: continue), over all starts."""
    failed_exports: int = 0
    """Exports of checkpoints that failed (checkpoint.export) and were not repeated."""
    evaluation: dict[str, float] | None = None
    """The last evaluation's other metrics, by their names in evaluation.json; absent for tasks
    without any."""
    best: BestEvaluation | None = None
    """The best checkpoint (checkpoint.keep_best)."""
    stopped_early: StoppedEarly | None = None
    """Why the training ended before its last step (train.stop_after)."""
    step_seconds: float | None = None
    """Median duration of a step of the last start, without its first two steps, evaluations and
    saves."""
    predicted: Prediction | None = None
    """The prediction for the engine that ran."""
    not_predicted: str | None = None
    """Why there is no prediction."""


@dataclass
class Confusion:
    """The classes of the last evaluation, for at most 100 classes."""

    classes: list[str]
    """Names of the classes, by number."""
    counts: list[list[int]]
    """Samples (of token-classification, words) of each class, by predicted class; of label sets,
    samples where a class is rightly predicted, labelled, and predicted."""
    are_label_sets: bool = False
    """Whether a sample has a set of classes."""


@dataclass
class Stopped:
    """The end of a requested stop; written after the save, and removed by the next start."""

    step: int
    """Optimizer steps of the newest checkpoint."""
    steps: int
    """Optimizer steps of the whole run."""
    by: str
    """Source of the request: a signal's name, or the text in `requests/stop.json`."""
    exit_status: int
    """85: saved, start the run again; 130: saved after Ctrl-C by a person."""


@dataclass
class BadStep:
    """A line for each step with a bad loss or gradient, in the order of time, over all starts."""

    step: int
    """The optimizer step, from 1."""
    kind: str
    """`loss` or `gradient`: it was inf or nan; `spike`: the loss jumped."""
    message: str
    """The problem, as text."""
    samples: list[int]
    """The samples of data.train in the step, of all ranks and passes."""
    parameter: str | None
    """The first parameter, in the model's order, whose gradient is inf or nan; null: none is."""
    action: str = "stop"
    """The action taken: `stop`, `skip` or `rollback`."""
    checkpoint: int | None = None
    """Step of the checkpoint that was loaded again (rollback)."""
    # A half-open range of positions; they are skipped when the run reaches them again.
    places: list[int] | None = None
    """Positions of these samples in the order of all epochs (rollback): the first, and the one
    after the last; null: the order has changed since, and they are no longer left out."""


@dataclass
class MetricsLine:
    """A line for each logged step (`log.every_steps`), including the numbers that a custom model
    returns beside its loss, by name.

    Infinite and undefined numbers are the strings `inf`, `-inf` and `nan`.
    """

    step: int
    """Optimizer steps taken, from 1."""
    loss: float | None
    """Mean training loss since the last line, over all ranks; null: all these steps were bad and
    left out."""
    samples_per_second: float
    """Speed since the last line, without the time of evaluations and checkpoints."""
    learning_rate: float
    """Learning rate of the last step."""
    gradient_norm: float | None
    """Gradient norm of the last step, before clipping; null: that step was skipped."""
    samples: int
    """Samples trained on so far."""
    epoch: float
    """Samples trained on so far, in passes over the data."""
    # Counted apart from `left_out_steps`: some overflows are normal while the scale adapts.
    skipped_steps: int
    """Steps that fp16's loss scaling skipped so far."""
    left_out_steps: int
    """Bad steps whose update was left out so far (`train.on_nonfinite: skip`, `train.on_spike`)."""
    elapsed_seconds: float
    """Time of the training loop so far, over all starts."""
    tokens_per_second: float | None = None
    """Speed in tokens, without padding, if samples have `input_ids`."""
    padding_share: float | None = None
    """Share of the places of the batches that are padding, if any are."""
    mfu: float | None = None
    """Model FLOPs utilization, on a GPU: share of the rate of a large matmul, measured at the
    start."""


@dataclass
class ParityLine:
    """A line for each step that also ran in plain PyTorch, of the rank with the most difference.

    Differences are relative; infinite and undefined numbers are strings, as in metrics.jsonl.
    """

    step: int
    """The optimizer step, from 1."""
    rank: int
    """The rank of the micro batch."""
    loss: float
    """Loss of the engine."""
    reference_loss: float
    """Loss of plain PyTorch."""
    loss_difference: float
    """Relative difference of the two losses."""
    gradient_difference: float
    """Largest relative difference of a gradient."""
    worst: list[list[Any]]
    """Gradients and changed weights or buffers that differ most: name, difference, norm on the
    engine, norm in PyTorch."""
    parameters: int
    """Number of gradients that were compared."""
    tolerance: float
    """Largest difference allowed; above it the run ends."""
    passed: bool
    """Whether both differences are within it."""
    state_difference: float = 0.0
    """Largest relative difference of a weight or buffer that a forward and backward pass changed,
    such as statistics of BatchNorm."""
    evaluation_difference: float | None = None
    """Relative difference of the loss in an evaluation pass of the micro batch, in the last step
    that is compared, if the recipe evaluates."""
    rounding: list[str] | None = None
    """Tensors that differ by more than the tolerance only by rounding, as a pass in float64 shows;
    no difference above includes them."""
    # A random tensor that both engines use causes no difference.
    draws: int | None = None
    """Number of random tensors that were recorded in a pass of PyTorch and given to both engines;
    other random tensors differ."""
    not_judged: str | None = None
    """Why the step shows nothing (a loss of nan in PyTorch, too), or float64 could not decide whether
    a difference is rounding."""
    seconds: float | None = None
    """Duration of the comparison."""


@dataclass
class EvaluationLine:
    """A line for each evaluation. `evaluation_NAME` is the metric NAME of evaluation.json, a number
    of `train.metric`, or one that a custom model returns."""

    step: int
    """Optimizer steps taken."""
    evaluation_loss: float
    """Mean loss over the evaluation data."""
    elapsed_seconds: float
    """Time of the training loop so far."""


@dataclass
class SaveLine:
    """A line for each save of a checkpoint."""

    step: int
    """Optimizer steps taken."""
    seconds: float | None
    """Time that training waited for the save; null: the save completed, but its start ended before
    it could write this line."""
    error: str | None = None
    """Why the checkpoint could not be written."""


@dataclass
class Evaluation:
    """The result of `ortlaunch evaluate` for a checkpoint: metrics on data.evaluation, without
    dropout, over all ranks."""

    step: int | None
    """Optimizer step of the checkpoint; for `device evaluate` the steps on devices; null: for a
    model (`evaluate MODEL --json`)."""
    samples: int
    """Samples evaluated; each counts once."""
    # Fields of the file by their own names: docs/reference/run-folder.md lists them from METRICS.
    metrics: dict[str, float]
    """Metrics by name."""
    own: dict[str, float] | None = None
    """Numbers of `train.metric`, and those that a custom model returns beside its loss, by name."""

    def to_json(self) -> dict[str, Any]:
        """Return the record with each metric as a field of its own."""
        own = {"own": self.own} if self.own else {}
        return {"step": self.step, "samples": self.samples, **self.metrics, **own}
