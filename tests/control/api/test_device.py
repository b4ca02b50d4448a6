"""Tests of `ortlaunch device`: refusals before a process is started, and the request to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ortlaunch.api import device
from ortlaunch.base.errors import InputError, RecipeError
from ortlaunch.recipe import dump_recipe_yaml, parse_resolved_recipe
from ortlaunch.run_folder.device_folder import DeviceFolder
from ortlaunch.tables import tasks
from ortlaunch.tables.tasks import DeviceRequest
from tests import makers
from tests.control.typed import Run


@pytest.fixture
def artifacts(tmp_path: Path) -> DeviceFolder:
    """A folder that has all files of training artifacts by name."""
    place = DeviceFolder(tmp_path / "artifacts")
    place.path.mkdir()
    words = {
        "train": "python-docs",
        "tokenizer": {"train": "wordpiece", "vocab_size": 300},
        "sequence_length": 24,
    }
    config = {"model_type": "bert"}
    place.recipe.write_text(
        dump_recipe_yaml(makers.recipe(model={"task": "masked-lm", "config": config}, data=words))
    )
    for path in (place.training, place.eval, place.optimizer, place.description, place.checkpoint):
        path.touch()
    (place.path / "tokenizer_config.json").touch()
    return place


def test_what_is_started(artifacts: DeviceFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process gets the artifacts' recipe, tokenizer and checkpoint, and the client's data."""
    started: list[Any] = []
    # The process itself would need the artifacts' contents; 3 stands for its exit status.
    monkeypatch.setattr(tasks, "run_task_alone", lambda request: started.append(request) or 3)
    mine = ("data.train.format=text", "data.train.path=[mine.txt]", "train.max_steps=7")
    assert (
        device.run_device_verb_in_process(
            DeviceRequest("train", str(artifacts), to="after", steps=5), mine
        )
        == 3
    )
    (given,) = started
    recipe = parse_resolved_recipe(given.recipe)
    assert (recipe.data.tokenizer, recipe.train.max_steps) == (str(artifacts), 7)
    assert (given.checkpoint, given.to, given.steps) == (str(artifacts.checkpoint), "after", 5)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        # The graphs are fixed at the export, so the model cannot change on a device.
        (("train", "model.config.num_hidden_layers=3"), "on a device these can be set: data, "),
        (("train", "--checkpoint=nothing"), "no such checkpoint: nothing"),
        (("train", "--to=."), "--to: . is a folder; give the file of a checkpoint, as checkpoint"),
        # A file that is no checkpoint must not be replaced.
        (("train", "--to=good.yaml"), "--to: good.yaml exists already, and is not a checkpoint of onnxruntime"),
        (("train", "--to=good.yaml/new"), "--to: cannot write in good.yaml: "),
        (("export", "--to=."), ". exists already"),
        # A mean of a single checkpoint is most likely a typing error.
        (("average", "checkpoint"), "an average needs at least two checkpoints; got 1"),
        (("average", "one", "two", "--weights=1,x"), "--weights: got '1,x'; give numbers, as 100,250,80"),
        (("average", "one", "two", "--weights=1"), "--weights: got 1 for 2 checkpoints"),
        (("average", "one", "two"), "no such checkpoint: one"),
    ],
)  # fmt: skip
def test_refusals(
    words: tuple[str, ...], told: str, artifacts: DeviceFolder, ortlaunch: Run
) -> None:
    """Each wrong argument is refused with the remedy, before a process is started."""
    ended = ortlaunch("device", words[0], str(artifacts), *words[1:])
    assert (ended.status, told in ended.err) == (2, True), ended.err


def test_the_folder_of_a_result_is_made_before_any_step(
    artifacts: DeviceFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a result exists before a process starts, and an earlier result is replaced."""
    there: list[bool] = []

    def run(request: DeviceRequest) -> int:
        there.append(Path(str(request.to)).parent.is_dir())
        return 0

    monkeypatch.setattr(tasks, "run_task_alone", run)
    clients = (str(artifacts.checkpoint),) * 2
    earlier = tmp_path / "rounds/2/mean"
    device.run_device_verb_in_process(
        DeviceRequest("train", str(artifacts), to=str(tmp_path / "out/client")), ()
    )
    device.average_client_checkpoints(
        DeviceRequest("average", str(artifacts), to=str(earlier), checkpoints=clients)
    )
    # The mark of onnxruntime's checkpoints, in bytes 4 to 7.
    earlier.write_bytes(b"\x14\0\0\0ODTC")
    device.average_client_checkpoints(
        DeviceRequest("average", str(artifacts), to=str(earlier), checkpoints=clients)
    )
    assert there == [True, True, True]


def test_no_artifacts_and_a_mistyped_key(artifacts: DeviceFolder) -> None:
    """Missing files of the artifacts are named, and so is the nearest key to an unknown one."""
    artifacts.eval.unlink()
    with pytest.raises(
        InputError,
        match=r"it lacks eval_model\.onnx; ortlaunch export RUN --format ondevice writes",
    ):
        device.run_device_verb_in_process(DeviceRequest("train", str(artifacts)), ())
    artifacts.eval.touch()
    with pytest.raises(RecipeError, match=r"did you mean data\.sequence_length"):
        device.run_device_verb_in_process(
            DeviceRequest("train", str(artifacts)), ("data.sequence_lenght=8",)
        )
