"""Types of the functions and classes that a recipe names as `module:name`.

They are for type checkers and readers: nothing has to inherit from them. `check: Metric = my_metric`
in your own module lets a type checker compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModelFactory(Protocol):
    """`model.factory`: makes the model of `task: custom`.

    The model's forward gets the names of a batch as keywords; it returns the loss, or a mapping or
    an object with a `loss`.
    """

    # Type checkers accept functions of any arguments if both parameters have type Any.
    def __call__(self, *unused: Any, **arguments: Any) -> nn.Module:
        """Return the model, on the CPU and in float32.

        Args:
            arguments: `model.arguments` of the recipe.
        """


class Dataset(Protocol):
    """Samples by their numbers from 0; each is a mapping from names to tensors or numbers.

    With `data.collate`, a sample may be anything that the function accepts.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class DataFactory(Protocol):
    """`data.train.factory`, `data.evaluation.factory`: makes the samples of `format: custom`."""

    def __call__(self, *unused: Any, **arguments: Any) -> Dataset:
        """Return the samples, the same on all ranks.

        Args:
            arguments: `arguments` beside the factory.
        """


class Collate(Protocol):
    """`data.collate`: makes a batch of a list of samples."""

    def __call__(self, samples: list[Any], /) -> Mapping[str, Tensor]:
        """Return the batch: tensors by the names of the model's forward, one row a sample."""


class Metric(Protocol):
    """`train.metric`: measures the outputs of the model for all samples of an evaluation."""

    def __call__(
        self, outputs: Mapping[str, Any], batch: Mapping[str, Any], /
    ) -> Mapping[str, float]:
        """Return numbers by their names, which are added to the evaluation.

        Args:
            outputs: the model's outputs by name: arrays of numpy with one row a sample; a list of
                rows where batches differ in shape.
            batch: the inputs of the model, in the same form.
        """


class StepHook(Protocol):
    """`train.hook`: a class with this method, called on rank 0 at each logged step.

    A hook may have any of the methods of StepHook, EvaluationHook and CheckpointHook. Each returns
    "stop" to let the run save and end, else None.
    """

    def on_step(self, step: int, values: dict[str, object], /) -> Literal["stop"] | None:
        """Receive the line of metrics.jsonl."""


class EvaluationHook(Protocol):
    """`train.hook`: a class with this method, called on rank 0 after each evaluation."""

    def on_evaluation(self, step: int, values: dict[str, float], /) -> Literal["stop"] | None:
        """Receive the loss and the metrics."""


class CheckpointHook(Protocol):
    """`train.hook`: a class with this method, called on rank 0 after each checkpoint."""

    def on_checkpoint(self, step: int, folder: str, /) -> Literal["stop"] | None:
        """Receive the folder of the complete checkpoint."""


Hook = StepHook | EvaluationHook | CheckpointHook
"""An instance of the class that `train.hook` names."""
