"""`--resume deepspeed:PATH`: a checkpoint of DeepSpeed's own becomes this run's first one, in our format.

Rank 0 reads it and writes step_N; from there on the run is like any other, on any world, stage and engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortlaunch.errors import InputError, OrtlaunchError
from ortlaunch.plan import Plan
from ortlaunch.rank import Rank
from ortlaunch.recipe import Recipe
from ortlaunch.run.folder import RunDir, read_json
from ortlaunch.run.records import SaveLine
from ortlaunch.worker.checkpoint import saves
from ortlaunch.worker.checkpoint.choose import Found
from ortlaunch.worker.checkpoint.damage import newest_of_all
from ortlaunch.worker.checkpoint.snapshot import BUFFER, FORMAT, WEIGHT, Entry, Snapshot
from ortlaunch.worker.checkpoint.transaction import write
from ortlaunch.worker.deepspeed.foreign import MOMENTS, Foreign, read_foreign
from ortlaunch.worker.distributed import DistributedContext
from ortlaunch.worker.model import LossModule
from ortlaunch.worker.named_state import buffers_of, trained_shapes

_INNER = "model."  # before each name of ours: what deepspeed.initialize was given is inside a LossModule
_NUMBERS = {"lr": "learning_rate", "betas": "betas", "eps": "epsilon", "weight_decay": "weight_decay"}


def take_in(
    run: RunDir, recipe: Recipe, plan: Plan, model: LossModule, data: int, group: DistributedContext
) -> Found | None:
    """The checkpoint that it became, where resume.json names one of DeepSpeed's (collective); else None.

    Args:
        data: how many samples an epoch has.

    Raises:
        InputError: on all ranks the same: it cannot be taken in.
    """
    asked = read_json(run.resume).get("deepspeed") if run.resume.exists() else None
    if asked is None:
        return None
    wrong = ""
    if group.rank == 0:
        try:
            _take_in(Path(asked), run, recipe, plan, model, data)
        except OrtlaunchError as error:
            wrong = str(error)
    wrong = group.gather(wrong)[0]
    if wrong:
        raise InputError(f"DeepSpeed's checkpoint was not taken in: {wrong}")
    found = newest_of_all(run, group)
    assert found is not None
    return Found(*found)


def _take_in(folder: Path, run: RunDir, recipe: Recipe, plan: Plan, model: LossModule, data: int) -> None:
    began = time.perf_counter()
    shapes = _without_prefix(trained_shapes(model))
    foreign = read_foreign(folder, shapes)
    _require_same_model(folder, foreign, shapes, _without_prefix(buffers_of(model)))
    _require_same_frozen(folder, foreign, model)
    step, samples = foreign.model["global_steps"], _samples(foreign, plan)
    _require_something_left(folder, recipe, step, samples, data)
    state = {"step": step, "samples": samples, "skipped": foreign.model["skipped_steps"]}
    lines = list(_told(foreign, recipe, plan, samples))
    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    write(run, {}, alone, _snapshot(foreign, state, shapes, _without_prefix(buffers_of(model))), step, samples)
    saves.record(run, SaveLine(step, round(time.perf_counter() - began, 3)))
    version = foreign.model["ds_version"]
    print(f"taken in as step {step}: {folder} of DeepSpeed {version}, {foreign.how}; {samples:,} samples seen")
    print(*(f"  {line}" for line in lines), sep="\n", flush=True)


def _require_something_left(folder: Path, recipe: Recipe, step: int, samples: int, data: int) -> None:
    steps, epochs = recipe.train.max_steps, recipe.train.epochs
    if samples >= epochs * data if epochs is not None else step >= (steps or 0):
        asked = f"train.epochs: {epochs:g} of {data:,} samples" if epochs is not None else f"train.max_steps: {steps}"
        raise InputError(f"{folder} has {step} steps and {samples:,} samples: nothing to train by {asked}; raise it")


def _without_prefix(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name[len(_INNER) :]: value for name, value in named.items()}


def _require_same_model(folder: Path, foreign: Foreign, shapes: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
    module = foreign.model["module"]
    theirs = {**foreign.shapes, **{name: tuple(module[name].shape) for name in foreign.model["buffer_names"]}}
    ours = {**shapes, **{name: tuple(value.shape) for name, value in buffers.items()}}
    lacks, has = [name for name in ours if name not in theirs], [name for name in theirs if name not in ours]
    wrong = [f"it {word} {_some(names)}" for word, names in (("lacks", lacks), ("has", has)) if names]
    other = [name for name in ours if name in theirs and tuple(ours[name]) != tuple(theirs[name])]
    wrong += [f"{name} is {list(theirs[name])} there and {list(ours[name])} here" for name in other[:1]]
    if wrong:
        raise InputError(
            f"{folder} is of another model: {', and '.join(wrong)}; the recipe's model must be the one that "
            "deepspeed.initialize was given, with the same names, and train the same parameters"
        )


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _require_same_frozen(folder: Path, foreign: Foreign, model: nn.Module) -> None:
    """What is not trained is the recipe's, and must be what was there."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    for name, value in _without_prefix(frozen).items():
        theirs = foreign.model["module"].get(name)
        if theirs is None:
            foreign.notes.append(f"{name} is frozen and not in its file: the recipe's is taken as it is")
        elif not torch.equal(theirs.cpu(), value.detach().cpu().to(theirs.dtype)):
            raise InputError(f"{folder}: {name} is frozen, and other there than here; see model.pretrained")


def _samples(foreign: Foreign, plan: Plan) -> int:
    """As its file counts them, else by the batch size that it knows."""
    model = foreign.model
    if isinstance(model.get("global_samples"), int):
        return int(model["global_samples"])
    size = plan.batch.global_samples
    foreign.notes.append(f"its file counts no samples: taken for its steps x this recipe's {size}")
    return int(model["global_steps"] * size)


def _snapshot(
    foreign: Foreign, state: dict[str, Any], shapes: Mapping[str, Any], buffers: Mapping[str, Any]
) -> Snapshot:
    tensors: list[Entry] = []
    for name in buffers:
        value = foreign.model["module"][name]
        tensors.append((f"{BUFFER}:{_INNER}{name}@0", tuple(value.shape), value.detach().reshape(-1)))
    for piece in foreign.pieces:
        whole = tuple(shapes[piece.name])
        shape = whole if piece.weight.numel() == torch.Size(whole).numel() else (piece.weight.numel(),)
        for kind, flat in ((WEIGHT, piece.weight), *piece.moments.items()):
            tensors.append((f"{kind}:{_INNER}{piece.name}@{piece.start}", shape, flat))
    index = {
        "format": FORMAT,
        "ranks": 1,
        "state": state,
        "weights": {f"{_INNER}{name}": list(shape) for name, shape in shapes.items()},
        "buffers": {f"{_INNER}{name}": list(value.shape) for name, value in buffers.items()},
        "optimizer": {"class": "AdamW", "tensors": list(MOMENTS)},
        "loss_scale": None,
    }
    return Snapshot(0, index, tensors, {"step": {f"{_INNER}{piece.name}": piece.step for piece in foreign.pieces}})


def _told(foreign: Foreign, recipe: Recipe, plan: Plan, samples: int) -> Iterator[str]:
    """What was not taken, and what holds in its place."""
    yield from foreign.notes
    for theirs, name in _NUMBERS.items():
        there = list(dict.fromkeys(_plain(group[theirs]) for group in foreign.groups if theirs in group))
        here = _plain(getattr(recipe.optimizer, name))
        if there and there != [here]:
            yield f"not taken: its {name} {', '.join(map(str, there))}; the recipe's holds: {here}"
    if any(group.get("decoupled_weight_decay") is False and group.get("weight_decay") for group in foreign.groups):
        yield "not taken: its weight decay as a part of the gradient (torch's Adam); the recipe's is decoupled"
    if (size := samples / max(1, foreign.model["global_steps"])) != plan.batch.global_samples:
        yield f"not taken: its global batch of {size:g}; the recipe's holds: {plan.batch.global_samples}"
    schedule = "its schedule, " if foreign.model.get("lr_scheduler") else ""
    yield f"not taken: {schedule}its gradient clipping, random numbers and order of samples; the recipe's hold"
    yield f"the next sample is number {samples + 1:,} of the recipe's order"


def _plain(value: Any) -> Any:
    return tuple(float(each) for each in value) if isinstance(value, (list, tuple)) else float(value)
