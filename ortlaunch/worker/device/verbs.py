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
    place = DeviceFolder(request.artifacts)
    checkpoint = Path(request.checkpoint or "")
    to = Path(request.to or "")
    if request.verb == "average":
        from ortlaunch.worker.device.average import average

        average(place, [Path(path) for path in request.checkpoints], request.weights, to)
    elif request.verb == "export":
        from ortlaunch.worker.device.inference import export

        export(place, checkpoint, to)
    else:
        recipe = parse_resolved(request.recipe or "")
        _with_data(request.verb, place, recipe, (checkpoint, to), request.steps)


def _with_data(
    verb: str, place: DeviceFolder, recipe: Recipe, paths: tuple[Path, Path], steps: int | None
) -> None:
    from transformers import AutoConfig

    from ortlaunch.worker.data import LoadedData
    from ortlaunch.worker.data.vocabulary import of_config
    from ortlaunch.worker.device.evaluate import evaluate
    from ortlaunch.worker.device.train import train
    from ortlaunch.worker.model.model import refuse_too_small

    add_factory_folders_to_path(recipe, place.path.absolute())
    config = (
        AutoConfig.from_pretrained(str(place)) if (place.path / "config.json").exists() else None
    )
    data = LoadedData(recipe, vocabulary=of_config(config, recipe.model.task))
    # Only the needed part is read: a device may not have the rest.
    _ = data.train if verb == "train" else data.evaluation
    for note in take_cache_notes():
        print(note)
    if config is not None:
        refuse_too_small(recipe, data, config)
    if verb == "train":
        train(place, recipe, data, *paths, steps)
    else:
        evaluate(place, recipe, data, paths[0])
