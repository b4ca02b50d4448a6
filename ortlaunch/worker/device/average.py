"""`ortlaunch device average`: the mean of clients' checkpoints (federated averaging)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortlaunch.base.errors import CheckpointError, InputError
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.export_records import DeviceParameter
from ortlaunch.run_folder.folder import read_json_or_raise_damaged
from ortlaunch.worker.device.device import (
    AVERAGED,
    SAMPLES,
    STEPS,
    WEIGHTS,
    Device,
    import_ort_training_artifacts_or_refuse,
    int_property_or_0,
    load_ort_checkpoint_or_browser_weights,
    write_checkpoint_state_atomically,
)


def average_client_checkpoints_write_and_print(
    device_folder: DeviceFolder,
    checkpoints: list[Path],
    client_weights: Sequence[float] | None,
    target_path: Path,
) -> None:
    """Write the weighted mean of the trained weights, without optimizer state.

    Args:
        device_folder: the folder of the artifacts.
        checkpoints: the clients' checkpoints; their frozen weights must be equal.
        client_weights: the weight of each client; None: its samples since the last average.
        target_path: the checkpoint to write.

    Raises:
        CheckpointError: a checkpoint is not of these artifacts, or has inf or nan.
        InputError: a client has no positive weight.
    """
    import_ort_training_artifacts_or_refuse()
    states = [load_ort_checkpoint_or_browser_weights(device_folder, path) for path in checkpoints]
    weight_records = read_device_parameters(device_folder)
    problems = [
        line
        for path, state in zip(checkpoints, states)
        for line in checkpoint_problem_lines(path, state, weight_records)
    ]
    if problems:
        raise CheckpointError("\n".join(problems))
    _require_equal_frozen_weights(checkpoints, states, weight_records)
    shares = _fraction_of_each_client_by_weight_or_samples(checkpoints, states, client_weights)
    # Only the state of a living module accepts weights.
    # The frozen weights are the same in each. A browser's file has none.
    full_checkpoints = [path for path in checkpoints if path.suffix != WEIGHTS]
    device = Device(
        device_folder, full_checkpoints[0] if full_checkpoints else device_folder.checkpoint
    )
    for parameter in (weight_record for weight_record in weight_records if weight_record.trained):
        name = parameter.name
        # Summed in float64, and rounded to float32 once.
        mean = sum(
            share * state.parameters[name].data.astype(np.float64)
            for share, state in zip(shares, states)
        )
        device.state.parameters[name] = np.asarray(mean, dtype=np.float32)
    properties = device.state.properties
    # Clients may have trained different numbers of steps.
    properties[STEPS] = max(int_property_or_0(state, STEPS) for state in states)
    properties[SAMPLES] = sum(int_property_or_0(state, SAMPLES) for state in states)
    properties[AVERAGED] = 1
    write_checkpoint_state_atomically(device.state, target_path, with_optimizer=False)
    shares_text = "\n".join(f"  {share:7.2%}  {path}" for share, path in zip(shares, checkpoints))
    trained = sum(weight_record.trained for weight_record in weight_records)
    print(
        f"{shares_text}\naverage of {len(states)} checkpoints, "
        f"{trained} trained of {len(weight_records)} weights: {target_path}"
    )


def read_device_parameters(device_folder: DeviceFolder) -> list[DeviceParameter]:
    """Return the weights of the training graph, as device.json has them."""
    return [
        DeviceParameter(**fields)
        for fields in read_json_or_raise_damaged(device_folder.description)["parameters"]
    ]


def checkpoint_problem_lines(
    checkpoint_path: Path, checkpoint_state: Any, weight_records: list[DeviceParameter]
) -> Iterator[str]:
    """Yield the differences of a checkpoint from the artifacts, and weights with inf or nan."""
    state_weights = dict(checkpoint_state.parameters)
    names = [weight_record.name for weight_record in weight_records]
    if [*state_weights] != sorted(names):
        differing_name = next(iter(set(state_weights) ^ set(names)), "their order")
        yield (
            f"{checkpoint_path} is not of these artifacts: it has {len(state_weights)} weights, "
            f"they {len(names)}; {differing_name} differs"
        )
        return
    for weight_record in weight_records:
        value = state_weights[weight_record.name].data
        state_weight = state_weights[weight_record.name]
        if list(value.shape) != weight_record.shape:
            yield (
                f"{checkpoint_path}: {weight_record.name} is of shape {list(value.shape)}, "
                f"and of {weight_record.shape} in the artifacts"
            )
        elif state_weight.requires_grad != weight_record.trained:
            yield (
                f"{checkpoint_path}: {weight_record.name} is {'' if state_weight.requires_grad else 'not '}trained, "
                "not so in the artifacts"
            )
        elif not np.isfinite(value).all():
            yield f"{checkpoint_path}: {weight_record.name} contains inf or nan"


def _require_equal_frozen_weights(
    checkpoints: list[Path], states: list[Any], weight_records: list[DeviceParameter]
) -> None:
    for name in (
        weight_record.name for weight_record in weight_records if not weight_record.trained
    ):
        first_value = states[0].parameters[name].data
        for path, state in zip(checkpoints[1:], states[1:]):
            if not np.array_equal(first_value, state.parameters[name].data):
                raise CheckpointError(
                    f"{path}: {name} is not trained, and differs from that of {checkpoints[0]}"
                )


def _fraction_of_each_client_by_weight_or_samples(
    checkpoints: list[Path], states: list[Any], requested_weights: Sequence[float] | None
) -> list[float]:
    """Return the share of each client in the mean; their sum is 1."""
    client_weights = (
        [float(int_property_or_0(state, SAMPLES)) for state in states]
        if requested_weights is None
        else requested_weights
    )
    for path, weight in zip(checkpoints, client_weights):
        if not 0 < weight < float("inf"):
            no_samples_text = (
                "trained on no sample since the last average; "
                "give all clients a weight with --weights"
            )
            raise InputError(
                f"{path} "
                f"{no_samples_text if requested_weights is None else f'got weight {weight:g}; a weight is above 0'}"
            )
    return [weight / sum(client_weights) for weight in client_weights]
