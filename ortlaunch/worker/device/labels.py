"""Labels that are words: a client's own data may have some of them alone, and the graph has all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ortlaunch.worker.data import Data
from ortlaunch.worker.data.reading import DataError


def number_as_trained(data: Data, known: Mapping[str, int]) -> None:
    """Give labels the numbers that the graph knows, in place of those by this data's own alphabet.

    Raises:
        DataError: the graph has no such label.
    """
    unknown = [word for word in data.label_names if word not in known]
    if unknown:
        raise DataError(f"data: label {unknown[0]!r} is none of the artifacts': {', '.join(known)}")
    numbers = [known[word] for word in data.label_names]
    for samples in (data.train, data.evaluation) if numbers else ():
        for part in getattr(samples, "parts", [samples]):
            if hasattr(part, "labels"):
                part.labels = _renumbered(part.labels, numbers)


def _renumbered(labels: list[Any], numbers: list[int]) -> list[Any]:
    return [_renumbered(each, numbers) if isinstance(each, list) else numbers[each] for each in labels]
