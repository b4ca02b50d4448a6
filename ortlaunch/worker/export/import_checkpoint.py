"""`ortlaunch device import`: a device's checkpoint as a checkpoint and an export of its run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from ortlaunch.base.errors import CheckpointError
from ortlaunch.base.units import count_with_noun
from ortlaunch.rank import Rank
from ortlaunch.recipe import read_resolved_recipe_of_run
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import RunDir, read_json_or_raise_damaged
from ortlaunch.run_folder.origin import ORIGIN
from ortlaunch.tables.tasks import ImportRequest
from ortlaunch.worker.checkpoint.restore import CheckpointTensors
from ortlaunch.worker.checkpoint.snapshot import snapshot_of_this_rank
from ortlaunch.worker.checkpoint.transaction import write_snapshot_as_checkpoint
from ortlaunch.worker.device.average import checkpoint_problem_lines, read_device_parameters
from ortlaunch.worker.device.device import (
    import_ort_training_artifacts_or_refuse,
    load_ort_checkpoint_or_browser_weights,
)
from ortlaunch.worker.export.export import (
    apply_umask_and_flush_files,
    write_transformers_or_peft_folder,
)
from ortlaunch.worker.export.export_checkpoint import (
    load_recipe_trained_model_and_data_of_checkpoint,
)
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.model.named_state import (
    NamedState,
    persistent_buffers_by_name,
    trained_parameter_shapes,
    whole_parameter_ranges,
)
from ortlaunch.worker.process_group.distributed import DistributedContext


def run(request: ImportRequest) -> None:
    """Run the requested import."""
    artifacts, checkpoint, folder, step, target_folder = request
    write_run_and_export_from_device_checkpoint(
        DeviceFolder(artifacts), Path(checkpoint), RunDir(folder), step, RunDir(target_folder)
    )


def write_run_and_export_from_device_checkpoint(
    device_folder: DeviceFolder,
    checkpoint: Path,
    run: RunDir,
    checkpoint_step: int,
    target_run: RunDir,
) -> None:
    """Write a checkpoint of `checkpoint_step` without optimizer state, and an export, into a new folder.

    Args:
        device_folder: the artifacts.
        checkpoint: a device's checkpoint, or an average.
        run: the run that the artifacts were exported from, or another of the same model.
        checkpoint_step: its checkpoint with the frozen weights and the position in the data.
        target_run: `ortlaunch train --resume` continues from it.

    Raises:
        CheckpointError: the checkpoint is not of these artifacts or of another model than the run,
            or has inf or nan.
    """
    import_ort_training_artifacts_or_refuse()
    state = load_ort_checkpoint_or_browser_weights(device_folder, checkpoint)
    weight_records = read_device_parameters(device_folder)
    if problems := [*checkpoint_problem_lines(checkpoint, state, weight_records)]:
        raise CheckpointError("\n".join(problems))
    # In float32, as a checkpoint and the artifacts are: in bf16 frozen weights would be rounded.
    float32_recipe = read_resolved_recipe_of_run(run.recipe).model_copy(
        update={"precision": "fp32"}
    )
    recipe, model, data = load_recipe_trained_model_and_data_of_checkpoint(
        run, checkpoint_step, float32_recipe
    )
    changed_count = _copy_weights_and_count_trained(
        model,
        {
            weight_record.name: state.parameters[weight_record.name].data
            for weight_record in weight_records
        },
    )
    single_rank = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    named_state = NamedState(
        trained_parameter_shapes(model),
        whole_parameter_ranges(model.named_parameters(), optimizer),
        optimizer,
        persistent_buffers_by_name(model),
    )
    source = run.checkpoint_folder(checkpoint_step)
    loop_state = CheckpointTensors(source).index["state"]
    made_by = read_json_or_raise_damaged(source / ORIGIN) if (source / ORIGIN).exists() else {}
    partial = RunDir(target_run.path.with_name(f"{target_run.path.name}.partial"))
    shutil.rmtree(partial.path, ignore_errors=True)
    partial.checkpoints.mkdir(parents=True)
    write_snapshot_as_checkpoint(
        partial,
        made_by,
        single_rank,
        snapshot_of_this_rank(named_state, loop_state, single_rank),
        checkpoint_step,
        loop_state["samples"],
    )
    # A training that continues keeps the words and the classes of the run.
    if run.vocabulary.exists():
        shutil.copy(run.vocabulary, partial.vocabulary)
    if run.tokenizer.exists():
        shutil.copytree(run.tokenizer, partial.tokenizer)
    partial.export.mkdir()
    write_transformers_or_peft_folder(recipe, partial.export, model, data)
    apply_umask_and_flush_files(partial.export)
    partial.path.replace(target_run.path)
    print(
        f"{count_with_noun(changed_count, 'weight')} of {checkpoint}, the rest of {source}\n"
        f"checkpoint of step {checkpoint_step}, without optimizer state: "
        f"{target_run.checkpoint_folder(checkpoint_step)}\n"
        f"export: {target_run.export}\n"
        f"to continue: ortlaunch train RECIPE --resume {target_run} train.max_steps=MORE"
    )


@torch.no_grad()
def _copy_weights_and_count_trained(model: LossModule, array_by_name: dict[str, np.ndarray]) -> int:
    """Copy the weights into the model, and return how many are trained.

    Raises:
        CheckpointError: the model lacks a weight, or has a frozen one with other values.
    """
    parameter_by_name = dict(model.named_parameters())
    problems = []
    for name, values in array_by_name.items():
        parameter = parameter_by_name.get(name)
        if parameter is None or tuple(parameter.shape) != values.shape:
            shape = "no such weight" if parameter is None else f"shape {list(parameter.shape)}"
            problems.append(
                f"{name}: shape {list(values.shape)} in the artifacts, {shape} in the run"
            )
        elif parameter.requires_grad:
            parameter.copy_(torch.from_numpy(values))
        elif not torch.equal(parameter, torch.from_numpy(values)):
            problems.append(f"{name}: is not trained, and differs from that of the run")
    if problems:
        raise CheckpointError("\n".join(["the checkpoint is of another model:", *problems]))
    return sum(parameter_by_name[name].requires_grad for name in array_by_name)
