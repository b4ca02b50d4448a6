"""A checkpoint's content: weights, optimizer state and buffers by name, in safetensors files.

    index.json             format, ranks, the loop's state, shapes of the trained parameters, loss
                           scale, optimizer
    rank_00000.safetensors one rank's share. KIND:NAME@START is a range of a flattened tensor;
                           metadata: single values such as `step`

KIND is weight, buffer, or the optimizer's own name. torch.distributed.checkpoint is not used: its
metadata is a pickle, and its saving and planning are collective, while here each rank writes and
reads by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ortlaunch.errors import CheckpointError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.file_sums import SizeAndChecksum
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker.checkpoint.tensor_file import write_tensors
from ortlaunch.worker.model.named_state import (
    STATE_TENSORS,
    NamedState,
    ParameterRange,
    counts_by_group,
    tensor_kinds,
)
from ortlaunch.worker.process_group.distributed import DistributedContext

FORMAT = "ortlaunch 1"
INDEX = "index.json"
WEIGHT = "weight"
BUFFER = "buffer"
# The key, the shape, and the flat tensor.
Entry = tuple[str, tuple[int, ...], torch.Tensor]


def file_of(rank: int) -> str:
    """Return the name of this rank's file."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """One rank's share of a checkpoint; its tensors are those of training, or copies of them."""

    rank: int
    index: Json
    tensors: list[Entry]
    numbers: dict[str, dict[str, float]]
    """Values such as `step`, by kind and parameter."""

    def copied(self) -> Snapshot:
        """Return a copy in host memory, which training does not change."""
        copies = [
            (key, shape, torch.empty_like(flat, device="cpu").copy_(flat))
            for key, shape, flat in self.tensors
        ]
        return replace(self, tensors=copies)

    def write(self, folder: Path) -> dict[str, SizeAndChecksum]:
        """Write this rank's file, and on rank 0 the index; return the file with its checksum."""
        name = file_of(self.rank)
        if self.rank == 0:
            write_json_atomically(folder / INDEX, self.index)
        return {
            name: write_tensors(folder / name, self.tensors, {"numbers": json.dumps(self.numbers)})
        }


def take(named: NamedState, state: dict[str, object], group: DistributedContext) -> Snapshot:
    """Return this rank's share of the state; `state` is the training loop's.

    Raises:
        CheckpointError: the optimizer or the model keeps a value that a checkpoint cannot hold.
    """
    parts = _share(named.parts, group.rank, group.size) if named.replicated else named.parts
    tensors: list[Entry] = [*_buffers(named)]
    numbers: dict[str, dict[str, float]] = {}
    for part in parts:
        tensors.append(_entry(WEIGHT, part, part.master, named))
        # A scalar parameter has the shape of its `step`.
        for kind, value in _state_of(part, named.optimizer):
            if (
                isinstance(value, torch.Tensor)
                and value.shape == part.master.shape
                and kind != "step"
            ):
                tensors.append(_entry(kind, part, value, named))
            # A tensor with a shape of its own is not divided.
            elif kind in part.group.get(STATE_TENSORS, ()) and isinstance(value, torch.Tensor):
                if part.start == 0:
                    whole = value.detach().reshape(-1)
                    tensors.append((f"{kind}:{part.name}@0", tuple(value.shape), whole))
            else:
                numbers.setdefault(kind, {})[part.name] = _number(kind, part, value)
    return Snapshot(group.rank, _index(named, state, group.size), tensors, numbers)


def _index(named: NamedState, state: dict[str, object], ranks: int) -> dict[str, object]:
    return {
        "format": FORMAT,
        "ranks": ranks,
        "state": state,
        "weights": {name: list(shape) for name, shape in named.shapes.items()},
        "buffers": {name: list(value.shape) for name, value in named.buffers.items()},
        "optimizer": {
            "class": type(named.optimizer).__name__,
            "tensors": sorted(
                {kind for group in named.optimizer.param_groups for kind in tensor_kinds(group)}
            ),
        },
        "loss_scale": named.loss_scale.read() if named.loss_scale else None,
    }


def _share(parts: list[ParameterRange], rank: int, ranks: int) -> list[ParameterRange]:
    """Return this rank's equal share of replicated parts: a range of all elements in a row."""
    total = sum(part.count for part in parts)
    before = 0
    found = []
    first = total * rank // ranks
    last = total * (rank + 1) // ranks
    for part in parts:
        begin = max(first - before, 0)
        end = min(last - before, part.count)
        if begin < end:
            found.append(
                ParameterRange(
                    part.name, begin, end - begin, part.master, part.offset + begin, part.group
                )
            )
        before += part.count
    return found


def _entry(kind: str, part: ParameterRange, tensor: torch.Tensor, named: NamedState) -> Entry:
    whole = named.shapes[part.name]
    flat = tensor.detach().reshape(-1)[part.offset : part.offset + part.count]
    # The whole parameter keeps its shape; a range of it is flat.
    shape = whole if part.count == torch.Size(whole).numel() else (part.count,)
    return f"{kind}:{part.name}@{part.start}", shape, flat


def _buffers(named: NamedState) -> Iterator[Entry]:
    """Yield this rank's buffers: statistics of its own data, if training does not average them."""
    for name, value in named.buffers.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} in the model's state is {type(value).__name__}; a checkpoint holds tensors only"
            )
        yield f"{BUFFER}:{name}@0", tuple(value.shape), value.detach().reshape(-1)


def _state_of(
    part: ParameterRange, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, object]]:
    """Yield the optimizer's state of a part, by the optimizer's names."""
    kept = {
        name: value
        for name, value in optimizer.state.get(part.master, {}).items()
        if value is not None
    }
    # Some optimizers count steps for a parameter group, not for each parameter.
    if kept and counts_by_group(optimizer) and "step" in part.group:
        kept["step"] = part.group["step"]
    yield from kept.items()


def _number(kind: str, part: ParameterRange, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(
            f"the optimizer's {kind} of {part.name} is neither a scalar nor of its shape"
        ) from None
