"""Values that the user's own model returns beside its loss, by name.

They are averaged over passes and ranks as the loss is. The engine's module returns them with the
loss, so that on engine ort they are outputs of the exported graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from ortlaunch.base.errors import InputError
from ortlaunch.run_folder.records import MetricsLine
from ortlaunch.worker.process_group.distributed import DistributedContext

LOSS = "loss"
# Names of metrics.jsonl, which a model's own values cannot have.
RESERVED_NAMES = {each.name for each in fields(MetricsLine)}
# The sum of value x weight, and the sum of the weights.
_Sums = dict[str, tuple[torch.Tensor, float]]


def output_values_by_name_or_empty(model_output: Any) -> Mapping[str, Any]:
    """Return a model's outputs by name: of a mapping, a named tuple or an object with attributes.

    A plain tuple has no names and gives an empty mapping.
    """
    if isinstance(model_output, Mapping):
        return model_output
    if isinstance(model_output, (torch.Tensor, list, tuple)):
        return model_output._asdict() if hasattr(model_output, "_asdict") else {}
    return {**getattr(model_output, "__dict__", {})}


def outputs_by_name_or_index(output: Any) -> Mapping[str, Any]:
    """Return a model's outputs by name; those of a plain tuple by index, as `output_0`."""
    if isinstance(output, (list, tuple)) and not hasattr(output, "_asdict"):
        return {f"output_{output_index}": value for output_index, value in enumerate(output)}
    return output_values_by_name_or_empty(output)


def scalars_beside_loss_by_name(model_output: Any) -> dict[str, torch.Tensor]:
    """Return the scalars beside the loss: tensors without a dimension, and Python's numbers."""
    scalars = {
        name: value
        for name, value in output_values_by_name_or_empty(model_output).items()
        if name != LOSS and _is_real_scalar(value)
    }
    return {str(name): torch.as_tensor(value).detach() for name, value in scalars.items()}


def _is_real_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return type(value) in (int, float)


def loss_of_engine_output(output: Mapping[str, torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return the loss in the output of an engine's module."""
    loss: torch.Tensor = output[LOSS] if isinstance(output, Mapping) else output
    return loss


class ValueMeans:
    """Weighted means of the model's own values over many passes."""

    def __init__(self) -> None:
        self._kept_sums: _Sums = {}
        self._step_sums: _Sums = {}

    def begin_step(self) -> None:
        """Start a step; drop the values of a step that was skipped."""
        self._step_sums = {}

    def add_values_and_return_loss(self, engine_output: Any, weight: float) -> torch.Tensor:
        """Add the values of a pass; return its loss.

        Raises:
            InputError: a value has a name that metrics.jsonl already uses.
        """
        if isinstance(engine_output, Mapping):
            for name in engine_output:
                if name in RESERVED_NAMES - {LOSS}:
                    raise InputError(
                        f"the model returns {name!r} beside its loss, a name that metrics.jsonl "
                        "already uses: rename it"
                    )
                if name != LOSS:
                    total, weights = self._step_sums.get(name, (0.0, 0.0))
                    self._step_sums[name] = (
                        total + engine_output[name].detach().double() * weight,
                        weights + weight,
                    )
        return loss_of_engine_output(engine_output)

    def keep_step(self) -> None:
        """Count the passes of the step, which has changed the weights."""
        for name, (value, weight) in self._step_sums.items():
            total, weights = self._kept_sums.get(name, (0.0, 0.0))
            self._kept_sums[name] = total + value, weights + weight
        self._step_sums = {}

    def means_over_ranks_and_reset(self, group: DistributedContext) -> dict[str, float]:
        """Return the means since the last call, over all ranks (collective).

        Passes that did not return a name do not count for it.
        """
        rank_sums = {
            name: (float(value), weight) for name, (value, weight) in self._kept_sums.items()
        }
        self._kept_sums = {}
        sums_by_rank: list[dict[str, tuple[float, float]]] = group.gather(rank_sums)
        means = {}
        # Ranks may have returned different names: a mean is over those that have the name.
        for name in sorted({name for rank in sums_by_rank for name in rank}):
            values, weights = zip(*(rank[name] for rank in sums_by_rank if name in rank))
            if sum(weights):
                means[name] = sum(values) / sum(weights)
        return means
