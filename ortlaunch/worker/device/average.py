"""`ortlaunch device average`: one checkpoint of several clients' (federated averaging), weighted by their samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortlaunch.errors import CheckpointError, InputError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import read_json
from ortlaunch.worker.device.device import (
    AVERAGED,
    SAMPLES,
    STEPS,
    Device,
    load_state,
    number,
    require,
    save_state,
)

Weights = Json


def average(
    place: DeviceFolder, checkpoints: list[Path], weights: Sequence[float] | None, to: Path
) -> None:
    """Write the mean of the trained weights, without any optimizer's state; what is frozen must be equal.

    weights: of each client; None: the samples that it trained on since the last average.

    Raises:
        CheckpointError: the checkpoints are not of these artifacts, or hold a number that is none.
        InputError: a client has no weight.
    """
    require()
    states = [load_state(path) for path in checkpoints]
    wanted = read_json(place.description)["parameters"]
    wrong = [
        line
        for path, state in zip(checkpoints, states)
        for line in _differences(path, state, wanted)
    ]
    if wrong:
        raise CheckpointError("\n".join(wrong))
    _require_same_frozen(checkpoints, states, wanted)
    parts = _parts(checkpoints, states, weights)
    device = Device(place, checkpoints[0])  # only a state that a living module has takes weights
    for parameter in (each for each in wanted if each["trained"]):
        name = parameter["name"]
        mean = sum(
            part * state.parameters[name].data.astype(np.float64)
            for part, state in zip(parts, states)
        )
        device.state.parameters[name] = np.asarray(mean, dtype=np.float32)
    properties = device.state.properties
    properties[STEPS] = max(number(state, STEPS) for state in states)
    properties[SAMPLES] = sum(number(state, SAMPLES) for state in states)
    properties[AVERAGED] = 1
    save_state(device.state, to, with_optimizer=False)
    told = "\n".join(f"  {part:7.2%}  {path}" for part, path in zip(parts, checkpoints))
    trained = sum(each["trained"] for each in wanted)
    print(
        f"{told}\naverage of {len(states)} checkpoints, "
        f"{trained} trained of {len(wanted)} weights: {to}"
    )


def _differences(path: Path, state: Any, wanted: list[Weights]) -> Iterator[str]:
    """What is not as the artifacts say: names and their order, sizes, which are trained, numbers."""
    found = dict(state.parameters)
    names = [each["name"] for each in wanted]
    if [*found] != sorted(names):
        other = next(iter(set(found) ^ set(names)), "their order")
        yield f"{path} is not of these artifacts: it has {len(found)} weights, they {len(names)}; {other} differs"
        return
    for each in wanted:
        value = found[each["name"]].data
        here = found[each["name"]]
        if list(value.shape) != each["shape"]:
            yield f"{path}: {each['name']} is of shape {list(value.shape)}, and of {each['shape']} in the artifacts"
        elif here.requires_grad != each["trained"]:
            yield f"{path}: {each['name']} is {'' if here.requires_grad else 'not '}trained, not so in the artifacts"
        elif not np.isfinite(value).all():
            yield f"{path}: {each['name']} holds inf or nan"


def _require_same_frozen(checkpoints: list[Path], states: list[Any], wanted: list[Weights]) -> None:
    for name in (each["name"] for each in wanted if not each["trained"]):
        first = states[0].parameters[name].data
        for path, state in zip(checkpoints[1:], states[1:]):
            if not np.array_equal(first, state.parameters[name].data):
                raise CheckpointError(
                    f"{path}: {name} is not trained, and is not that of {checkpoints[0]}"
                )


def _parts(
    checkpoints: list[Path], states: list[Any], weights: Sequence[float] | None
) -> list[float]:
    """Of each client in the mean, 1 in all."""
    given = [float(number(state, SAMPLES)) for state in states] if weights is None else weights
    for path, weight in zip(checkpoints, given):
        if not 0 < weight < float("inf"):
            told = "trained on no sample since the last average; give all clients a weight with --weights"
            raise InputError(
                f"{path} "
                f"{told if weights is None else f'got weight {weight:g}; a weight is above 0'}"
            )
    return [weight / sum(given) for weight in given]
