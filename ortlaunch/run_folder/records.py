"""What a run tells in its folder, as types: memory.json, summary.json, metrics.jsonl and more. Standard library only.

The text under a field is its manual: docs/run-folder.md is made of it (`ortlaunch schema --run-folder`). A field with a
default is left out of the file where it has no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_NONE = type(None)
# Annotation of a field -> what JSON may hold there. Fields of other types are not checked.
_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str | None": (str, _NONE),
    "int | None": (int, _NONE),
}
_TEXTS = "tuple[str, ...]"


def as_json(record: Any) -> Any:
    """A record as JSON's mappings and lists."""
    if is_dataclass(record):
        pairs = ((each, getattr(record, each.name)) for each in fields(record))
        return {
            each.name: as_json(value)
            for each, value in pairs
            if value is not None or each.default is MISSING
        }
    if isinstance(record, dict):
        return {name: as_json(value) for name, value in record.items()}
    return [as_json(value) for value in record] if isinstance(record, (list, tuple)) else record


def from_json(kind: type[_T], values: Mapping[str, Any]) -> _T:
    """A record of values from JSON; names that a later version may have added are left out.

    Raises:
        TypeError: a value is missing, or of another type than the field.
    """
    known: list[Any] = [*fields(kind)]  # type: ignore[arg-type]
    found = {each.name: values[each.name] for each in known if each.name in values}
    for each in known:
        if each.name in found and not fits(each.type, found[each.name]):
            raise TypeError(f"{each.name} is {found[each.name]!r:.80}")
    for each in known:
        if each.type == _TEXTS and each.name in found:
            found[each.name] = tuple(found[each.name])
    return kind(**found)


def fits(annotation: str, value: Any) -> bool:
    """Whether a value from JSON has the type of a field."""
    if annotation == _TEXTS:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return isinstance(value, _TYPES.get(annotation, object))


@dataclass
class VocabularyRecord:
    """What the model's numbers stand for; tokenizer/ beside it has the words."""

    trained_tokenizer: dict[str, Any] | None
    """The recipe's `data.tokenizer` where it was trained on the corpus; a run that goes on takes tokenizer/ for it."""
    labels: list[str]
    """Classes by number, where the data name them: labels that are words, or a data set's own names of its integers."""
    classes: int
    """How many classes the data have; 0: none."""


@dataclass
class MeasuredMemory:
    """Bytes of the live tensors of the rank that has most, each storage once, and the peak of the process."""

    weights: int
    """Parameters."""
    gradients: int
    """Their gradients."""
    optimizer: int
    """Optimizer state with float32 copies of the weights, where there are any."""
    buckets: int
    """DeepSpeed's communication buffers."""
    other: int
    """All other tensors."""
    model: int
    """weights + gradients + optimizer, which the plan counts exactly."""
    peak: int
    """Most bytes at once (`peak_is` says of what)."""


@dataclass
class PlannedMemory:
    """Bytes of a rank by `ortlaunch plan`."""

    weights: int
    """Parameters."""
    gradients: int
    """Their gradients."""
    optimizer: int
    """Optimizer state with float32 copies of the weights, where there are any."""
    activations: int
    """What the forward pass keeps for the backward pass: an estimate."""
    buckets: int
    """DeepSpeed's communication buffers: an upper bound."""
    overhead: int
    """Estimate of everything else: the process on a CPU, contexts and workspaces on CUDA."""
    model: int
    """weights + gradients + optimizer."""
    peak: int
    """The sum of all; on CUDA without `overhead`, which torch's allocator does not see."""


@dataclass
class MemoryReport:
    """Memory of a rank, planned and measured side by side; written at the end of a run."""

    planned: PlannedMemory | None
    """null: a model that the plan cannot count."""
    measured: MeasuredMemory
    """The largest of all ranks, part by part, over the first two steps; the peak over the run."""
    peak_is: str
    """What `peak` was measured as."""
    baseline: int
    """Bytes that were resident, without the weights, when the model was built (CPU)."""
    peak_by_rank: list[int]
    """The peak of each rank."""


@dataclass
class BestEvaluation:
    """The best evaluation of a training, over all its starts; its checkpoint is kept."""

    metric: str
    """Of `checkpoint.keep_best`."""
    value: float
    """What it was."""
    step: int
    """Of the checkpoint."""
    exported: bool
    """Whether export/ was made of it, not of the last step."""


@dataclass
class StoppedEarly:
    """By what `train.stop_after` a training was over, and what it found."""

    metric: str
    """Its metric."""
    mode: str
    """`min` or `max`: what is better."""
    evaluations: int
    """So many in a row were not better."""
    value: float
    """The best."""
    step: int
    """Where that was."""


@dataclass
class Summary:
    """What the whole training came to, over all its starts; written at its end."""

    steps: int
    """Optimizer steps."""
    samples: int
    """Samples trained on, over all ranks."""
    epochs: float
    """The same in passes over the data."""
    loss: float | None
    """The last logged training loss; null: none was logged."""
    evaluation_loss: float | None
    """The last evaluation's loss; null: there was none."""
    training_seconds: float
    """Time of the training loop, over all starts."""
    bad_steps: dict[str, int]
    """Bad steps by what followed, `skip` or `rollback`, over all starts; their samples are in bad_steps.jsonl."""
    seconds: dict[str, float]
    """What each part of the last start took on rank 0, from loading libraries to writing the export."""
    failed_saves: int = 0
    """Checkpoints that could not be written (checkpoint.on_failure: continue), over all starts."""
    evaluation: dict[str, float] | None = None
    """The last evaluation's other metrics, by the names of evaluation.json, for tasks that have some."""
    best: BestEvaluation | None = None
    """The best checkpoint (checkpoint.keep_best)."""
    stopped_early: StoppedEarly | None = None
    """Why the training ended before its last step (train.stop_after)."""


@dataclass
class Stopped:
    """How a stop ended that was asked for; written once all is saved, and gone with the next start."""

    step: int
    """Optimizer steps that the newest checkpoint has."""
    steps: int
    """Optimizer steps that the run is to have."""
    by: str
    """What asked for it: a signal's name, or the words of `requests/stop.json`."""
    exit_status: int
    """85: saved, run me again; 130 after a person's Ctrl-C, saved all the same."""


@dataclass
class BadStep:
    """A line for each step whose loss or gradient was bad, in the order in which they came up, over all starts."""

    step: int
    """The optimizer step, from 1."""
    kind: str
    """`loss` or `gradient`: it was inf or nan; `spike`: the loss jumped."""
    message: str
    """What was wrong, for a person."""
    samples: list[int]
    """The samples of data.train that the step took, of all ranks and passes."""
    parameter: str | None
    """The first parameter, in the model's order, whose gradient is inf or nan; null: none is."""
    action: str = "stop"
    """What followed: `stop`, `skip` or `rollback`."""
    checkpoint: int | None = None
    """The step of the checkpoint that was taken up again (rollback)."""
    places: list[int] | None = None
    """Where these samples are in the order of all epochs: first, and the one after the last (rollback); null:
    they are not left out any more, for the order has changed since."""


@dataclass
class MetricsLine:
    """A line for each logged step (`log.every_steps`); numbers that a custom model returns beside its loss stand in it
    under their names.

    Infinite and undefined numbers are the words `inf`, `-inf` and `nan`.
    """

    step: int
    """Optimizer steps taken, from 1."""
    loss: float | None
    """Mean training loss since the last line, over all ranks; null: all these steps were left out as bad ones."""
    samples_per_second: float
    """Speed since the last line; evaluations and checkpoints do not count as time."""
    learning_rate: float
    """Of the last step."""
    gradient_norm: float | None
    """Of the last step, before clipping; null: that step was skipped."""
    samples: int
    """Samples trained on so far."""
    epoch: float
    """The same in passes over the data."""
    skipped_steps: int
    """Steps that fp16's loss scaling left out so far."""
    left_out_steps: int
    """Bad steps whose update was left out so far (`train.on_nonfinite: skip`, `train.on_spike`)."""
    elapsed_seconds: float
    """Time of the training loop so far, over all starts."""
    tokens_per_second: float | None = None
    """Speed in tokens, where samples have a length."""
    mfu: float | None = None
    """Model FLOPs utilization, on a GPU: the share of the rate of a large matmul, measured at the start."""


@dataclass
class ParityLine:
    """A line for each step that was also run in plain PyTorch: of the rank where it differed most.

    A difference is relative; infinite and undefined numbers are words, as in metrics.jsonl.
    """

    step: int
    """The optimizer step, from 1."""
    rank: int
    """Which rank's micro batch it is."""
    loss: float
    """The engine's."""
    reference_loss: float
    """Plain PyTorch's."""
    loss_difference: float
    """Of the two."""
    gradient_difference: float
    """The largest of any gradient."""
    worst: list[list[Any]]
    """What differs most, gradients and changed weights or buffers: name, difference, norm on the engine, in PyTorch."""
    parameters: int
    """Gradients that were compared."""
    tolerance: float
    """Above which the run ends."""
    passed: bool
    """Whether both differences are within it."""
    state_difference: float = 0.0
    """The largest of any weight or buffer that a forward and backward pass changed, such as statistics of BatchNorm."""
    rounding: list[str] | None = None
    """What differs by more than the tolerance and is rounding, as a pass in float64 shows; counted in no difference."""
    draws: int | None = None
    """How many tensors of random numbers, recorded in a pass of PyTorch, were given to both; other draws differ."""
    not_judged: str | None = None
    """Why float64 could not show whether a difference is rounding."""
    seconds: float | None = None
    """What the comparison took."""


@dataclass
class EvaluationLine:
    """A line for each evaluation. `evaluation_NAME` are the metrics that evaluation.json has by that name, numbers of
    `train.metric` and of a custom model's own."""

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
    """What training waited for it; null: it was whole when its start ended, which could not write this line."""
    error: str | None = None
    """Why it could not be written."""


@dataclass
class Evaluation:
    """What `ortlaunch evaluate` measured of a checkpoint on data.evaluation, without dropout, over all ranks."""

    step: int | None
    """Of the checkpoint; of `device evaluate` the steps on devices; null: a model's, by `evaluate MODEL --json`."""
    samples: int
    """Each counts once."""
    metrics: dict[str, float]
    """Each under its own name."""
    own: dict[str, float] | None = None
    """Numbers of `train.metric`, and those that a custom model returns beside its loss, by name."""

    def to_json(self) -> dict[str, Any]:
        """The metrics as fields."""
        own = {"own": self.own} if self.own else {}
        return {"step": self.step, "samples": self.samples, **self.metrics, **own}
