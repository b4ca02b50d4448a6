"""The subcommands of `ortlaunch device`."""

from __future__ import annotations

from pathlib import Path

from ortlaunch.base.cache import take_cache_notes
from ortlaunch.recipe import Recipe, parse_resolved_recipe
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.tables.tasks import DeviceRequest
from ortlaunch.user_modules import append_factory_folders_to_sys_path


def run(request: DeviceRequest) -> None:
    """Run the requested subcommand."""
    # Imports are local: a subcommand must not need packages that only another one uses.
    device_folder = DeviceFolder(request.artifacts)
    checkpoint = Path(request.checkpoint or "")
    target_path = Path(request.to or "")
    if request.verb == "average":
        from ortlaunch.worker.device.average import average_client_checkpoints_write_and_print

        average_client_checkpoints_write_and_print(
            device_folder,
            [Path(path) for path in request.checkpoints],
            request.weights,
            target_path,
        )
    elif request.verb == "export":
        from ortlaunch.worker.device.inference import write_checked_inference_folder

        write_checked_inference_folder(device_folder, checkpoint, target_path)
    else:
        recipe = parse_resolved_recipe(request.recipe or "")
        _load_data_and_train_or_evaluate(
            request.verb, device_folder, recipe, (checkpoint, target_path), request.steps
        )


def _load_data_and_train_or_evaluate(
    subcommand: str,
    device_folder: DeviceFolder,
    recipe: Recipe,
    checkpoint_and_target_path: tuple[Path, Path],
    max_steps: int | None,
) -> None:
    from transformers import AutoConfig

    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.data.vocabulary import vocabulary_of_transformers_config
    from ortlaunch.worker.device.evaluate import evaluate_device_checkpoint_write_and_print
    from ortlaunch.worker.device.train import train_device_checkpoint_and_save
    from ortlaunch.worker.model.model import refuse_data_exceeding_model_sizes

    append_factory_folders_to_sys_path(recipe, device_folder.path.absolute())
    config = (
        AutoConfig.from_pretrained(str(device_folder))
        if (device_folder.path / "config.json").exists()
        else None
    )
    data = LoadedData(
        recipe, vocabulary=vocabulary_of_transformers_config(config, recipe.model.task)
    )
    # Only the needed part is read: a device may not have the rest.
    _ = data.train if subcommand == "train" else data.evaluation
    for note in take_cache_notes():
        print(note)
    if config is not None:
        refuse_data_exceeding_model_sizes(recipe, data, config)
    if subcommand == "train":
        train_device_checkpoint_and_save(
            device_folder, recipe, data, *checkpoint_and_target_path, max_steps
        )
    else:
        evaluate_device_checkpoint_write_and_print(
            device_folder, recipe, data, checkpoint_and_target_path[0]
        )
