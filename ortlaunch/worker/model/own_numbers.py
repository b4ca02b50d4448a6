"""What a model of the user's returns beside its loss: numbers by name, averaged over passes and ranks as the loss is.

They leave the engine's module with the loss, so that on engine ort they are outputs of the exported graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from ortlaunch.errors import InputError
from ortlaunch.run_folder.records import MetricsLine
from ortlaunch.worker.process_group.distributed import DistributedContext

LOSS = "loss"
TAKEN = {each.name for each in fields(MetricsLine)}
_Sums = dict[str, tuple[torch.Tensor, float]]  # of value x weight, and of the weights


def by_name(output: Any) -> Mapping[str, Any]:
    """What a model returns, by name: of a mapping, a named tuple or any other object; a bare tuple has no names."""
    if isinstance(output, Mapping):
        return output
    if isinstance(output, (torch.Tensor, list, tuple)):
        return output._asdict() if hasattr(output, "_asdict") else {}
    return {**getattr(output, "__dict__", {})}


def named(output: Any) -> Mapping[str, Any]:
    """The same; of a bare tuple by place."""
    if isinstance(output, (list, tuple)) and not hasattr(output, "_asdict"):
        return {f"output_{number}": value for number, value in enumerate(output)}
    return by_name(output)


def numbers_of(output: Any) -> dict[str, torch.Tensor]:
    """The numbers beside the loss: tensors without a dimension, and Python's numbers."""
    found = {
        name: value for name, value in by_name(output).items() if name != LOSS and _is_number(value)
    }
    return {str(name): torch.as_tensor(value).detach() for name, value in found.items()}


def _is_number(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return type(value) in (int, float)


def loss_in(output: Mapping[str, torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """The loss in what an engine's module returns."""
    found: torch.Tensor = output[LOSS] if isinstance(output, Mapping) else output
    return found


class Numbers:
    """Weighted means of the numbers of many passes."""

    def __init__(self) -> None:
        self._kept: _Sums = {}
        self._step: _Sums = {}

    def begin(self) -> None:
        """The passes of a step begin; what those of a step that was left out had is forgotten."""
        self._step = {}

    def take(self, output: Any, weight: float) -> torch.Tensor:
        """A pass: keep its numbers, return its loss.

        Raises:
            InputError: a number has a name that metrics.jsonl has already.
        """
        for name in output if isinstance(output, Mapping) else ():
            if name in TAKEN - {LOSS}:
                raise InputError(
                    f"the model returns {name!r} beside its loss, and metrics.jsonl has that name already: give it "
                    "another"
                )
            if name != LOSS:
                total, weights = self._step.get(name, (0.0, 0.0))
                self._step[name] = total + output[name].detach().double() * weight, weights + weight
        return loss_in(output)

    def keep(self) -> None:
        """The step was taken: its passes count."""
        for name, (value, weight) in self._step.items():
            total, weights = self._kept.get(name, (0.0, 0.0))
            self._kept[name] = total + value, weights + weight
        self._step = {}

    def read(self, group: DistributedContext) -> dict[str, float]:
        """The means since the last reading, over all ranks (collective); a name counts where it was returned."""
        mine = {name: (float(value), weight) for name, (value, weight) in self._kept.items()}
        self._kept = {}
        ranks: list[dict[str, tuple[float, float]]] = [
            json.loads(text) for text in group.gather(json.dumps(mine))
        ]
        found = {}
        for name in sorted({name for rank in ranks for name in rank}):
            values, weights = zip(*(rank[name] for rank in ranks if name in rank))
            if sum(weights):
                found[name] = sum(values) / sum(weights)
        return found
