"""Load a checkpoint, for any world size, ZeRO stage and engine.

Each rank reads all headers, but only the data of its buffers and of the ranges that it holds.
Nothing is unpickled. The index is JSON, and tensors are in the safetensors format.
"""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ortlaunch.base.errors import CheckpointError
from ortlaunch.base.json_types import Json
from ortlaunch.base.units import count_with_noun
from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from ortlaunch.worker.checkpoint.snapshot import BUFFER, FORMAT, INDEX, WEIGHT, rank_file_name
from ortlaunch.worker.checkpoint.tensor_file import (
    TensorLocation,
    read_flat_elements,
    read_tensor_locations_and_metadata,
)
from ortlaunch.worker.model.fsdp import part_of_this_rank
from ortlaunch.worker.model.named_state import (
    STATE_TENSORS,
    NamedState,
    ParameterRange,
    Runs,
    counts_steps_by_group,
    optimizer_state_tensor_names,
    persistent_buffers_by_name,
    trained_parameter_shapes,
)
from ortlaunch.worker.process_group.distributed import DistributedContext


class CheckpointTensors:
    """A checkpoint's files, as one set of named tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = _read_index_of_known_format(folder)
        # The saved ranges of a tensor in order, by the slice that they are of.
        self.pieces: dict[tuple[str, str], dict[Runs | None, list[tuple[int, TensorLocation]]]] = {}
        self.scalars_by_kind: dict[str, dict[str, float]] = {}
        self.buffers: list[dict[str, TensorLocation]] = []
        for rank in range(self.index["ranks"]):
            self._index_tensors_buffers_and_scalars_of_rank(
                *read_tensor_locations_and_metadata(folder / rank_file_name(rank))
            )
        for pieces_by_runs in self.pieces.values():
            for pieces in pieces_by_runs.values():
                pieces.sort(key=lambda piece: piece[0])

    def _index_tensors_buffers_and_scalars_of_rank(
        self, location_by_key: dict[str, TensorLocation], metadata: dict[str, str]
    ) -> None:
        buffers = {}
        for key, entry in location_by_key.items():
            # A name may contain ":" and "@" itself.
            tensor_kind, _, name_and_place = key.partition(":")
            name, _, place = name_and_place.rpartition("@")
            start, *runs = map(int, place.split(":"))
            if tensor_kind == BUFFER:
                buffers[name] = entry
            else:
                pieces_by_runs = self.pieces.setdefault((tensor_kind, name), {})
                pieces_by_runs.setdefault(Runs(*runs) if runs else None, []).append((start, entry))
        self.buffers.append(buffers)
        for tensor_kind, scalars in json.loads(metadata.get("numbers", "{}")).items():
            self.scalars_by_kind.setdefault(tensor_kind, {}).update(scalars)

    def has_tensor(self, tensor_kind: str, parameter_name: str) -> bool:
        """Return whether the checkpoint has a tensor of this kind for the parameter."""
        return (tensor_kind, parameter_name) in self.pieces

    def read_range_into_flat_tensor(
        self, tensor_kind: str, parameter_range: ParameterRange, flat_tensor: torch.Tensor
    ) -> None:
        """Fill a flat tensor with the values of a part.

        Raises:
            CheckpointError: some values are in no file.
        """
        pieces_by_runs = self.pieces.get((tensor_kind, parameter_range.name), {})
        runs = parameter_range.runs
        if runs not in pieces_by_runs and pieces_by_runs:
            # Saved in other slices.
            whole = self._read_whole_flat_tensor(tensor_kind, parameter_range)
            values = whole if runs is None else runs.view_of(whole).reshape(-1)
            flat_tensor.copy_(values[parameter_range.start :][: parameter_range.count])
            return
        pieces = pieces_by_runs.get(runs, [])
        position = parameter_range.start
        end = parameter_range.start + parameter_range.count
        # Start with the last piece that begins at or before the part.
        for start, entry in pieces[
            max(bisect.bisect_right([start for start, _ in pieces], position) - 1, 0) :
        ]:
            # Stop if the part is complete, or if this piece does not have the next element: a gap.
            if position >= end or not start <= position < start + entry.elements:
                break
            count = min(end, start + entry.elements) - position
            flat_tensor[position - parameter_range.start :][:count].copy_(
                read_flat_elements(entry, position - start, count)
            )
            position += count
        if position < end:
            raise CheckpointError(
                f"{self.folder} lacks the {tensor_kind} of {parameter_range.name} from element {position:,} on"
            )

    def _read_whole_flat_tensor(
        self, tensor_kind: str, parameter_range: ParameterRange
    ) -> torch.Tensor:
        pieces_by_runs = self.pieces[tensor_kind, parameter_range.name]
        (_, entry), *_ = next(iter(pieces_by_runs.values()))
        whole = torch.empty(
            math.prod(self.index["weights"][parameter_range.name]), dtype=entry.dtype
        )
        missing_count = whole.numel()
        for runs in pieces_by_runs:
            view = whole if runs is None else runs.view_of(whole)
            values = torch.empty(view.numel(), dtype=entry.dtype)
            self.read_range_into_flat_tensor(
                tensor_kind,
                replace(parameter_range, start=0, count=view.numel(), runs=runs),
                values,
            )
            view.copy_(values.view(view.shape))
            missing_count -= view.numel()
        if missing_count:
            raise CheckpointError(
                f"{self.folder} lacks {missing_count:,} elements of the {tensor_kind} of {parameter_range.name}"
            )
        return whole

    def read_whole_tensor_as_saved(
        self, tensor_kind: str, parameter_range: ParameterRange
    ) -> torch.Tensor:
        """Return a tensor in the shape and the type in which it was saved.

        Raises:
            CheckpointError: some values are in no file.
        """
        pieces = [entry for _, entry in self.pieces[tensor_kind, parameter_range.name][None]]
        if len(pieces) == 1:
            return read_flat_elements(pieces[0], 0, pieces[0].elements).view(pieces[0].shape)
        # A divided tensor has the parameter's shape.
        values = torch.empty(parameter_range.count, dtype=pieces[0].dtype)
        self.read_range_into_flat_tensor(tensor_kind, parameter_range, values)
        return values.view(parameter_range.master.shape)


def _read_index_of_known_format(checkpoint_folder: Path) -> Json:
    try:
        index = dict(read_json_or_raise_damaged(checkpoint_folder / INDEX))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint_folder / INDEX} is not an index of a checkpoint: {error}"
        ) from None
    if index.get("format") != FORMAT:
        raise CheckpointError(
            f"{checkpoint_folder} is of format {index.get('format')!r}, and this version reads {FORMAT!r}"
        )
    return index


@torch.no_grad()
def load_checkpoint_print_notes_and_return_loop_state(
    checkpoint_folder: Path, named_state: NamedState, group: DistributedContext
) -> Json:
    """Load weights, optimizer state, buffers and loss scale.

    Return the training loop's saved state (collective).

    Raises:
        CheckpointError: of another model or format, incomplete, or not readable.
    """
    checkpoint_tensors = CheckpointTensors(checkpoint_folder)
    _require_same_tensor_names_and_shapes(
        checkpoint_tensors.index, named_state.shapes, named_state.buffers
    )
    for part in named_state.parts:
        _read_range_into_whole_tensor(checkpoint_tensors, WEIGHT, part, part.master)
    notes = _load_optimizer_state_and_list_notes(checkpoint_tensors, named_state)
    _copy_saved_values_into_buffers(
        # Each rank has saved its own buffers. If the world size changed, all load those of rank 0.
        checkpoint_tensors.buffers[
            group.rank if len(checkpoint_tensors.buffers) == group.size else 0
        ],
        named_state.buffers,
    )
    notes += _restore_loss_scale_and_list_notes(checkpoint_tensors.index["loss_scale"], named_state)
    # The model's weights are copies of the master weights that were just loaded.
    named_state.refresh()
    group.print_lines_of_all_ranks(notes)
    return dict(checkpoint_tensors.index["state"])


@torch.no_grad()
def load_weights_and_buffers_into_unsharded_model(
    checkpoint_folder: Path, model: nn.Module
) -> None:
    """Load only trainable weights and buffers, into a model that is not sharded.

    Raises:
        CheckpointError: as `load`.
    """
    shards = CheckpointTensors(checkpoint_folder)
    buffers = persistent_buffers_by_name(model)
    _require_same_tensor_names_and_shapes(shards.index, trained_parameter_shapes(model), buffers)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _read_range_into_whole_tensor(
                shards,
                WEIGHT,
                ParameterRange(name, 0, parameter.numel(), parameter, 0, {}),
                parameter,
            )
    _copy_saved_values_into_buffers(shards.buffers[0], buffers)


def _require_same_tensor_names_and_shapes(
    checkpoint_index: Json,
    model_parameter_shapes: dict[str, tuple[int, ...]],
    model_buffer_by_name: dict[str, torch.Tensor],
) -> None:
    saved_shapes = {**checkpoint_index["weights"], **checkpoint_index["buffers"]}
    model_shapes = {
        **model_parameter_shapes,
        **{name: value.shape for name, value in model_buffer_by_name.items()},
    }
    lost = sorted(model_shapes.keys() - saved_shapes)
    unknown = sorted(saved_shapes.keys() - model_shapes)
    if lost or unknown:
        raise CheckpointError(
            f"the checkpoint is of another model: it lacks {lost}, and also has {unknown}"
        )
    for name, shape in model_shapes.items():
        if list(shape) != saved_shapes[name]:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {saved_shapes[name]} there "
                f"and {list(shape)} here"
            )


def _read_range_into_whole_tensor(
    checkpoint_tensors: CheckpointTensors,
    tensor_kind: str,
    parameter_range: ParameterRange,
    whole_tensor: torch.Tensor,
) -> None:
    """Fill the part's range of `whole_tensor`, which has the shape of the master weights."""
    whole_tensor = part_of_this_rank(whole_tensor)
    if whole_tensor.is_contiguous():
        checkpoint_tensors.read_range_into_flat_tensor(
            tensor_kind,
            parameter_range,
            whole_tensor.view(-1)[
                parameter_range.offset : parameter_range.offset + parameter_range.count
            ],
        )
        return
    # Another memory layout, such as channels last: fill a copy in row-major order.
    values = whole_tensor.reshape(-1).clone()
    checkpoint_tensors.read_range_into_flat_tensor(
        tensor_kind,
        parameter_range,
        values[parameter_range.offset : parameter_range.offset + parameter_range.count],
    )
    whole_tensor.copy_(values.view(whole_tensor.shape))


def _load_optimizer_state_and_list_notes(
    checkpoint_tensors: CheckpointTensors, named_state: NamedState
) -> list[str]:
    by_master: dict[int, list[ParameterRange]] = {}
    for part in named_state.parts:
        by_master.setdefault(id(part.master), []).append(part)
    saved = {name for tensor_kind, name in checkpoint_tensors.pieces if tensor_kind != WEIGHT}
    if counts_steps_by_group(named_state.optimizer):
        for group in named_state.optimizer.param_groups:
            if "step" in group:
                group.update(step=0)
    for parts in by_master.values():
        _replace_optimizer_state_of_master_tensor(checkpoint_tensors, parts, named_state.optimizer)
    new_names = [
        part.name
        for parts in by_master.values()
        for part in parts
        if part.name in saved
        and optimizer_state_tensor_names(part.group)
        and part.master not in named_state.optimizer.state
    ]
    if not new_names:
        return []
    saved_class = checkpoint_tensors.index["optimizer"]["class"]
    new_names_text = (
        ""
        if len(new_names) == len(named_state.parts)
        else f" for {count_with_noun(len(new_names), 'tensor')}: {new_names[0]}"
    )
    return [
        f"the checkpoint has the state of {saved_class}; {type(named_state.optimizer).__name__} starts "
        f"with a new state{new_names_text}"
    ]


def _replace_optimizer_state_of_master_tensor(
    checkpoint_tensors: CheckpointTensors,
    ranges_of_master: list[ParameterRange],
    optimizer: torch.optim.Optimizer,
) -> None:
    master = ranges_of_master[0].master
    group = ranges_of_master[0].group
    # Remove the old state, which exists on a rollback. A checkpoint saved before step 1 has no
    # state.
    old_state = optimizer.state.pop(master, {})
    has_own_shapes = STATE_TENSORS in group
    state: Json = {}
    for tensor_kind in optimizer_state_tensor_names(group):
        if has_own_shapes:
            if checkpoint_tensors.has_tensor(tensor_kind, ranges_of_master[0].name):
                state[tensor_kind] = checkpoint_tensors.read_whole_tensor_as_saved(
                    tensor_kind, ranges_of_master[0]
                ).to(master.device)
            continue
        saved_parts = [
            part
            for part in ranges_of_master
            if checkpoint_tensors.has_tensor(tensor_kind, part.name)
        ]
        if saved_parts:
            state[tensor_kind] = _zero_old_state_tensor_or_create_zeros(
                old_state.get(tensor_kind), master
            )
        for part in saved_parts:
            _read_range_into_whole_tensor(checkpoint_tensors, tensor_kind, part, state[tensor_kind])
    steps = [
        step
        for part in ranges_of_master
        if (step := checkpoint_tensors.scalars_by_kind.get("step", {}).get(part.name)) is not None
    ]
    if state and steps and has_own_shapes:
        state["step"] = int(max(steps))
    elif state and steps and "betas" in group:
        if counts_steps_by_group(optimizer):
            group["step"] = int(max(steps))
        # The same form in which torch's optimizers create it.
        else:
            device = master.device if group.get("fused") or group.get("capturable") else "cpu"
            state["step"] = torch.tensor(max(steps), dtype=torch.float32, device=device)
    if state:
        optimizer.state[master] = state


def _zero_old_state_tensor_or_create_zeros(
    old_tensor: object, master: torch.Tensor
) -> torch.Tensor:
    """Return zeros shaped as the master weights. The old state tensor is reused if it fits."""
    if isinstance(old_tensor, torch.Tensor) and (old_tensor.shape, old_tensor.dtype) == (
        master.shape,
        master.dtype,
    ):
        return old_tensor.zero_()
    return torch.zeros_like(master)


def _copy_saved_values_into_buffers(
    saved_location_by_name: dict[str, TensorLocation], buffer_by_name: dict[str, torch.Tensor]
) -> None:
    for name, value in buffer_by_name.items():
        entry = saved_location_by_name[name]
        value.copy_(read_flat_elements(entry, 0, entry.elements).view(value.shape))


def _restore_loss_scale_and_list_notes(
    saved_loss_scale_state: dict[str, float] | None, named_state: NamedState
) -> list[str]:
    if named_state.loss_scale is None or saved_loss_scale_state is None:
        return []
    current_scale = named_state.loss_scale.read()
    if current_scale.keys() == saved_loss_scale_state.keys():
        named_state.loss_scale.write(saved_loss_scale_state)
        return []
    # The saved scaler is of another kind, with other counters. Only its scale is taken over.
    named_state.loss_scale.write({**current_scale, "scale": saved_loss_scale_state["scale"]})
    return [
        f"the loss scale continues at {saved_loss_scale_state['scale']:g}; its count of good steps is reset"
    ]
