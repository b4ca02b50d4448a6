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

from ortlaunch.base.errors import HookError
from ortlaunch.base.json_types import Json
from ortlaunch.worker.data.user_data import import_user_function
from ortlaunch.worker.model.returned_values import LOSS, outputs_by_name_or_index
from ortlaunch.worker.process_group.distributed import DistributedContext

Arrays = dict[str, NDArray[np.int64]]


class UserMetric:
    """The user's metric of one evaluation; without `train.metric` it does nothing."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        # The arrays of each micro batch: FIRST SAMPLE/SIDE/NAME.
        self.arrays: Arrays = {}

    def keep_arrays_of_samples_if_metric_is_set(
        self, sample_range: range, output: Any, batch: Mapping[str, torch.Tensor]
    ) -> None:
        """Add the model's output for these samples."""
        # An empty range only fills a rank's turn.
        if self.name is not None and sample_range:
            for side, values in (("outputs", outputs_by_name_or_index(output)), ("batch", batch)):
                for name, array in _arrays_with_row_per_sample(values, len(sample_range)).items():
                    self.arrays[f"{sample_range[0]}/{side}/{name}"] = array

    def call_on_rank_0_and_share_values(
        self, group: DistributedContext, evaluation_metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the values of the user's function for all samples, on all ranks (collective).

        Args:
            group: the ranks of the run.
            evaluation_metrics: metrics that the evaluation already has.

        Raises:
            HookError: the function raised, or its result is not valid; the same on all ranks.
        """
        if self.name is None:
            return {}
        collected = group.data_parallel.gather_arrays_on_rank_0(self.arrays)
        result: Json = {}
        if group.rank == 0:
            try:
                result = {
                    "found": self._call_metric_function_and_check(
                        dict(ChainMap(*collected)), evaluation_metrics
                    )
                }
            except HookError as error:
                result = {"error": str(error)}
        # Rank 0's error must reach all ranks: else they would wait for it in the next collective.
        result = group.gather(result)[0]
        if "error" in result:
            raise HookError(result["error"])
        user_values: dict[str, float] = result["found"]
        return user_values

    def _call_metric_function_and_check(
        self, arrays: Arrays, evaluation_metrics: Mapping[str, float]
    ) -> dict[str, float]:
        user_function = import_user_function("train.metric", str(self.name))
        outputs, batch = (_rows_by_value_name(arrays, side) for side in ("outputs", "batch"))
        try:
            returned_values = user_function(outputs, batch)
        except Exception as error:
            # Only frames of the user's function, without this one.
            frames = error.__traceback__ and error.__traceback__.tb_next
            stack_text = "".join(traceback.format_exception(type(error), error, frames))
            raise HookError(
                f"train.metric: {self.name} raised {type(error).__name__}: {error}\n{stack_text}"
            ) from error
        try:
            user_values = {str(name): float(value) for name, value in returned_values.items()}
        except (AttributeError, TypeError, ValueError):
            raise HookError(
                f"train.metric: {self.name} returned {returned_values!r:.200}; it returns numbers by name"
            ) from None
        for name in user_values.keys() & {"step", "samples", *evaluation_metrics}:
            raise HookError(
                f"train.metric: {self.name} returned {name!r}, a name that the evaluation "
                "already uses: rename it"
            )
        return user_values


def _arrays_with_row_per_sample(value_by_name: Mapping[str, Any], sample_count: int) -> Arrays:
    """Return those tensors that have one row per sample, as arrays."""
    rows = {
        name: value.detach().cpu()
        for name, value in value_by_name.items()
        if isinstance(value, torch.Tensor)
        and value.dim()
        and len(value) == sample_count
        and name != LOSS
    }
    return {
        # NumPy has no bfloat16.
        name: (row.float() if row.is_floating_point() else row).numpy()
        for name, row in rows.items()
    }


def _rows_by_value_name(arrays: Arrays, outputs_or_batch: str) -> dict[str, object]:
    """Return the rows of all samples on one side, in order, by name.

    They are an array, or a list of rows if batches differ in shape.
    """
    parts: dict[str, list[NDArray[np.int64]]] = {}
    for key in sorted(arrays, key=lambda key: int(key.partition("/")[0])):
        _, key_side, name = key.split("/", 2)
        if key_side == outputs_or_batch:
            parts.setdefault(name, []).append(arrays[key])
    return {name: _concatenated_array_or_row_list(rows) for name, rows in parts.items()}


def _concatenated_array_or_row_list(arrays: list[NDArray[np.int64]]) -> Any:
    if len({part.shape[1:] for part in arrays}) == 1:
        return np.concatenate(arrays)
    return [row for part in arrays for row in part]
