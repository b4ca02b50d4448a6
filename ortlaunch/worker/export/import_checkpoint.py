"""`ortlaunch device import`: a device's checkpoint as a checkpoint and an export of its run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch

from ortlaunch.errors import CheckpointError
from ortlaunch.rank import Rank
from ortlaunch.recipe import read_resolved
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.run_folder.folder import RunDir, read_own_json
from ortlaunch.run_folder.origin import ORIGIN
from ortlaunch.tasks import ImportRequest
from ortlaunch.units import count_with_noun
from ortlaunch.worker.checkpoint.restore import Shards
from ortlaunch.worker.checkpoint.snapshot import take
from ortlaunch.worker.checkpoint.transaction import write
from ortlaunch.worker.device.average import differences
from ortlaunch.worker.device.device import load_weights, require
from ortlaunch.worker.export.export import huggingface
from ortlaunch.worker.export.export_checkpoint import trained
from ortlaunch.worker.model.model import LossModule
from ortlaunch.worker.model.named_state import NamedState, buffers_of, trained_shapes, whole_parts
from ortlaunch.worker.process_group.distributed import DistributedContext


def run(request: ImportRequest) -> None:
    """Run the requested import."""
    artifacts, checkpoint, folder, step, to = request
    import_checkpoint(DeviceFolder(artifacts), Path(checkpoint), RunDir(folder), step, RunDir(to))


def import_checkpoint(
    place: DeviceFolder, checkpoint: Path, run: RunDir, step: int, to: RunDir
) -> None:
    """Write a checkpoint of `step` without optimizer state, and an export, into a new folder.

    Args:
        place: the artifacts.
        checkpoint: a device's checkpoint, or an average.
        run: the run that the artifacts were exported from, or another of the same model.
        step: its checkpoint with the frozen weights and the position in the data.
        to: `ortlaunch train --resume` continues from it.

    Raises:
        CheckpointError: the checkpoint is not of these artifacts or of another model than the run,
            or has inf or nan.
    """
    require()
    state = load_weights(place, checkpoint)
    wanted = read_own_json(place.description)["parameters"]
    if wrong := [*differences(checkpoint, state, wanted)]:
        raise CheckpointError("\n".join(wrong))
    # In float32, as a checkpoint and the artifacts are: in bf16 frozen weights would be rounded.
    whole = read_resolved(run.recipe).model_copy(update={"precision": "fp32"})
    recipe, model, data = trained(run, step, whole)
    changed = _fill(model, {each["name"]: state.parameters[each["name"]].data for each in wanted})
    alone = DistributedContext(Rank(0, 1, 0, 1), torch.device("cpu"))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    named = NamedState(
        trained_shapes(model),
        whole_parts(model.named_parameters(), optimizer),
        optimizer,
        buffers_of(model),
    )
    source = run.checkpoint_folder(step)
    loop = Shards(source).index["state"]
    made_by = read_own_json(source / ORIGIN) if (source / ORIGIN).exists() else {}
    partial = RunDir(to.path.with_name(f"{to.path.name}.partial"))
    shutil.rmtree(partial.path, ignore_errors=True)
    partial.checkpoints.mkdir(parents=True)
    write(partial, made_by, alone, take(named, loop, alone), step, loop["samples"])
    # A training that continues keeps the words and the classes of the run.
    if run.vocabulary.exists():
        shutil.copy(run.vocabulary, partial.vocabulary)
    if run.tokenizer.exists():
        shutil.copytree(run.tokenizer, partial.tokenizer)
    partial.export.mkdir()
    huggingface(recipe, partial.export, model, data)
    partial.path.replace(to.path)
    print(
        f"{count_with_noun(changed, 'weight')} of {checkpoint}, the rest of {source}\n"
        f"checkpoint of step {step}, without optimizer state: {to.checkpoint_folder(step)}\n"
        f"export: {to.export}\n"
        f"to continue: ortlaunch train RECIPE --resume {to} train.max_steps=MORE"
    )


@torch.no_grad()
def _fill(model: LossModule, weights: dict[str, np.ndarray]) -> int:
    """Copy the weights into the model, and return how many are trained.

    Raises:
        CheckpointError: the model lacks a weight, or has a frozen one with other values.
    """
    here = dict(model.named_parameters())
    wrong = []
    for name, values in weights.items():
        parameter = here.get(name)
        if parameter is None or tuple(parameter.shape) != values.shape:
            shape = "no such weight" if parameter is None else f"shape {list(parameter.shape)}"
            wrong.append(f"{name}: shape {list(values.shape)} in the artifacts, {shape} in the run")
        elif parameter.requires_grad:
            parameter.copy_(torch.from_numpy(values))
        elif not torch.equal(parameter, torch.from_numpy(values)):
            wrong.append(f"{name}: is not trained, and differs from that of the run")
    if wrong:
        raise CheckpointError("\n".join(["the checkpoint is of another model:", *wrong]))
    return sum(here[name].requires_grad for name in weights)
