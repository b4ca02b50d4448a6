"""`ortlaunch device average`: the mean of clients' checkpoints (federated averaging)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortlaunch.errors import CheckpointError, InputError
from ortlaunch.json_types import Json
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import read_own_json
from ortlaunch.worker.device.device import (
    AVERAGED,
    SAMPLES,
    STEPS,
    WEIGHTS,
    Device,
    int_property,
    load_weights,
    require,
    save_state,
)

Weights = Json


def average(
    place: DeviceFolder, checkpoints: list[Path], weights: Sequence[float] | None, to: Path
) -> None:
    """Write the weighted mean of the trained weights, without optimizer state.

    Args:
        place: the folder of the artifacts.
        checkpoints: the clients' checkpoints; their frozen weights must be equal.
        weights: the weight of each client; None: its samples since the last average.
        to: the checkpoint to write.

    Raises:
        CheckpointError: a checkpoint is not of these artifacts, or has inf or nan.
        InputError: a client has no positive weight.
    """
    require()
    states = [load_weights(place, path) for path in checkpoints]
    wanted = read_own_json(place.description)["parameters"]
    wrong = [
        line
        for path, state in zip(checkpoints, states)
        for line in differences(path, state, wanted)
    ]
    if wrong:
        raise CheckpointError("\n".join(wrong))
    _require_same_frozen(checkpoints, states, wanted)
    parts = _parts(checkpoints, states, weights)
    # Only the state of a living module accepts weights.
    # The frozen weights are the same in each. A browser's file has none.
    whole = [path for path in checkpoints if path.suffix != WEIGHTS]
    device = Device(place, whole[0] if whole else place.checkpoint)
    for parameter in (each for each in wanted if each["trained"]):
        name = parameter["name"]
        # Summed in float64, and rounded to float32 once.
        mean = sum(
            part * state.parameters[name].data.astype(np.float64)
            for part, state in zip(parts, states)
        )
        device.state.parameters[name] = np.asarray(mean, dtype=np.float32)
    properties = device.state.properties
    # Clients may have trained different numbers of steps.
    properties[STEPS] = max(int_property(state, STEPS) for state in states)
    properties[SAMPLES] = sum(int_property(state, SAMPLES) for state in states)
    properties[AVERAGED] = 1
    save_state(device.state, to, with_optimizer=False)
    told = "\n".join(f"  {part:7.2%}  {path}" for part, path in zip(parts, checkpoints))
    trained = sum(each["trained"] for each in wanted)
    print(
        f"{told}\naverage of {len(states)} checkpoints, "
        f"{trained} trained of {len(wanted)} weights: {to}"
    )


def differences(path: Path, state: Any, wanted: list[Weights]) -> Iterator[str]:
    """Yield the differences of a checkpoint from the artifacts, and weights with inf or nan."""
    found = dict(state.parameters)
    names = [each["name"] for each in wanted]
    if [*found] != sorted(names):
        other = next(iter(set(found) ^ set(names)), "their order")
        yield (
            f"{path} is not of these artifacts: it has {len(found)} weights, "
            f"they {len(names)}; {other} differs"
        )
        return
    for each in wanted:
        value = found[each["name"]].data
        here = found[each["name"]]
        if list(value.shape) != each["shape"]:
            yield (
                f"{path}: {each['name']} is of shape {list(value.shape)}, "
                f"and of {each['shape']} in the artifacts"
            )
        elif here.requires_grad != each["trained"]:
            yield (
                f"{path}: {each['name']} is {'' if here.requires_grad else 'not '}trained, "
                "not so in the artifacts"
            )
        elif not np.isfinite(value).all():
            yield f"{path}: {each['name']} contains inf or nan"


def _require_same_frozen(checkpoints: list[Path], states: list[Any], wanted: list[Weights]) -> None:
    for name in (each["name"] for each in wanted if not each["trained"]):
        first = states[0].parameters[name].data
        for path, state in zip(checkpoints[1:], states[1:]):
            if not np.array_equal(first, state.parameters[name].data):
                raise CheckpointError(
                    f"{path}: {name} is not trained, and differs from that of {checkpoints[0]}"
                )


def _parts(
    checkpoints: list[Path], states: list[Any], weights: Sequence[float] | None
) -> list[float]:
    """Return the share of each client in the mean; their sum is 1."""
    given = (
        [float(int_property(state, SAMPLES)) for state in states] if weights is None else weights
    )
    for path, weight in zip(checkpoints, given):
        if not 0 < weight < float("inf"):
            told = (
                "trained on no sample since the last average; "
                "give all clients a weight with --weights"
            )
            raise InputError(
                f"{path} "
                f"{told if weights is None else f'got weight {weight:g}; a weight is above 0'}"
            )
    return [weight / sum(given) for weight in given]
