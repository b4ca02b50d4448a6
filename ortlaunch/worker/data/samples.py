"""What a data set is to the rest of the worker, and how its samples become a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ortlaunch.worker.data.reading import DataError

IGNORED = -100  # the label that cross entropy leaves out


class Samples(Protocol):
    """A data set; the epoch lets masking differ from one pass over the data to the next."""

    def __len__(self) -> int: ...
    def sample(self, index: int, epoch: int) -> Mapping[str, Any]: ...


def collate(samples: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Stack samples of one shape into a batch."""
    batch = {}
    for name in samples[0]:
        try:
            values = [torch.as_tensor(sample[name]) for sample in samples]
        except KeyError:
            raise DataError(f"samples of one batch differ in their names: not all have {name!r}") from None
        except (TypeError, ValueError, RuntimeError) as error:  # all three are torch's
            raise DataError(f"{name!r} of a sample is no tensor, nor what becomes one: {error}") from None
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) > 1:
            raise DataError(f"samples of one batch differ in the shape of {name!r}: {shapes}; pad them in data.factory")
        batch[name] = torch.stack(values)
    return batch
