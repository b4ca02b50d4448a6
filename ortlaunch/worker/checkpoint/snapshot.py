"""A checkpoint's content: weights, optimizer state and buffers by name, in safetensors files.

    index.json             format, ranks, the loop's state, shapes of the trained parameters, loss
                           scale, optimizer
    rank_00000.safetensors one rank's share. KIND:NAME@START is a range of a flattened tensor;
                           KIND:NAME@START:FIRST:LENGTH:STRIDE one of a slice, in runs of LENGTH
                           elements, each STRIDE after the one before; metadata: single values
                           such as `step`

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

from ortlaunch.base.errors import CheckpointError
from ortlaunch.base.json_types import Json
from ortlaunch.run_folder.file_sums import SizeAndChecksum
from ortlaunch.run_folder.folder import write_json_atomically
from ortlaunch.worker.checkpoint.tensor_file import write_safetensors_and_checksum
from ortlaunch.worker.model.fsdp import part_of_this_rank
from ortlaunch.worker.model.named_state import (
    STATE_TENSORS,
    NamedState,
    ParameterRange,
    counts_steps_by_group,
    optimizer_state_tensor_names,
)
from ortlaunch.worker.process_group.distributed import DistributedContext

FORMAT = "ortlaunch 1"
INDEX = "index.json"
WEIGHT = "weight"
BUFFER = "buffer"
# The key, the shape, and the flat tensor.
KeyShapeAndFlatTensor = tuple[str, tuple[int, ...], torch.Tensor]


def rank_file_name(rank: int) -> str:
    """Return the name of this rank's file."""
    return f"rank_{rank:05d}.safetensors"


@dataclass(frozen=True)
class RankSnapshot:
    """One rank's share of a checkpoint; its tensors are those of training, or copies of them."""

    rank: int
    index: Json
    tensors: list[KeyShapeAndFlatTensor]
    scalars_by_kind: dict[str, dict[str, float]]
    """Values such as `step`, by kind and parameter."""

    def copy_to_host(self) -> RankSnapshot:
        """Return a copy in host memory, which training does not change."""
        copies = [
            (key, shape, torch.empty_like(flat, device="cpu").copy_(flat))
            for key, shape, flat in self.tensors
        ]
        return replace(self, tensors=copies)

    def write_rank_file_and_index(self, checkpoint_folder: Path) -> dict[str, SizeAndChecksum]:
        """Write this rank's file, and on rank 0 the index; return the file with its checksum."""
        name = rank_file_name(self.rank)
        if self.rank == 0:
            write_json_atomically(checkpoint_folder / INDEX, self.index)
        return {
            name: write_safetensors_and_checksum(
                checkpoint_folder / name,
                self.tensors,
                {"numbers": json.dumps(self.scalars_by_kind)},
            )
        }


def snapshot_of_this_rank(
    named_state: NamedState, loop_state: dict[str, object], group: DistributedContext
) -> RankSnapshot:
    """Return this rank's share of the state; `loop_state` is the training loop's.

    Raises:
        CheckpointError: the optimizer or the model keeps a value that a checkpoint cannot hold.
    """
    parts = _ranges_of_rank_in_replicated_parts(
        [part for part in named_state.parts if part.is_saved],
        *(named_state.copy_and_count or (group.rank, group.size)),
    )
    tensors: list[KeyShapeAndFlatTensor] = [
        *_entries_of_model_buffers_or_refuse_non_tensors(named_state)
    ]
    scalars_by_kind: dict[str, dict[str, float]] = {}
    for part in parts:
        tensors.append(_key_shape_and_flat_tensor_of_range(WEIGHT, part, part.master, named_state))
        # A scalar parameter has the shape of its `step`.
        for tensor_kind, value in _optimizer_state_names_and_values_of_range(
            part, named_state.optimizer
        ):
            if (
                isinstance(value, torch.Tensor)
                and value.shape == part.master.shape
                and tensor_kind != "step"
            ):
                tensors.append(
                    _key_shape_and_flat_tensor_of_range(tensor_kind, part, value, named_state)
                )
            # A tensor with a shape of its own is not divided.
            elif tensor_kind in part.group.get(STATE_TENSORS, ()) and isinstance(
                value, torch.Tensor
            ):
                if part.start == 0:
                    flat_value = value.detach().reshape(-1)
                    tensors.append((f"{tensor_kind}:{part.name}@0", tuple(value.shape), flat_value))
            else:
                scalars_by_kind.setdefault(tensor_kind, {})[part.name] = _require_scalar_value(
                    tensor_kind, part, value
                )
    return RankSnapshot(
        group.rank,
        _checkpoint_index_record(named_state, loop_state, group.size),
        tensors,
        scalars_by_kind,
    )


def _checkpoint_index_record(
    named_state: NamedState, loop_state: dict[str, object], rank_count: int
) -> dict[str, object]:
    return {
        "format": FORMAT,
        "ranks": rank_count,
        "state": loop_state,
        "weights": {name: list(shape) for name, shape in named_state.shapes.items()},
        "buffers": {name: list(value.shape) for name, value in named_state.buffers.items()},
        "optimizer": {
            "class": type(named_state.optimizer).__name__,
            "tensors": sorted(
                {
                    tensor_kind
                    for group in named_state.optimizer.param_groups
                    for tensor_kind in optimizer_state_tensor_names(group)
                }
            ),
        },
        "loss_scale": named_state.loss_scale.read() if named_state.loss_scale else None,
    }


def _ranges_of_rank_in_replicated_parts(
    parts: list[ParameterRange], rank: int, rank_count: int
) -> list[ParameterRange]:
    """Return this rank's equal share of replicated parts: a range of all elements in a row."""
    total = sum(part.count for part in parts)
    elements_before = 0
    shared_ranges = []
    first_element = total * rank // rank_count
    end_element = total * (rank + 1) // rank_count
    for part in parts:
        begin = max(first_element - elements_before, 0)
        end = min(end_element - elements_before, part.count)
        if begin < end:
            shared_ranges.append(
                replace(
                    part, start=part.start + begin, count=end - begin, offset=part.offset + begin
                )
            )
        elements_before += part.count
    return shared_ranges


def _key_shape_and_flat_tensor_of_range(
    tensor_kind: str, parameter_range: ParameterRange, tensor: torch.Tensor, named_state: NamedState
) -> KeyShapeAndFlatTensor:
    parameter_shape = named_state.shapes[parameter_range.name]
    flat = part_of_this_rank(tensor.detach()).reshape(-1)[
        parameter_range.offset : parameter_range.offset + parameter_range.count
    ]
    # The whole parameter keeps its shape; a range of it is flat.
    shape = (
        parameter_shape
        if parameter_range.count == torch.Size(parameter_shape).numel()
        else (parameter_range.count,)
    )
    place = ":".join(map(str, (parameter_range.start, *(parameter_range.runs or ()))))
    return f"{tensor_kind}:{parameter_range.name}@{place}", shape, flat


def _entries_of_model_buffers_or_refuse_non_tensors(
    named_state: NamedState,
) -> Iterator[KeyShapeAndFlatTensor]:
    """Yield this rank's buffers: statistics of its own data, if training does not average them."""
    for name, value in named_state.buffers.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name} in the model's state is {type(value).__name__}; a checkpoint holds tensors only"
            )
        yield f"{BUFFER}:{name}@0", tuple(value.shape), value.detach().reshape(-1)


def _optimizer_state_names_and_values_of_range(
    parameter_range: ParameterRange, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, object]]:
    present_state = {
        name: value
        for name, value in optimizer.state.get(parameter_range.master, {}).items()
        if value is not None
    }
    # Some optimizers count steps for a parameter group, not for each parameter.
    if present_state and counts_steps_by_group(optimizer) and "step" in parameter_range.group:
        present_state["step"] = parameter_range.group["step"]
    yield from present_state.items()


def _require_scalar_value(
    tensor_kind: str, parameter_range: ParameterRange, state_value: Any
) -> float:
    try:
        return float(state_value)
    except (TypeError, ValueError, RuntimeError):
        raise CheckpointError(
            f"the optimizer's {tensor_kind} of {parameter_range.name} is neither a scalar nor of its shape"
        ) from None
