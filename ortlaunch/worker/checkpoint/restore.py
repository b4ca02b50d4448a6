"""Load a checkpoint, for any world size, ZeRO stage and engine.

Each rank reads all headers, but only the data of its buffers and of the ranges that it holds.
Nothing is unpickled. The index is JSON, and tensors are in the safetensors format.
"""

from __future__ import annotations

import bisect
import json
from pathlib import Path

import torch
from torch import nn

from ortlaunch.errors import CheckpointError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.folder import read_own_json
from ortlaunch.units import count_with_noun
from ortlaunch.worker.checkpoint.snapshot import BUFFER, FORMAT, INDEX, WEIGHT, file_of
from ortlaunch.worker.checkpoint.tensor_file import Entry, read_header, read_range
from ortlaunch.worker.model.named_state import (
    STATE_TENSORS,
    NamedState,
    ParameterRange,
    buffers_of,
    counts_by_group,
    tensor_kinds,
    trained_shapes,
)
from ortlaunch.worker.process_group.distributed import DistributedContext


class Shards:
    """A checkpoint's files, as one set of named tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = _index_of(folder)
        self.pieces: dict[tuple[str, str], list[tuple[int, Entry]]] = {}
        self.numbers: dict[str, dict[str, float]] = {}
        self.buffers: list[dict[str, Entry]] = []
        for rank in range(self.index["ranks"]):
            self._add(*read_header(folder / file_of(rank)))
        for pieces in self.pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def _add(self, entries: dict[str, Entry], metadata: dict[str, str]) -> None:
        buffers = {}
        for key, entry in entries.items():
            # KIND:NAME@START; a name may contain ":" and "@" itself.
            (kind, _, rest), (_, _, start) = key.partition(":"), key.rpartition("@")
            name = rest[: -len(start) - 1]
            if kind == BUFFER:
                buffers[name] = entry
            else:
                self.pieces.setdefault((kind, name), []).append((int(start), entry))
        self.buffers.append(buffers)
        for kind, numbers in json.loads(metadata.get("numbers", "{}")).items():
            self.numbers.setdefault(kind, {}).update(numbers)

    def has(self, kind: str, name: str) -> bool:
        """Return whether the checkpoint has a tensor of this kind for the parameter."""
        return (kind, name) in self.pieces

    def read(self, kind: str, part: ParameterRange, into: torch.Tensor) -> None:
        """Fill a flat tensor with the values of a part.

        Raises:
            CheckpointError: some values are in no file.
        """
        pieces = self.pieces.get((kind, part.name), [])
        at = part.start
        end = part.start + part.count
        # Start with the last piece that begins at or before the part.
        for start, entry in pieces[
            max(bisect.bisect_right([start for start, _ in pieces], at) - 1, 0) :
        ]:
            # Stop if the part is complete, or if this piece does not have the next element: a gap.
            if at >= end or not start <= at < start + entry.elements:
                break
            count = min(end, start + entry.elements) - at
            into[at - part.start :][:count].copy_(read_range(entry, at - start, count))
            at += count
        if at < end:
            raise CheckpointError(
                f"{self.folder} lacks the {kind} of {part.name} from element {at:,} on"
            )

    def whole(self, kind: str, part: ParameterRange) -> torch.Tensor:
        """Return a tensor in the shape and the type in which it was saved.

        Raises:
            CheckpointError: some values are in no file.
        """
        pieces = [entry for _, entry in self.pieces[kind, part.name]]
        if len(pieces) == 1:
            return read_range(pieces[0], 0, pieces[0].elements).view(pieces[0].shape)
        # A divided tensor has the parameter's shape.
        values = torch.empty(part.count, dtype=pieces[0].dtype)
        self.read(kind, part, values)
        return values.view(part.master.shape)


def _index_of(folder: Path) -> Json:
    try:
        index: Json = dict(read_own_json(folder / INDEX))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{folder / INDEX} is not an index of a checkpoint: {error}"
        ) from None
    if index.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} is of format {index.get('format')!r}, and this version reads {FORMAT!r}"
        )
    return index


@torch.no_grad()
def load(folder: Path, named: NamedState, group: DistributedContext) -> Json:
    """Load weights, optimizer state, buffers and loss scale.

    Return the training loop's saved state (collective).

    Raises:
        CheckpointError: of another model or format, incomplete, or not readable.
    """
    shards = Shards(folder)
    _require_same_model(shards.index, named.shapes, named.buffers)
    for part in named.parts:
        _fill(shards, WEIGHT, part, part.master)
    noted = _load_optimizer(shards, named)
    _load_buffers(
        # Each rank has saved its own buffers. If the world size changed, all load those of rank 0.
        shards.buffers[group.rank if len(shards.buffers) == group.size else 0],
        named.buffers,
    )
    noted += _load_scale(shards.index["loss_scale"], named)
    # The model's weights are copies of the master weights that were just loaded.
    named.refresh()
    group.print_all(noted)
    state: Json = shards.index["state"]
    return state


@torch.no_grad()
def load_weights(folder: Path, model: nn.Module) -> None:
    """Load only trainable weights and buffers, into a model that is not sharded.

    Raises:
        CheckpointError: as `load`.
    """
    shards = Shards(folder)
    buffers = buffers_of(model)
    _require_same_model(shards.index, trained_shapes(model), buffers)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            _fill(
                shards,
                WEIGHT,
                ParameterRange(name, 0, parameter.numel(), parameter, 0, {}),
                parameter,
            )
    _load_buffers(shards.buffers[0], buffers)


def _require_same_model(
    index: Json, shapes: dict[str, tuple[int, ...]], buffers: dict[str, torch.Tensor]
) -> None:
    there = {**index["weights"], **index["buffers"]}
    here = {**shapes, **{name: value.shape for name, value in buffers.items()}}
    lost = sorted(here.keys() - there)
    unknown = sorted(there.keys() - here)
    if lost or unknown:
        raise CheckpointError(
            f"the checkpoint is of another model: it lacks {lost}, and also has {unknown}"
        )
    for name, shape in here.items():
        if list(shape) != there[name]:
            raise CheckpointError(
                f"the checkpoint is of another model: {name} is {there[name]} there "
                f"and {list(shape)} here"
            )


def _fill(shards: Shards, kind: str, part: ParameterRange, tensor: torch.Tensor) -> None:
    """Fill the part's range of `tensor`, which has the shape of the master weights."""
    if tensor.is_contiguous():
        shards.read(kind, part, tensor.view(-1)[part.offset : part.offset + part.count])
        return
    # Another memory layout, such as channels last: fill a copy in row-major order.
    values = tensor.reshape(-1).clone()
    shards.read(kind, part, values[part.offset : part.offset + part.count])
    tensor.copy_(values.view(tensor.shape))


def _load_optimizer(shards: Shards, named: NamedState) -> list[str]:
    """Load the optimizer state of each master tensor. Return notes to print."""
    by_master: dict[int, list[ParameterRange]] = {}
    for part in named.parts:
        by_master.setdefault(id(part.master), []).append(part)
    saved = {name for kind, name in shards.pieces if kind != WEIGHT}
    for group in named.optimizer.param_groups if counts_by_group(named.optimizer) else ():
        group.update(step=0) if "step" in group else None
    for parts in by_master.values():
        _load_master(shards, parts, named.optimizer)
    new = [
        part.name
        for parts in by_master.values()
        for part in parts
        if part.name in saved
        and tensor_kinds(part.group)
        and part.master not in named.optimizer.state
    ]
    if not new:
        return []
    there = shards.index["optimizer"]["class"]
    some = (
        ""
        if len(new) == len(named.parts)
        else f" for {count_with_noun(len(new), 'tensor')}: {new[0]}"
    )
    return [
        f"the checkpoint has the state of {there}; {type(named.optimizer).__name__} starts "
        f"with a new state{some}"
    ]


def _load_master(
    shards: Shards, parts: list[ParameterRange], optimizer: torch.optim.Optimizer
) -> None:
    master = parts[0].master
    group = parts[0].group
    # Remove the old state, which exists on a rollback. A checkpoint saved before step 1 has no
    # state.
    before = optimizer.state.pop(master, {})
    own = STATE_TENSORS in group
    state: Json = {}
    for kind in tensor_kinds(group):
        if own:
            if shards.has(kind, parts[0].name):
                state[kind] = shards.whole(kind, parts[0]).to(master.device)
            continue
        there = [part for part in parts if shards.has(kind, part.name)]
        if there:
            state[kind] = _zeros(before.get(kind), master)
        for part in there:
            _fill(shards, kind, part, state[kind])
    steps = [
        step
        for part in parts
        if (step := shards.numbers.get("step", {}).get(part.name)) is not None
    ]
    if state and steps and own:
        state["step"] = int(max(steps))
    elif state and steps and "betas" in group:
        if counts_by_group(optimizer):
            group["step"] = int(max(steps))
        # The same form in which torch's optimizers create it.
        else:
            device = master.device if group.get("fused") or group.get("capturable") else "cpu"
            state["step"] = torch.tensor(max(steps), dtype=torch.float32, device=device)
    if state:
        optimizer.state[master] = state


def _zeros(before: object, master: torch.Tensor) -> torch.Tensor:
    """Return zeros shaped as the master weights. The old state tensor is reused if it fits."""
    if isinstance(before, torch.Tensor) and (before.shape, before.dtype) == (
        master.shape,
        master.dtype,
    ):
        return before.zero_()
    return torch.zeros_like(master)


def _load_buffers(entries: dict[str, Entry], buffers: dict[str, torch.Tensor]) -> None:
    """Copy each buffer's saved values into it."""
    for name, value in buffers.items():
        entry = entries[name]
        value.copy_(read_range(entry, 0, entry.elements).view(value.shape))


def _load_scale(there: dict[str, float] | None, named: NamedState) -> list[str]:
    if named.loss_scale is None or there is None:
        return []
    mine = named.loss_scale.read()
    if mine.keys() == there.keys():
        named.loss_scale.write(there)
        return []
    # The saved scaler is of another kind, with other counters. Only its scale is taken over.
    named.loss_scale.write({**mine, "scale": there["scale"]})
    return [f"the loss scale continues at {there['scale']:g}; its count of good steps is reset"]
