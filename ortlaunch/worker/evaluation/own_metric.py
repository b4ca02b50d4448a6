"""`train.metric`: the user's own function of the model's outputs and the samples of an evaluation.

Rank 0 calls it with the samples of all ranks in their order, so that the result does not depend on
the number of ranks.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ortlaunch.errors import HookError
from ortlaunch.json_types import Json
from ortlaunch.worker.data.own import find
from ortlaunch.worker.model.own_numbers import LOSS, outputs_by_name
from ortlaunch.worker.process_group.distributed import DistributedContext

Arrays = dict[str, NDArray[np.int64]]


class Piece(NamedTuple):
    """The outputs and inputs of one micro batch."""

    first: int
    """Index of its first sample."""
    outputs: Arrays
    batch: Arrays


class OwnMetric:
    """The user's metric of one evaluation; without `train.metric` it does nothing."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.pieces = list[Piece]()

    def add(self, counted: range, output: Any, batch: Mapping[str, torch.Tensor]) -> None:
        """Add the model's output for these samples."""
        # An empty range only fills a rank's turn.
        if self.name is not None and counted:
            self.pieces.append(
                Piece(
                    counted[0],
                    _arrays(outputs_by_name(output), len(counted)),
                    _arrays(batch, len(counted)),
                )
            )

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
        collected = group.collect(_by_name(self.pieces))
        told: Json = {}
        if group.rank == 0:
            try:
                told = {"found": self._values(_in_order(collected), taken)}
            except HookError as error:
                told = {"error": str(error)}
        # Rank 0's error must reach all ranks: else they would wait for it in the next collective.
        told = json.loads(group.gather(json.dumps(told))[0])
        if "error" in told:
            raise HookError(told["error"])
        found: dict[str, float] = told["found"]
        return found

    def _values(self, pieces: list[Piece], taken: Mapping[str, float]) -> dict[str, float]:
        own = find("train.metric", str(self.name))
        outputs, batch = (
            _joined([getattr(piece, side) for piece in pieces]) for side in ("outputs", "batch")
        )
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


def _by_name(pieces: list[Piece]) -> Arrays:
    """Return all arrays of the pieces under one name each: FIRST/SIDE/NAME."""
    return {
        f"{piece.first}/{side}/{name}": array
        for piece in pieces
        for side in ("outputs", "batch")
        for name, array in getattr(piece, side).items()
    }


def _in_order(collected: list[Arrays]) -> list[Piece]:
    """Return the pieces of all ranks in the order of their samples, from `_by_name`."""
    pieces: dict[int, Piece] = {}
    for of_rank in collected:
        for key, array in of_rank.items():
            first, side, name = key.split("/", 2)
            piece = pieces.setdefault(int(first), Piece(int(first), {}, {}))
            getattr(piece, side)[name] = array
    return sorted(pieces.values(), key=lambda piece: piece.first)


def _joined(parts: list[Arrays]) -> Json:
    """Return the rows of all samples, in order, by name.

    They are an array, or a list of rows if batches differ in shape.
    """
    return (
        {name: _rows([part[name] for part in parts if name in part]) for name in parts[0]}
        if parts
        else {}
    )


def _rows(parts: list[NDArray[np.int64]]) -> Any:
    if len({part.shape[1:] for part in parts}) == 1:
        return np.concatenate(parts)
    return [row for part in parts for row in part]
