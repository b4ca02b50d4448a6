"""`train.metric`: the user's own function of the model's outputs and the samples of an evaluation.

Rank 0 calls it with the samples of all ranks in their order, so that the result does not depend on
the number of ranks.
"""

from __future__ import annotations

import traceback
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.errors import HookError
from ortlaunch.json_types import Json
from ortlaunch.worker.data.own import find
from ortlaunch.worker.model.own_numbers import LOSS, outputs_by_name
from ortlaunch.worker.process_group.distributed import DistributedContext

Arrays = dict[str, NDArray[np.int64]]


class OwnMetric:
    """The user's metric of one evaluation; without `train.metric` it does nothing."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        # The arrays of each micro batch: FIRST SAMPLE/SIDE/NAME.
        self.arrays: Arrays = {}

    def add(self, counted: range, output: Any, batch: Mapping[str, torch.Tensor]) -> None:
        """Add the model's output for these samples."""
        # An empty range only fills a rank's turn.
        if self.name is not None and counted:
            for side, values in (("outputs", outputs_by_name(output)), ("batch", batch)):
                for name, array in _arrays(values, len(counted)).items():
                    self.arrays[f"{counted[0]}/{side}/{name}"] = array

    def read(self, group: DistributedContext, taken: Mapping[str, float]) -> dict[str, float]:
        """Return the values of the user's function for all samples, on all ranks (collective).

        Args:
            group: the ranks of the run.
            taken: metrics that the evaluation already has.

        Raises:
            HookError: the function raised, or its result is not valid; the same on all ranks.
        """
        if self.name is None:
            return {}
        collected = group.collect(self.arrays)
        told: Json = {}
        if group.rank == 0:
            try:
                told = {"found": self._values(dict(ChainMap(*collected)), taken)}
            except HookError as error:
                told = {"error": str(error)}
        # Rank 0's error must reach all ranks: else they would wait for it in the next collective.
        told = group.gather(told)[0]
        if "error" in told:
            raise HookError(told["error"])
        found: dict[str, float] = told["found"]
        return found

    def _values(self, arrays: Arrays, taken: Mapping[str, float]) -> dict[str, float]:
        own = find("train.metric", str(self.name))
        outputs, batch = (_joined(arrays, side) for side in ("outputs", "batch"))
        try:
            answer = own(outputs, batch)
        except Exception as error:
            # Only frames of the user's function, without this one.
            frames = error.__traceback__ and error.__traceback__.tb_next
            where = "".join(traceback.format_exception(type(error), error, frames))
            raise HookError(
                f"train.metric: {self.name} raised {type(error).__name__}: {error}\n{where}"
            ) from error
        try:
            found = {str(name): float(value) for name, value in answer.items()}
        except (AttributeError, TypeError, ValueError):
            raise HookError(
                f"train.metric: {self.name} returned {answer!r:.200}; it returns numbers by name"
            ) from None
        for name in found.keys() & {"step", "samples", *taken}:
            raise HookError(
                f"train.metric: {self.name} returned {name!r}, a name that the evaluation "
                "already uses: rename it"
            )
        return found


def _arrays(values: Mapping[str, Any], samples: int) -> Arrays:
    """Return those tensors that have one row per sample, as arrays."""
    rows = {
        name: value.detach().cpu()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
        and value.dim()
        and len(value) == samples
        and name != LOSS
    }
    return {
        # NumPy has no bfloat16.
        name: (row.float() if row.is_floating_point() else row).numpy()
        for name, row in rows.items()
    }


def _joined(arrays: Arrays, side: str) -> Json:
    """Return the rows of all samples on one side, in order, by name.

    They are an array, or a list of rows if batches differ in shape.
    """
    parts: dict[str, list[NDArray[np.int64]]] = {}
    for key in sorted(arrays, key=lambda key: int(key.partition("/")[0])):
        _, of_side, name = key.split("/", 2)
        if of_side == side:
            parts.setdefault(name, []).append(arrays[key])
    return {name: _rows(rows) for name, rows in parts.items()}


def _rows(parts: list[NDArray[np.int64]]) -> Any:
    if len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    return [row for part in parts for row in part]
