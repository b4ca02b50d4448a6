"""The subcommands of `ortlaunch device`."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.cache import take_cache_notes
from ortlaunch.recipe import Recipe, parse_resolved
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.tasks import DeviceRequest
from ortlaunch.user_modules import add_factory_folders_to_path


def run(request: DeviceRequest) -> None:
    """Run the requested subcommand."""
    # Imports are local: a subcommand must not need packages that only another one uses.
    device_folder = DeviceFolder(request.artifacts)
    checkpoint = Path(request.checkpoint or "")
    target_path = Path(request.to or "")
    if request.verb == "average":
        from ortlaunch.worker.device.average import write_average

        write_average(
            device_folder,
            [Path(path) for path in request.checkpoints],
            request.weights,
            target_path,
        )
    elif request.verb == "export":
        from ortlaunch.worker.device.inference import export_for_inference

        export_for_inference(device_folder, checkpoint, target_path)
    else:
        recipe = parse_resolved(request.recipe or "")
        _run_with_data(
            request.verb, device_folder, recipe, (checkpoint, target_path), request.steps
        )


def _run_with_data(
    subcommand: str,
    device_folder: DeviceFolder,
    recipe: Recipe,
    paths: tuple[Path, Path],
    max_steps: int | None,
) -> None:
    from transformers import AutoConfig

    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.data.vocabulary import vocabulary_of_config
    from ortlaunch.worker.device.evaluate import evaluate_checkpoint
    from ortlaunch.worker.device.train import train_on_device
    from ortlaunch.worker.model.model import refuse_data_beyond_model

    add_factory_folders_to_path(recipe, device_folder.path.absolute())
    config = (
        AutoConfig.from_pretrained(str(device_folder))
        if (device_folder.path / "config.json").exists()
        else None
    )
    data = LoadedData(recipe, vocabulary=vocabulary_of_config(config, recipe.model.task))
    # Only the needed part is read: a device may not have the rest.
    _ = data.train if subcommand == "train" else data.evaluation
    for note in take_cache_notes():
        print(note)
    if config is not None:
        refuse_data_beyond_model(recipe, data, config)
    if subcommand == "train":
        train_on_device(device_folder, recipe, data, *paths, max_steps)
    else:
        evaluate_checkpoint(device_folder, recipe, data, paths[0])
