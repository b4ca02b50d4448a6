"""What engine.save_checkpoint wrote, by parameter name: DeepSpeed 0.19.8, ZeRO 0 to 2, Adam's moments.

mp_rank_00_model_states.pt                 the model's state, counters; under ZeRO 0 also the optimizer's state
[bf16_]zero_pp_rank_R_mp_rank_00_optim...  of each rank: flat fp32 weights and moments, and where each name lies
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ortlaunch.errors import InputError
from ortlaunch.units import counted
from ortlaunch.worker.deepspeed.pickled import read_pickled

MODEL_FILE = "mp_rank_00_model_states.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Piece:
    """A range of a flattened parameter: its fp32 weights and moments, flat, and Adam's count of steps."""

    name: str
    start: int
    weight: torch.Tensor
    moments: dict[str, torch.Tensor]
    step: float


@dataclass
class Foreign:
    """One checkpoint of DeepSpeed's."""

    how: str
    """Which ZeRO stage, on how many ranks."""
    model: dict[str, Any]
    """All of the model's file, with its counters and buffers."""
    shapes: Shapes
    """Of the trained parameters."""
    pieces: list[Piece]
    groups: list[dict[str, Any]]
    """The optimizer's numbers: learning rate, betas and so on."""
    notes: list[str] = field(default_factory=list)


def read_foreign(folder: Path, trained: Shapes) -> Foreign:
    """All of a checkpoint.

    Args:
        trained: names and shapes that are trained here, in the order of the model's parameters.

    Raises:
        InputError: it cannot be taken in.
    """
    path = folder / MODEL_FILE
    model = read_pickled(path)
    try:
        _require_whole_model(path, model)
        _require_counters_and_buffers(model)
        return _sharded(folder, model) if model.get("param_shapes") else _unsharded(path, model, trained)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{folder} is not as DeepSpeed 0.19.8 writes it: {type(error).__name__}: {error}") from None


def _require_whole_model(path: Path, model: dict[str, Any]) -> None:
    if "ds_version" not in model or not isinstance(model.get("module"), dict):
        raise InputError(f"{path} was not written by DeepSpeed's engine.save_checkpoint, or holds no model")
    degrees = {**model.get("checkpoint_parallel_dimensions", {}), "mp_world_size": model.get("mp_world_size", 1)}
    split = [f"{name} {degree}" for name, degree in degrees.items() if degree not in (None, 1)]
    split += [name for name in ("ds_autoep_layers", "autoep_layers") if model.get(name)]
    if split:
        raise InputError(f"{path} is of a model in parts ({', '.join(split)}); here every rank has the whole model")


def _require_counters_and_buffers(model: Mapping[str, Any]) -> None:
    for name in ("global_steps", "skipped_steps"):
        if not isinstance(model[name], int):
            raise TypeError(f"{name} is {model[name]!r}")
    for name in model["buffer_names"]:
        if not isinstance(model["module"][name], torch.Tensor):
            raise TypeError(f"{name} is no tensor")


def _sharded(folder: Path, model: dict[str, Any]) -> Foreign:
    """ZeRO 1 and 2: a flat tensor for each rank and parameter group."""
    files = _files_of_ranks(folder)
    pieces: list[Piece] = []
    ends: dict[str, int] = {}
    steps: dict[str, float] = {}
    groups: list[dict[str, Any]] = []
    for path in files:
        state = read_pickled(path)["optimizer_state_dict"]
        _require_known(path, state, len(files))
        groups = groups or _groups(state["base_optimizer_state"])
        for piece in _pieces_of_rank(path, state, ends):
            if steps.setdefault(piece.name, piece.step) != piece.step:
                there = f"{piece.step:g} steps of {piece.name}, and another rank's file {steps[piece.name]:g}"
                raise InputError(f"{path} has {there}: they are of different saves")
            ends[piece.name] = piece.start + piece.weight.numel()
            pieces.append(piece)
    shapes = {name: tuple(shape) for group in model["param_shapes"] for name, shape in group.items()}
    for name, shape in shapes.items():
        if ends.get(name, 0) != torch.Size(shape).numel():
            raise InputError(f"{folder} has {ends.get(name, 0):,} of {torch.Size(shape).numel():,} elements of {name}")
    stage = int(state.get("zero_stage", 1))
    how = f"ZeRO {stage} on {len(files)} rank{'s' * (len(files) > 1)}"
    return Foreign(how, model, shapes, pieces, groups, _scale_notes(state))


def _scale_notes(state: Mapping[str, Any]) -> list[str]:
    return ["not taken: its loss scale; under fp16 it begins anew"] if state.get("dynamic_loss_scale") else []


def _files_of_ranks(folder: Path) -> list[Path]:
    """One of each rank, by its number."""
    found = {}
    for path in folder.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"):
        if named := re.search(r"zero_pp_rank_(\d+)_", path.name):
            found[int(named[1])] = path
    if not found:
        raise InputError(
            f"{folder} has no [bf16_]zero_pp_rank_N_mp_rank_00_optim_states.pt; copy all that save_checkpoint wrote"
        )
    return [found[rank] for rank in sorted(found)]


def _require_known(path: Path, state: Mapping[str, Any], files: int) -> None:
    if int(state.get("zero_stage", 1)) > 2:
        raise InputError(f"{path} is of ZeRO {int(state['zero_stage'])}; ZeRO 0, 1 and 2 are taken in")
    if "param_slice_mappings" not in state:
        raise InputError(f"{path} has no names (param_slice_mappings), as DeepSpeed 0.19.8 writes")
    counts = state["partition_count"]
    ranks = max(counts) if isinstance(counts, (list, tuple)) else counts
    if ranks != files:
        raise InputError(
            f"{path} is of {counted(ranks, 'rank')}, and {path.parent} has the files of {files}; copy them all"
        )


def _pieces_of_rank(path: Path, state: Mapping[str, Any], ends: Mapping[str, int]) -> Iterator[Piece]:
    for number, places in enumerate(state["param_slice_mappings"]):
        flat, kept = state["single_partition_of_fp32_groups"][number], _state_of_group(state, number)
        for name, place in places.items():
            step = _require_adam(path, name, kept)
            every = {kind: _range(path, name, kept[kind], place.start, place.numel) for kind in MOMENTS}
            yield Piece(name, ends.get(name, 0), _range(path, name, flat, place.start, place.numel), every, step)


def _state_of_group(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What the optimizer keeps for a flat tensor; a list with DeepSpeed's `elastic_checkpoint`."""
    base = state["base_optimizer_state"]
    if isinstance(base, list):
        return {"step": state.get("base_optimizer_state_step"), **base[number]}
    group = base["param_groups"][number]
    return {"step": group.get("step"), **base["state"].get(group["params"][0], {})}


def _groups(base: Any) -> list[dict[str, Any]]:
    return list(base["param_groups"]) if isinstance(base, dict) else []


def _require_adam(path: Path, name: str, kept: Mapping[str, Any]) -> float:
    """Adam's count of steps, where its state is all there is."""
    lacks = [kind for kind in MOMENTS if not isinstance(kept.get(kind), torch.Tensor)]
    more = [kind for kind, value in kept.items() if kind not in (*MOMENTS, "step") and value is not None]
    if lacks or more or kept.get("step") is None:
        found = ", ".join(kind for kind, value in kept.items() if value is not None) or "nothing"
        raise InputError(
            f"{path}: the optimizer keeps {found} of {name}; taken in are the exp_avg, exp_avg_sq and step of Adam and "
            "AdamW, after their first step"
        )
    return float(kept["step"])


def _range(path: Path, name: str, tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.dtype != torch.float32 or start < 0 or count < 0 or start + count > flat.numel():
        raise InputError(f"{path} has {flat.numel():,} elements of {flat.dtype} where {name} should lie in float32")
    return flat[start : start + count]


def _unsharded(path: Path, model: dict[str, Any], trained: Shapes) -> Foreign:
    """ZeRO 0: torch's own optimizer, with numbers in place of names, around the weights or fp32 copies of them."""
    optimizer = model.get("optimizer")
    if not isinstance(optimizer, dict):
        raise InputError(f"{path} has weights and no optimizer's state; give them as model.pretrained")
    inner = optimizer.get("optimizer_state_dict", optimizer)
    names, notes = _names(path, inner["param_groups"], trained)
    masters = [tensor for group in optimizer.get("fp32_groups", ()) for tensor in group]
    if inner is not optimizer and len(masters) != len(names):
        raise InputError(f"{path} has no float32 copy of each weight; ZeRO 1 and 2 of that precision are taken in")
    weights = masters or [model["module"][name] for name in names]
    keys = [key for group in inner["param_groups"] for key in group["params"]]
    states = (inner["state"].get(key, {}) for key in keys)
    pieces = [_whole(path, *each) for each in zip(names, weights, states)]
    shapes = {name: tuple(weight.shape) for name, weight in zip(names, weights)}
    return Foreign("ZeRO 0", model, shapes, pieces, list(inner["param_groups"]), notes + _scale_notes(optimizer))


def _whole(path: Path, name: str, weight: torch.Tensor, kept: Mapping[str, Any]) -> Piece:
    step, count = _require_adam(path, name, kept), weight.numel()
    if any(kept[kind].shape != weight.shape for kind in MOMENTS):
        raise InputError(f"{path}: the moments at the place of {name} have another shape than it; {_ORDER}")
    return Piece(
        name, 0, _range(path, name, weight, 0, count),
        {kind: _range(path, name, kept[kind], 0, count) for kind in MOMENTS}, step,
    )  # fmt: skip


_ORDER = "under ZeRO 0 its file has no names, and the optimizer must have been given model.parameters() in their order"


def _names(path: Path, groups: Sequence[Mapping[str, Any]], trained: Shapes) -> tuple[list[str], list[str]]:
    """Of the optimizer's numbered parameters; with what there is to tell of it."""
    if all(group.get("param_names") for group in groups):
        return [name for group in groups for name in group["param_names"]], []
    if len(groups) > 1:
        raise InputError(f"{path} has {len(groups)} parameter groups, and under ZeRO 0 no names; {_ORDER}")
    names, count = list(trained), len(groups[0]["params"])
    if len(names) != count:
        raise InputError(f"{path} has the state of {count} parameters, and {len(names)} are trained here; {_ORDER}")
    return names, ["its optimizer has no names: its state was taken in the order of the model's parameters"]
